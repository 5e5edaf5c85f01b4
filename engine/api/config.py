"""What the endpoint is told by its operator: names, limits, timeouts, keys. Read once; keys can be reloaded."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine import __version__
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on what one client can make the endpoint do. Every one answers with 400 or 413 and names its number."""

    max_body_bytes: int = 4 << 20  # counted on the bytes read, whatever Content-Length says
    max_buffered_bytes: int = 64 << 20  # bodies of all requests that are still being parsed or tokenized; then 429
    large_work_bytes: int = 128 << 10  # work on more than this waits in a lane of its own, behind its like
    max_large_backlog_bytes: int = 16 << 20  # of that lane; a further large body gets 429
    max_json_depth: int = 32
    max_json_containers: int = 50_000  # lists and objects of one body
    max_prompts: int = 64
    max_n: int = 16
    max_choices: int = 128  # prompts x n of one request
    max_messages: int = 4096
    max_template_kwargs: int = 64
    max_template_kwargs_bytes: int = 16 << 10  # as JSON
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_detect_bytes: int = 64 << 10  # /encoding/detect looks at this many bytes
    max_connections: int = 1024


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds."""

    header: float = 10.0  # from the first byte (or the connection) to the end of the request's headers
    body: float = 30.0  # from the end of the headers to the end of the body
    keepalive: float = 75.0  # an idle connection between two requests
    stall: float = 30.0  # a reader that takes nothing off a full write buffer for this long is cut off
    request: float = 600.0  # default deadline of one request
    max_request: float = 3600.0  # the most a client may ask for with `timeout`
    deadline_grace: float = 2.0  # engine-core owns the deadline; engine-api enforces it this much later if it is silent
    heartbeat: float = 10.0  # no message of engine-core for this long: not ready
    control: float = 120.0  # golden and checksum
    drain: float = 30.0  # after SIGTERM, for the requests in flight
    fast_drain: float = 1.0  # after a second SIGTERM or SIGINT
    linger: float = 2.0  # the rest of a refused body is read and dropped this long, so that the refusal is seen
    sse_ping: float = 15.0  # a comment line on a stream that has been silent for this long


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """`auth`: "auto" = keys if a key file is given, open on loopback without one; "keys" = keys or refuse to start;
    "none" = open anywhere, to be written out by the operator."""

    model: str
    max_model_len: int  # used until engine-core says its own (Ready)
    eos_token_ids: tuple[int, ...] = ()
    created: int = 0  # unix seconds, shown by /v1/models
    version: str = __version__
    default_max_tokens: int = 1024  # chat, /infer and /generate without max_tokens (cut to the context that is left)
    completions_max_tokens: int = 16  # /v1/completions without max_tokens, as OpenAI's
    auth: Literal["auto", "keys", "none"] = "auto"
    key_file: Path | None = None  # lines "<sha256 hex of the key> [label]"
    admin_key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_prompts: bool = False
    coalesce_seconds: float = 0.02  # tokens of one stream due within this share an event ...
    coalesce_min_streams: int = 8  # ... when at least this many streams are open
    inline_encode_chars: int = 4096  # longer text is tokenized off the event loop
    tokenizer_threads: int = 2
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)


def is_loopback(host: str) -> bool:
    """True for an address (or the name localhost) that only this host can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").split("%")[0]).is_loopback
    except ValueError:
        return False


def check_bind(config: ApiConfig, host: str) -> None:
    """Refuse to serve the world without keys unless that was written out; ConfigError says what to write."""
    if config.auth == "keys" and config.key_file is None:
        raise ConfigError('auth = "keys" needs a key file', hint="give --key-file FILE, or --auth none to serve openly")
    if config.auth == "none" and config.key_file is not None:
        raise ConfigError('auth = "none" contradicts the key file', hint="leave out --auth none or --key-file")
    if config.auth == "auto" and config.key_file is None and not is_loopback(host):
        raise ConfigError(
            f"refusing to bind {host} without API keys: anyone who reaches this host could use the model",
            hint="give --key-file FILE (lines of sha256 hex), bind 127.0.0.1, or say --auth none",
        )
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("TLS needs both tls_cert and tls_key", hint="give both files or neither")


def tls_context(config: ApiConfig) -> ssl.SSLContext | None:
    """Server context from the certificate and key files, or None for plain HTTP."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, config.tls_cert, config.tls_key)
    return context


_WEAK = "OpenSSL takes no such certificate at its security level: make a new one with {} (renew it with its issuer)"
_TLS_HINTS = {
    "EE_KEY_TOO_SMALL": _WEAK.format("an RSA key of 2048 bits or more, or an ECDSA key"),
    "CA_KEY_TOO_SMALL": _WEAK.format("an issuer that has an RSA key of 2048 bits or more"),
    "CA_MD_TOO_WEAK": _WEAK.format("a SHA-256 signature"),
    "KEY_VALUES_MISMATCH": "the key is another certificate's: put those there that belong together",
}
"""What to do, by OpenSSL's name of the reason (sslerr.h, x509err.h); its own text is in the message."""


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """ConfigError for a pair that cannot be used, an encrypted key too: OpenSSL would ask the terminal for its pass
    phrase, and nobody is there."""

    def no_pass_phrase() -> str:
        raise ConfigError(
            f"the TLS key {key} is encrypted, and a service has nobody to ask for its pass phrase",
            hint="decrypt it: `openssl pkey -in KEY -out KEY.plain`, give it mode 0600 and put it in its place",
        )

    try:
        context.load_cert_chain(certificate, key, password=no_pass_phrase)
    except (OSError, ssl.SSLError) as exc:
        reason = getattr(exc, "reason", None) or ""
        raise ConfigError(
            f"cannot load the TLS certificate {certificate} with key {key}: {exc}",
            hint=_TLS_HINTS.get(reason, "both must be PEM, readable by this user, and belong together"),
        ) from exc

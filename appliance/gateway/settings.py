"""What one gateway is told: its part of appliance.toml, and the credentials that systemd hands it.

Keys: `--keys FILE`, else $CREDENTIALS_DIRECTORY/api-keys (LoadCredential=). systemd copies a credential once, at start,
so only keys named with --keys can be changed by SIGHUP. TLS: tls-cert and tls-key, from the same directory.
"""

from __future__ import annotations

import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

from appliance import command
from appliance.certificate import CertificateError, Validity, problem_of_dates, validities
from appliance.command import Runner
from appliance.credentials import CredentialError, refuse_unusable
from appliance.hostconfig import Gateway, HostConfig, ports
from appliance.log import ApplianceError, ExitCode
from appliance.paths import Paths
from appliance.statefile import StateError, read_bounded
from engine.api.auth import KeyStore, bearer
from engine.api.config import ApiConfig, Limits, Timeouts, is_loopback, tls_context
from engine.errors import EngineError

MIN_BUFFERED_BYTES = 64 << 20
_MAX_CREDENTIAL_BYTES = 1 << 20  # systemd takes no more
_CREDENTIAL_HINT = "it must be a regular file in PEM, of root, mode 0600"
SPARE_CONNECTIONS = 1024  # beyond max_in_flight: idle ones, and those that are told 429


class Refused(ApplianceError):
    """This configuration is not served; a restart does not help."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True, slots=True)
class Settings:
    """One gateway's. Timeouts beside those of `gateway` in seconds."""

    slot: str
    paths: Paths
    gateway: Gateway
    api: ApiConfig  # keys, TLS, limits and timeouts, for the parts that engine/api shares with us
    host: str
    port: int
    admin_port: int
    head_timeout: float = 3700.0  # for the first byte of an engine's answer; a client may ask for an hour
    silence_timeout: float = 60.0  # an engine sends a comment every 15 s: a stream silent for so long is cut
    waiting_comment: float = 10.0  # between ": waiting" comments while a stream waits for an engine

    @property
    def public_metrics(self) -> bool:
        return is_loopback(self.host)

    @property
    def admin_exposed(self) -> bool:
        """/metrics can be reached from outside: then its listener asks for a key, and has TLS as the public one."""
        return not is_loopback(self.gateway.admin_host)

    @property
    def host_key(self) -> str:
        """The key of appliance.toml that `host` is from."""
        return "gateway.canary_host" if self.slot == "canary" else "gateway.host"


def make_settings(
    config: HostConfig, slot: str, paths: Paths, *, keys: Path | None = None, credentials: Path | None = None
) -> Settings:
    """`credentials`: a directory of them instead of $CREDENTIALS_DIRECTORY. Refused: TLS without certificate or key."""
    gateway = config.gateway
    canary = slot == "canary"
    handed = os.environ.get("CREDENTIALS_DIRECTORY")
    directory = credentials or (Path(handed) if handed else None)
    keys = keys or _credential(directory, "api-keys")
    certificate = key = None
    if gateway.tls:
        certificate, key = _credential(directory, "tls-cert"), _credential(directory, "tls-key")
        if not _filled(certificate) or not _filled(key):
            raise Refused(
                "gateway.tls is true, but there is no certificate and key",
                hint=f"put them there, as PEM: {paths.etc}/credentials/tls-cert and tls-key (root, mode 0600); or set "
                "gateway.tls = false",
            )
    api = ApiConfig(
        model="",
        max_model_len=1,
        auth=gateway.auth,
        key_file=None if gateway.auth == "none" else keys,
        tls_cert=certificate,
        tls_key=key,
        limits=Limits(
            max_body_bytes=gateway.max_body_bytes,
            max_buffered_bytes=max(MIN_BUFFERED_BYTES, 4 * gateway.max_body_bytes),
            max_connections=gateway.max_in_flight + SPARE_CONNECTIONS,
        ),
        timeouts=Timeouts(drain=gateway.drain_timeout),
    )
    return Settings(
        slot=slot,
        paths=paths,
        gateway=gateway,
        api=api,
        host=gateway.canary_host if canary else gateway.host,
        port=gateway.canary_port if canary else gateway.port,
        admin_port=gateway.admin_port + canary,
        head_timeout=max(3600.0, config.engine.request_timeout) + 100.0,
    )


def check_startable(config: HostConfig, paths: Paths, credentials: Path) -> tuple[Settings, ssl.SSLContext | None]:
    """Refused, as the gateways would refuse it at their start: beyond loopback without keys, TLS without a certificate
    that can be used."""
    for slot in ("stable", "canary"):
        settings = make_settings(config, slot, paths, credentials=credentials)
        Access(settings)
    return settings, make_tls(settings)


def check_servable(config: HostConfig, paths: Paths, credentials: Path) -> list[Validity]:
    """As `check_startable`, and refused also for a certificate that clients refuse today, which a gateway serves all
    the same (a restart must not make it worse). How long the certificates are valid; empty without TLS."""
    found, problem = look_at_certificate(*check_startable(config, paths, credentials))
    if problem:
        raise Refused(problem, hint="clients refuse it: put a valid one there and reload the gateways")
    return found


def check_ports(config: HostConfig, run: Runner = command.run, proc: Path = Path("/proc")) -> None:
    """Refused: a port of this host's gateways that only root may have, where their unit was not given that right."""
    try:
        first = int((proc / "sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        return  # the kernel will say
    low = {key: port for key, port in ports(config).items() if port < first}
    if not low:
        return
    argv = ["systemctl", "show", "--property=AmbientCapabilities", "--value", "--", "appliance-gateway@stable.service"]
    if "cap_net_bind_service" in run(argv, timeout=15.0).text:
        return
    key, port = next(iter(low.items()))
    raise Refused(
        f"{key.removesuffix(' + 1')}: {port} is below {first} (net.ipv4.ip_unprivileged_port_start), and the gateways "
        "have no CAP_NET_BIND_SERVICE",
        hint="install the drop-in examples/low-port.conf first (/usr/share/doc/appliance), or choose another port",
    )


def make_tls(settings: Settings) -> ssl.SSLContext | None:
    """None for plain HTTP. Refused: a certificate or key that cannot be used."""
    try:
        return tls_context(settings.api)
    except EngineError as error:
        raise Refused(error.message, hint=error.hint) from None


def look_at_certificate(settings: Settings, tls: ssl.SSLContext | None) -> tuple[list[Validity], str | None]:
    """(validities, why clients would refuse it now); ([], None) for plain HTTP."""
    path = settings.api.tls_cert
    if tls is None or path is None:
        return [], None
    try:
        found = validities(tls, path)
    except (CertificateError, OSError) as error:
        return [], f"the TLS certificate {path} cannot be used: {error}"
    problem = problem_of_dates(found, time.time())
    return found, problem and f"the TLS certificate {path}: {problem}"


def _credential(directory: Path | None, name: str) -> Path | None:
    """None where it is not there. Refused where it is there in a form that systemd could not load: the unit would be
    handed an empty stand-in, and nobody may take that for "no keys"."""
    if directory is None:
        return None
    path = directory / name
    try:
        refuse_unusable(path)
        return path if path.exists() else None
    except CredentialError as error:
        raise Refused(error.message, hint=error.hint) from None


def _filled(path: Path | None) -> bool:
    """The unit puts an empty line where the admin gave no file."""
    if path is None:
        return False
    try:
        return bool(read_bounded(path, _MAX_CREDENTIAL_BYTES).strip())
    except StateError as error:
        raise Refused(error.message, hint=_CREDENTIAL_HINT) from None
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}", hint=_CREDENTIAL_HINT) from None


class Access:
    """Who may use the endpoint. auth = "auto": as soon as there was one key, keys are needed until the process ends;
    without any it is open, on loopback only."""

    def __init__(self, settings: Settings) -> None:
        self._auth, file = settings.gateway.auth, settings.api.key_file
        try:
            self.keys = KeyStore(file)
        except EngineError as error:
            raise Refused(error.message, hint=error.hint) from None
        self._seen = bool(len(self.keys))
        add = f"""add a key to {settings.paths.etc}/credentials/api-keys (printf %s "$KEY" | sha256sum)"""
        for key, host in ((settings.host_key, settings.host), ("gateway.admin_host", settings.gateway.admin_host)):
            if self.open and self._auth == "auto" and not is_loopback(host):
                raise Refused(
                    f"refusing to bind {host} without API keys ({key}): anyone who reaches this host could use it",
                    hint=f'{add}, set {key} = "127.0.0.1", or gateway.auth = "none"',
                )
        if self._auth == "keys" and not self._seen:
            where = f" in {file}" if file else ""
            raise Refused(f'gateway.auth is "keys", but there is no API key{where}', hint=f'{add}, or auth = "auto"')

    @property
    def open(self) -> bool:
        """No key is asked for."""
        return self._auth == "none" or (self._auth == "auto" and not self._seen)

    def label(self, authorization: str | None) -> str | None:
        """Of the key in an Authorization header; None where it holds none of ours."""
        token = bearer(authorization)
        return self.keys.match(token) if token is not None else None

    @property
    def any_host(self) -> bool:
        """Host names of others are served: somebody decided who may come."""
        return self._auth == "none" or not self.open

    def reload(self) -> None:
        """Read the keys again; ConfigError leaves those in force."""
        self.keys.reload()
        self._seen = self._seen or bool(len(self.keys))

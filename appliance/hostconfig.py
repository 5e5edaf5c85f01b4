"""appliance.toml: what the admin decides. Strict: an unknown key, a wrong type or a value out of range is an error
that names the file, the key and what is allowed. Absent keys have the defaults below; there is no other place for them.

Durations are seconds, sizes are bytes or text like "24G" (powers of 1024, as systemd.resource-control(5)).
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.log import ApplianceError, ExitCode

SCHEMA = 1
_SIZE = re.compile(r"(\d{1,15})([KMGT]?)")
_SCALE = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_MAX_BYTES = 1 << 20

Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(ge=0.05, le=86400)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class HostConfigError(ApplianceError):
    """appliance.toml cannot be used; names file and key. A restart does not help, so units do not retry it."""

    exit_code = ExitCode.REFUSED


class _Table(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    pass


class Gpus(_Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    backend: Literal["cuda", "cpu"] = "cuda"  # "cpu" only where it is written here: never a fallback
    devices: Literal["all"] | list[str] = "all"  # UUIDs (GPU-...) that the appliance may use
    cpu_slots: Annotated[int, Meta(ge=1, le=16)] = 1  # backend "cpu": how many engines


class Engine(_Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Of every engine on this host. A release may narrow `options`."""

    placement: Literal["shared", "exclusive"] = "shared"  # may two releases run on one GPU at the same time?
    gpu_memory_fraction: Annotated[float, Meta(ge=0.05, le=0.95)] | None = None  # default: shared 0.45, exclusive 0.9
    max_model_len: Count | None = None
    max_batch_seqs: Annotated[int, Meta(ge=1, le=256)] | None = None
    max_queued_requests: Count | None = None
    request_timeout: Seconds = 600.0
    drain_timeout: Seconds = 30.0  # what in-flight requests get; then they are replayed elsewhere
    start_timeout: Seconds = 600.0  # without progress of the load
    stall_timeout: Seconds = 60.0  # no step while work is queued: the engine is killed and started again
    arguments: list[str] = []  # further options of `python -m engine`, last
    memory_max: str = "auto"  # of the scope; auto: model bytes + 4 GiB (+ the KV pool with backend "cpu")
    cpu_quota: Annotated[int, Meta(ge=1, le=100_000)] | None = None  # percent of one CPU; default no quota
    cpu_weight: Annotated[int, Meta(ge=1, le=10_000)] = 100
    allowed_cpus: str = "auto"  # "0-15,32"; auto: the GPU's NUMA node, where there is one
    tasks_max: Annotated[int, Meta(ge=16, le=100_000)] = 1024


class Restart(_Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """When an engine ends by itself."""

    first_delay: Seconds = 1.0  # doubled each time
    max_delay: Seconds = 60.0
    limit: Count = 5  # ends within `window`; after that it stays down until somebody asks
    window: Seconds = 600.0


class Gateway(_Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Port = 8000  # stable
    canary_host: str = "127.0.0.1"
    canary_port: Port = 8001
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    auth: Literal["auto", "keys", "none"] = "auto"  # auto: keys if there are any; beyond loopback they must be there
    tls: bool = False  # certificate and key by LoadCredential (tls-cert, tls-key)
    max_body_bytes: Annotated[int, Meta(ge=1024, le=256 << 20)] = 4 << 20
    max_in_flight: Count = 1024  # a worker; more are answered 429
    max_waiting: Count = 256  # a worker: requests that wait for an engine; more are answered 503
    wait_timeout: Seconds = 120.0  # how long a request may wait for an engine before its first byte
    replay_timeout: Seconds = 300.0  # how long a begun stream may wait for an engine of its release
    retries: Annotated[int, Meta(ge=0, le=10)] = 3  # further engines or attempts a request may get
    drain_timeout: Seconds = 60.0
    admin_host: str = "127.0.0.1"  # of /metrics where the public listener is not loopback
    admin_port: Port = 9600  # canary: the next port
    metrics_buckets_seconds: list[Annotated[float, Meta(gt=0)]] = []  # further histogram edges, for judged limits


class HostConfig(_Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    schema: int = SCHEMA
    gpus: Gpus = Gpus()
    engine: Engine = Engine()
    restart: Restart = Restart()
    gateway: Gateway = Gateway()


def load_config(path: Path) -> HostConfig:
    """The checked configuration. A missing file is an error: an install writes one."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise HostConfigError(f"cannot read {path}: {error.strerror}", hint="the install writes it") from None
    if len(data) > _MAX_BYTES:
        raise HostConfigError(f"{path} is larger than {_MAX_BYTES} bytes", hint="this is no configuration")
    return parse_config(data, where=str(path))


def parse_config(data: bytes, *, where: str) -> HostConfig:
    """The checked configuration in `data`; `where` is named in errors."""
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise HostConfigError(
            f"{where}: not TOML: {error}", hint="see toml.io; `appliance config check` reads it"
        ) from None
    try:
        config = msgspec.convert(table, HostConfig)
    except msgspec.ValidationError as error:
        text, _, at = str(error).partition(" - at ")
        key = at.strip("`").removeprefix("$.") or "the top level"
        raise HostConfigError(f"{where}: {key}: {text}", hint=_hint(key)) from None
    for key, check in _CHECKS.items():
        section, name = key.split(".")
        if problem := check(getattr(getattr(config, section), name)):
            raise HostConfigError(f"{where}: {key}: {problem}", hint=_hint(key))
    if config.schema != SCHEMA:
        raise HostConfigError(f"{where}: schema: {config.schema} is not {SCHEMA}", hint="a newer version wrote it?")
    if config.gateway.port == config.gateway.canary_port:
        raise HostConfigError(f"{where}: gateway.canary_port: the same as gateway.port", hint="choose another port")
    return config


def parse_size(text: str) -> int | None:
    """Bytes of "512M", "24G", "1073741824"; None if it is no size."""
    matched = _SIZE.fullmatch(text)
    return int(matched[1]) << _SCALE[matched[2]] if matched and int(matched[1]) > 0 else None


def parse_cpus(text: str) -> list[int] | None:
    """CPU numbers of "0-3,8" (ascending, each once); None if it is no such list."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return None
        low, high = int(first), int(last if dash else first)
        if not low <= high < 8192:
            return None
        cpus.update(range(low, high + 1))
    return sorted(cpus)


def gpu_memory_fraction(engine: Engine) -> float:
    """What one engine may take of its GPU."""
    return engine.gpu_memory_fraction or (0.45 if engine.placement == "shared" else 0.9)


def _bad_size(text: str) -> str | None:
    return None if text == "auto" or parse_size(text) else f'{text!r} is neither "auto" nor a size like "24G"'


def _bad_cpus(text: str) -> str | None:
    return None if text == "auto" or parse_cpus(text) else f'{text!r} is neither "auto" nor a list like "0-15,32"'


def _bad_address(text: str) -> str | None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return f"{text!r} is no IP address"
    return None


def _bad_devices(devices: Any) -> str | None:
    if devices == "all":
        return None
    wrong = [uuid for uuid in devices if not re.fullmatch(r"GPU-[0-9a-f-]{8,40}", uuid)]
    if wrong:
        return f"{wrong[0]!r} is no GPU UUID like GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
    return None if devices and len(set(devices)) == len(devices) else "an empty list, or a UUID written twice"


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "gpus.devices": _bad_devices,
    "engine.memory_max": _bad_size,
    "engine.allowed_cpus": _bad_cpus,
    "gateway.host": _bad_address,
    "gateway.canary_host": _bad_address,
    "gateway.admin_host": _bad_address,
}


def _hint(key: str) -> str:
    section = key.split(".")[0]
    table = {"gpus": Gpus, "engine": Engine, "restart": Restart, "gateway": Gateway}.get(section)
    keys = ", ".join(table.__struct_fields__) if table else "schema, [gpus], [engine], [restart], [gateway]"
    return f"known in [{section}]: {keys}" if table else f"known: {keys}"

"""appliance.toml: what the admin decides. Strict: an unknown key, a wrong type or a value out of range is an error
that names the file, the key and what is allowed. Absent keys have the defaults below; there is no other place for them.

Durations are seconds, sizes are bytes or text like "24G" (powers of 1024, as systemd.resource-control(5)).
`appliance config defaults` prints all keys with the descriptions below.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import msgspec.inspect
from msgspec import Meta

from appliance.engine_arguments import bad_engine_arguments
from appliance.log import ApplianceError, ExitCode
from appliance.statefile import StateError, read_bounded
from appliance.tomlfile import NotToml, parse_toml

SCHEMA = 1
_SIZE = re.compile(r"([0-9]{1,15})([KMGT]?)")
_CPUS = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?")
_SCALE = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_MAX_BYTES = 1 << 20
_MIN_MEMORY_BYTES = 16 << 20  # no Python process starts in less: "24" was meant to be "24G"
_MAX_CPU = 8191  # NR_CPUS of the largest kernels
_MAX_FRACTION = 0.95  # of a GPU, for everything of ours on it

Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(ge=0.05, le=86400)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
ContextTokens = Annotated[int, Meta(ge=2, le=1_000_000)]  # one of prompt and one of output
StartSeconds = Annotated[float, Meta(ge=5, le=86400)]  # importing the engine alone takes a second or two
Edge = Annotated[float, Meta(gt=0, le=86400)]


def _is(text: str) -> Meta:
    """The description of a key, for `appliance config defaults`."""
    return Meta(description=text)


class HostConfigError(ApplianceError):
    """appliance.toml cannot be used; names file and key. A restart does not help, so units do not retry it."""

    exit_code = ExitCode.REFUSED


class _Table(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    pass


class Gpus(_Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Which GPUs the appliance may use."""

    backend: Annotated[Literal["cuda", "cpu"], _is("cpu only where it is written here: never a fallback")] = "cuda"
    devices: Annotated[Literal["all"] | list[str], _is("UUIDs (GPU-...) that the appliance may use")] = "all"
    cpu_slots: Annotated[int, Meta(ge=1, le=16, description="backend cpu: how many engines")] = 1

    def includes(self, uuid: str) -> bool:
        """May the appliance use the GPU that a slot is bound to? A launcher of another one refuses to start."""
        return self.backend == "cpu" or self.devices == "all" or uuid in self.devices


class Engine(_Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Of every engine on this host. A release may narrow the options."""

    placement: Annotated[
        Literal["shared", "exclusive"],
        _is("may two releases run on one GPU at the same time (a canary beside stable)?"),
    ] = "shared"
    gpu_memory_fraction: Annotated[
        Annotated[float, Meta(ge=0.05, le=_MAX_FRACTION)] | None,
        _is("of the GPU's memory, for one engine; without it 0.45 (shared) or 0.9 (exclusive)"),
    ] = None
    max_model_len: Annotated[ContextTokens | None, _is("tokens of prompt and output; without it the model's")] = None
    max_batch_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | None, _is("sequences that run at once; without it the engine's default")
    ] = None
    max_queued_requests: Annotated[Count | None, _is("more are answered 429; without it the engine's default")] = None
    request_timeout: Annotated[Seconds, _is("of one request")] = 600.0
    drain_timeout: Annotated[Seconds, _is("what requests in flight get; then they are replayed elsewhere")] = 30.0
    start_timeout: Annotated[StartSeconds, _is("without progress of the load")] = 600.0
    stall_timeout: Annotated[Seconds, _is("no step while work is queued: the engine is killed and started again")] = (
        60.0
    )
    arguments: Annotated[list[str], _is("further options of `python -m engine`, last")] = []
    memory_max: Annotated[
        str, _is('of the scope; "auto": model bytes + 4 GiB (+ the KV pool with backend cpu), or a size like "24G"')
    ] = "auto"
    cpu_quota: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None, _is("percent of one CPU; without it no quota")
    ] = None
    cpu_weight: Annotated[int, Meta(ge=1, le=10_000, description="CPUWeight of the scope")] = 100
    allowed_cpus: Annotated[str, _is('like "0-15,32"; "auto": the GPU\'s NUMA node, where there is one')] = "auto"
    tasks_max: Annotated[int, Meta(ge=16, le=100_000, description="TasksMax of the scope")] = 1024


class Restart(_Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """When an engine ends by itself."""

    first_delay: Annotated[Seconds, _is("doubled each time")] = 1.0
    max_delay: Annotated[Seconds, _is("where the doubling ends")] = 60.0
    limit: Annotated[Count, _is("ends within the window; after that it stays down until somebody asks")] = 5
    window: Annotated[Seconds, _is("in which the ends are counted")] = 600.0


class Gateway(_Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The HTTP endpoint."""

    host: Annotated[str, _is("address of the stable endpoint")] = "127.0.0.1"
    port: Annotated[Port, _is("of the stable endpoint")] = 8000
    canary_host: Annotated[str, _is("address of the canary's endpoint")] = "127.0.0.1"
    canary_port: Annotated[Port, _is("of the canary's endpoint")] = 8001
    workers: Annotated[int, Meta(ge=1, le=64, description="processes of each gateway")] = 1
    auth: Annotated[
        Literal["auto", "keys", "none"], _is("auto: keys if there are any; beyond loopback they must be there")
    ] = "auto"
    tls: Annotated[bool, _is("certificate and key by LoadCredential (tls-cert, tls-key)")] = False
    max_body_bytes: Annotated[int, Meta(ge=1024, le=256 << 20, description="of a request; more is answered 413")] = (
        4 << 20
    )
    max_in_flight: Annotated[Count, _is("of one worker; more are answered 429")] = 1024
    max_waiting: Annotated[Count, _is("of one worker: requests that wait for an engine; more are answered 503")] = 256
    wait_timeout: Annotated[Seconds, _is("how long a request may wait for an engine before its first byte")] = 120.0
    replay_timeout: Annotated[Seconds, _is("how long a begun stream may wait for an engine of its release")] = 300.0
    retries: Annotated[int, Meta(ge=0, le=10, description="further engines or attempts a request may get")] = 3
    drain_timeout: Annotated[Seconds, _is("what requests in flight get when the gateway stops")] = 60.0
    admin_host: Annotated[
        str, _is("address of /metrics where the public one is not loopback; beyond it keys are needed")
    ] = "127.0.0.1"
    admin_port: Annotated[Port, _is("of /metrics; the canary's is the next one")] = 9600
    metrics_buckets_seconds: Annotated[list[Edge], _is("further histogram edges, for judged limits")] = []


class HostConfig(_Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    schema: Annotated[int, _is("of this file")] = SCHEMA
    gpus: Gpus = Gpus()
    engine: Engine = Engine()
    restart: Restart = Restart()
    gateway: Gateway = Gateway()


SECTIONS: dict[str, type[_Table]] = {"gpus": Gpus, "engine": Engine, "restart": Restart, "gateway": Gateway}


def load_config(path: Path) -> HostConfig:
    """The checked configuration. A missing file is an error: an install writes one."""
    try:
        data = read_bounded(path, _MAX_BYTES)
    except OSError as error:
        raise HostConfigError(
            f"cannot read {path}: {error.strerror}", hint="the install writes it; `appliance config defaults` shows one"
        ) from None
    except StateError as error:
        raise HostConfigError(error.message, hint="this is no configuration") from None
    table = _read_table(data, str(path))
    if not table:
        raise HostConfigError(
            f"{path}: schema: there is no key at all in this file: it is empty or was cut off",
            hint=f"write schema = {SCHEMA} and what differs from `appliance config defaults`, or restore the file",
        )
    return _checked(table, str(path))


def parse_config(data: bytes, *, where: str) -> HostConfig:
    """The checked configuration in `data`; `where` is named in errors."""
    return _checked(_read_table(data, where), where)


def _read_table(data: bytes, where: str) -> dict[str, Any]:
    try:
        return parse_toml(data, where)
    except NotToml as error:
        raise HostConfigError(error.message, hint=error.hint) from None


def _checked(table: dict[str, Any], where: str) -> HostConfig:
    schema = table.get("schema", SCHEMA)
    if type(schema) is not int or schema != SCHEMA:
        newer = type(schema) is int and schema > SCHEMA
        hint = f"this version reads schema {SCHEMA}"
        hint += "; a newer one wrote the file" if newer else f": write schema = {SCHEMA}, or leave it out"
        raise HostConfigError(f"{where}: schema: {schema!r} is not {SCHEMA}", hint=hint)
    _refuse_unknown_keys(table, where)
    try:
        config = msgspec.convert(table, HostConfig)
    except msgspec.ValidationError as error:
        raise _wrong_value(table, str(error), where) from None
    for key, check in _CHECKS.items():
        section, name = key.split(".")
        if problem := check(getattr(getattr(config, section), name)):
            raise HostConfigError(f"{where}: {key}: {problem}", hint=_meaning(key))
    for check_together in (_bad_ports, _bad_together):
        if found := check_together(config):
            raise HostConfigError(f"{where}: {found[0]}: {found[1]}", hint=_meaning(found[0]))
    return config


def _refuse_unknown_keys(table: dict[str, Any], where: str) -> None:
    for name, value in table.items():
        if name not in HostConfig.__struct_fields__:
            raise HostConfigError(f"{where}: {name}: unknown key{_suggest(name, value)}", hint=_hint(name))
        for key in value if name in SECTIONS and isinstance(value, dict) else ():
            if key not in SECTIONS[name].__struct_fields__:
                meant = _closest(key, SECTIONS[name].__struct_fields__)
                raise HostConfigError(f"{where}: {name}.{key}: unknown key{meant}", hint=_hint(f"{name}.{key}"))


def _suggest(name: str, value: Any) -> str:
    """What somebody may have meant by an unknown key outside the tables."""
    if isinstance(value, dict):
        return _closest(name, SECTIONS, "[{}]")
    owners = [f"{section}.{name}" for section, keys in SECTIONS.items() if name in keys.__struct_fields__]
    return f"; did you mean {' or '.join(owners)}?" if owners else ""


def _closest(name: str, known: Iterable[str], form: str = "{}") -> str:
    from difflib import get_close_matches  # only for a message: launchers stay small

    close = get_close_matches(name, known, 1, 0.6)
    return f"; did you mean {form.format(close[0])}?" if close else ""


def _wrong_value(table: dict[str, Any], text: str, where: str) -> HostConfigError:
    """The message for a value of a wrong type or out of range: key, value, and what is allowed."""
    path = text.partition(" - at ")[2].strip("`").removeprefix("$.")
    key = path.partition("[")[0]
    section, _, name = key.partition(".")
    value, allowed = table[section], "a table"
    if name:
        value = value[name]
        allowed = allowed_values(SECTIONS[section], name)
    return HostConfigError(f"{where}: {key}: {str(repr(value))[:80]} is not {allowed}", hint=_meaning(key))


def allowed_values(table: type[_Table], name: str) -> str:
    """What a key may be, in words: `a whole number from 1 to 65535`."""
    return _in_words(_field(table, name).type)


def description(table: type[_Table], name: str) -> str:
    """What a key means, from the table above."""
    return str((getattr(_field(table, name).type, "extra_json_schema", None) or {}).get("description", ""))


def _field(table: type[_Table], name: str) -> msgspec.inspect.Field:
    kind = msgspec.inspect.type_info(table)
    assert isinstance(kind, msgspec.inspect.StructType)
    return next(field for field in kind.fields if field.name == name)


def _in_words(kind: Any) -> str:
    inspect = msgspec.inspect
    if isinstance(kind, inspect.Metadata):
        return _in_words(kind.type)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_in_words(part) for part in kind.types if not isinstance(part, inspect.NoneType))
    if isinstance(kind, inspect.LiteralType):
        words = [f'"{value}"' for value in kind.values]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if isinstance(kind, inspect.ListType):
        return f"a list, each {_in_words(kind.item_type)}"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        low = "" if kind.ge is None else f" from {kind.ge:g}"
        low = low if kind.gt is None else f" above {kind.gt:g}"
        high = "" if kind.le is None else f" to {kind.le:.12g}"
        return noun + low + high
    return "true or false" if isinstance(kind, inspect.BoolType) else "text in quotes"


def parse_size(text: str) -> int | None:
    """Bytes of "512M", "24G", "1073741824"; None if it is no size."""
    matched = _SIZE.fullmatch(text)
    return int(matched[1]) << _SCALE[matched[2]] if matched and int(matched[1]) > 0 else None


def parse_cpus(text: str) -> list[int] | None:
    """CPU numbers of "0-3,8" (ascending, each once); None if it is no such list."""
    cpus: set[int] = set()
    for part in text.split(",", _MAX_CPU) if len(text) <= 1 << 15 else [""]:
        if not _CPUS.fullmatch(part.strip(" ")):
            return None
        first, _, last = part.strip(" ").partition("-")
        low, high = int(first), int(last or first)
        if not low <= high <= _MAX_CPU:
            return None
        cpus.update(range(low, high + 1))
    return sorted(cpus)


def gpu_memory_fraction(engine: Engine) -> float:
    """What one engine may take of its GPU."""
    return engine.gpu_memory_fraction or (0.45 if engine.placement == "shared" else 0.9)


def _bad_size(text: str) -> str | None:
    if text == "auto":
        return None
    size = parse_size(text)
    if size is None:
        return f'{text!r} is neither "auto" nor a size like "24G"'
    if size < _MIN_MEMORY_BYTES:
        return f'{text!r} is {size} bytes, which no engine starts in; did you mean "{text.rstrip("KMGT")}G"?'
    return None


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
    for uuid in devices:
        if uuid.startswith("MIG-"):
            return f"{uuid!r} is a MIG instance; MIG is not supported, use whole GPUs"
        if not re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid):
            return f"{uuid!r} is no GPU UUID like GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
    if not devices:
        return 'an empty list: no GPU could be used; "all" or at least one UUID'
    return None if len(set(devices)) == len(devices) else "a UUID is written twice"


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "gpus.devices": _bad_devices,
    "engine.arguments": bad_engine_arguments,
    "engine.memory_max": _bad_size,
    "engine.allowed_cpus": _bad_cpus,
    "gateway.host": _bad_address,
    "gateway.canary_host": _bad_address,
    "gateway.admin_host": _bad_address,
}


def ports(config: HostConfig) -> dict[str, int]:
    """What the gateways may listen on: key -> port. The canary's metrics are on the port after admin_port."""
    gateway = config.gateway
    return {
        "gateway.port": gateway.port,
        "gateway.canary_port": gateway.canary_port,
        "gateway.admin_port": gateway.admin_port,
        "gateway.admin_port + 1": gateway.admin_port + 1,
    }


def _bad_ports(config: HostConfig) -> tuple[str, str] | None:
    taken: dict[int, str] = {}
    for key, port in ports(config).items():
        blamed = key.removesuffix(" + 1")
        if port > 65535:
            return blamed, f"{port - 1} leaves no port after it for the canary's metrics"
        if port in taken:
            return blamed, f"{key} is {port}, the same as {taken[port]}; choose another"
        taken[port] = key
    return None


def _bad_together(config: HostConfig) -> tuple[str, str] | None:
    """(key, problem) of values that are allowed one by one and make no sense together."""
    engine, restart = config.engine, config.restart
    if engine.placement == "shared" and 2 * (engine.gpu_memory_fraction or 0) > _MAX_FRACTION:
        half, value = _MAX_FRACTION / 2, engine.gpu_memory_fraction
        return (
            "engine.gpu_memory_fraction",
            f'{value:g} does not fit twice; with placement "shared" at most {half:g}, or placement = "exclusive"',
        )
    if restart.first_delay > restart.max_delay:
        return "restart.first_delay", f"{restart.first_delay:g} is more than max_delay, {restart.max_delay:g}"
    return None


def _meaning(key: str) -> str:
    """What a known key means, with its default."""
    section, _, name = key.partition(".")
    if not name:
        return _hint(key)
    default = getattr(SECTIONS[section](), name)
    shown = "none" if default is None else f"{default:g}" if isinstance(default, float) else repr(default)
    return f"{name}: {description(SECTIONS[section], name)} (default {shown})"


def _hint(key: str) -> str:
    table = SECTIONS.get(key.split(".")[0])
    if table is None:
        return "known: schema, " + ", ".join(f"[{name}]" for name in SECTIONS)
    return f"known in [{key.split('.')[0]}]: {', '.join(table.__struct_fields__)}"

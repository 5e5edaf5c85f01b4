"""The GPU ledger, gpus.json: HostState <-> file. The watchdog owns it; slots are added by `appliance gpus bind`.

Schema 1 as appliance/gpus.py binds slots: {"gpus": [{slot, uuid, state, reason, since, needs, attempts, ...}]} and
"watchdog": {...} for the host. Every writer takes the lock. Keys that this version does not know are kept, and slots
that were bound since the last read stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from appliance.gpus import SCHEMA, read_slots
from appliance.statefile import StateError, read_state, state_lock, write_state
from healthcheck.machine_types import Attempt, GpuState, Halt, HostState, Incident, Needs, State

_VOLATILE = {"idle_since", "extra", "gpu"}
_HOST = ("boot_id", "maintenance", "halt", "resetting", "failures", "alerts")
_LOST = (
    "once it is away: `appliance gpus bind`, start the watchdog, and see `healthcheck status`: a GPU that the watchdog "
    "holds comes back as QUARANTINED, never unverified"
)
_HINT = "restore it from a backup, or fix the entry and start the watchdog again"


def read_ledger(path: Path) -> HostState:
    """What the file says; no GPUs where there is none yet. StateError names the entry that is not understood: nothing
    is guessed about a GPU, and the file is left alone."""
    try:
        entries = read_slots(path)
        whole = read_state(path, schema=SCHEMA) or {}
    except StateError as error:
        raise StateError(error.message, hint=f"{error.hint}; {_LOST}") from None
    gpus = {slot: _gpu(path, slot, entry) for slot, entry in sorted(entries.items())}
    kept = whole.get("watchdog", {})
    if not isinstance(kept, dict):
        raise StateError(f"{path}: watchdog is no object", hint=_HINT)
    known = {name: kept[name] for name in _HOST if name in kept}
    extra = {name: value for name, value in kept.items() if name not in _HOST}
    host = _convert(path, "watchdog", {"failures": (), "alerts": {}} | known, _Host)
    return HostState(gpus=gpus, extra=extra, **msgspec.structs.asdict(host))


def write_ledger(path: Path, host: HostState) -> None:
    """Replaces what the watchdog keeps, durably. A slot that `host` does not have yet stays as it is. OSError,
    BusyError."""
    with state_lock(path):
        whole = read_state(path, schema=SCHEMA) or {}
        entries = read_slots(path)
        for slot, gpu in host.gpus.items():
            entries[slot] = entry_of(gpu)
        keep: dict[str, Any] = {name: msgspec.to_builtins(getattr(host, name)) for name in _HOST}
        state = whole | {"gpus": [entries[slot] for slot in sorted(entries)], "watchdog": {**host.extra, **keep}}
        write_state(path, state, schema=SCHEMA)


def adopt(host: HostState, path: Path) -> HostState:
    """`host` with the slots that were bound since it was read."""
    new = {slot: gpu for slot, gpu in read_ledger(path).gpus.items() if slot not in host.gpus}
    return replace(host, gpus={**host.gpus, **new}) if new else host


def entry_of(gpu: GpuState) -> dict[str, Any]:
    """The entry in the file; also what `healthcheck status --json` shows."""
    known = {f.name: msgspec.to_builtins(getattr(gpu, f.name)) for f in fields(gpu) if f.name not in _VOLATILE}
    return {**gpu.extra, "slot": gpu.gpu, **known}


class _Host(msgspec.Struct, kw_only=True, frozen=True):
    boot_id: str = ""
    maintenance: str | None = None
    halt: Halt | None = None
    resetting: int | None = None
    failures: tuple[tuple[float, int, str], ...] = ()
    alerts: dict[str, float] = {}


class _Gpu(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of an entry that the watchdog owns; absent ones as `appliance gpus bind` leaves them."""

    uuid: str
    state: State = State.HEALTHY
    reason: str = ""
    since: float = 0.0
    needs: Needs | None = None
    attempts: tuple[Attempt, ...] = ()
    incident: Incident | None = None
    owed: Incident | None = None
    stage: str = ""
    held: bool = False
    repaired: float = 0.0
    deadline: float | None = None
    issued: float = 0.0
    paused: State | None = None
    asked: tuple[int, ...] = ()


def _gpu(path: Path, slot: int, entry: Mapping[str, Any]) -> GpuState:
    known = {name: entry[name] for name in _Gpu.__struct_fields__ if name in entry}
    extra = {name: value for name, value in entry.items() if name not in known and name != "slot"}
    gpu = _convert(path, f"slot {slot}", known, _Gpu)
    if not math.isfinite(gpu.since):
        raise StateError(f"{path}: slot {slot}: since is no time", hint=_HINT)
    return GpuState(gpu=slot, extra=extra, **msgspec.structs.asdict(gpu))


def _convert(path: Path, place: str, value: Any, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise StateError(f"{path}: {place}: {error}", hint=_HINT) from None


def worth_writing(before: HostState, after: HostState) -> bool:
    """Whether a crash now would lose more than times that come again (of alerts, of repeated commands)."""
    if any(getattr(before, name) != getattr(after, name) for name in _HOST if name != "alerts"):
        return True
    if before.gpus.keys() != after.gpus.keys():
        return True
    pairs = ((before.gpus[slot], gpu) for slot, gpu in after.gpus.items())
    return any(one is not other and _essence(one) != _essence(other) for one, other in pairs)


def _essence(gpu: GpuState) -> GpuState:
    return replace(gpu, issued=0.0, idle_since=None)

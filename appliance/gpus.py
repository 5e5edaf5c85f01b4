"""GPU slots: number N <-> UUID, bound once at install in gpus.json and never renumbered.

The UUIDs come from /proc/driver/nvidia (no NVML here: the watchdog is its only user). Device minor and NUMA node may
change at every boot, so they are looked up by UUID at each start. With `backend = "cpu"` a slot is a number only
("CPU-0"), for hosts without a GPU and for tests.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError
from appliance.state_hints import damaged_hint
from appliance.statefile import StateError, read_bounded, read_state, state_lock, write_state

SCHEMA = 1
_PROC = Path("/proc/driver/nvidia/gpus")
_PCI = Path("/sys/bus/pci/devices")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MAX_INFORMATION_BYTES = 1 << 16


class GpuError(ApplianceError):
    """A GPU is not where it should be; says which and what to do."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the driver says of one GPU now."""

    uuid: str  # GPU-...
    minor: int  # /dev/nvidiaMINOR
    model: str
    pci: str  # 0000:1b:00.0
    numa_node: int | None  # None: the machine has no such thing


def visible_gpus(proc: Path = _PROC, pci: Path = _PCI) -> list[Gpu]:
    """The GPUs of this host by minor, from /proc/driver/nvidia/gpus/*/information; empty without a driver. A GPU whose
    UUID the driver does not know yet is left out: see `unready_gpus`."""
    found = []
    for address, fields in _information(proc):
        uuid, minor = fields.get("GPU UUID", ""), fields.get("Device Minor", "")
        if _UUID.fullmatch(uuid) and minor.isdecimal() and minor.isascii():
            found.append(Gpu(uuid, int(minor), fields.get("Model", "?"), address, _numa_node(pci / address)))
    return sorted(found, key=lambda gpu: gpu.minor)


def unready_gpus(proc: Path = _PROC) -> list[str]:
    """PCI addresses of GPUs that the driver shows without a UUID (GPU-????????-...): nothing has opened them since the
    driver was loaded, or they failed to come up."""
    return [address for address, fields in _information(proc) if not _UUID.fullmatch(fields.get("GPU UUID", ""))]


def mig_gpus(nvidia: Path = Path("/proc/driver/nvidia")) -> set[int]:
    """Device minors of GPUs that are divided into MIG instances: /proc/driver/nvidia/capabilities/gpuMINOR/mig/giN
    (MIG user guide, "Device Nodes and Capabilities")."""
    found = set()
    for instance in nvidia.glob("capabilities/gpu*/mig/gi*"):
        minor = instance.parents[1].name.removeprefix("gpu")
        if minor.isascii() and minor.isdecimal():
            found.add(int(minor))
    return found


def _information(proc: Path) -> list[tuple[str, dict[str, str]]]:
    """(PCI address, fields) of each /proc/driver/nvidia/gpus/ADDRESS/information."""
    found = []
    for directory in sorted(proc.iterdir()) if proc.is_dir() else ():
        try:
            text = read_bounded(directory / "information", _MAX_INFORMATION_BYTES).decode(errors="replace")
        except (OSError, StateError):  # it fell off the bus between the listing and the read
            text = ""
        fields = (line.partition(":") for line in text.splitlines())
        found.append((directory.name, {key.strip(): value.strip() for key, colon, value in fields if colon}))
    return found


def _numa_node(device: Path) -> int | None:
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def read_slots(path: Path) -> dict[int, dict[str, Any]]:
    """gpus.json: slot number -> its entry (uuid, state, reason, since, needs, attempts). StateError where the file is
    not what this version writes."""
    state = read_state(path, schema=SCHEMA)
    entries = (state or {}).get("gpus", [])
    slots: dict[int, dict[str, Any]] = {}
    for entry in entries if isinstance(entries, list) else [{}]:
        entry = entry if isinstance(entry, dict) else {}
        number = entry.get("slot")
        if type(number) is not int or not 0 <= number < 1024 or not isinstance(entry.get("uuid"), str):
            raise StateError(f"{path}: no slot number and UUID in {str(entry)[:80]!r}", hint=damaged_hint(path))
        if number in slots or entry["uuid"] in (other["uuid"] for other in slots.values()):
            raise StateError(f"{path}: slot {number} or its UUID is there twice", hint=damaged_hint(path))
        slots[number] = entry
    return slots


def bind_slots(path: Path, uuids: list[str]) -> list[int]:
    """Adds a slot for each UUID that has none yet, after the highest number; returns the new numbers. What is bound
    stays bound, also while its GPU is away. Under the lock of gpus.json, which every writer of it takes."""
    with state_lock(path):
        slots = read_slots(path)
        known = {entry["uuid"] for entry in slots.values()}
        new = []
        for uuid in dict.fromkeys(uuids):
            if uuid in known:
                continue
            number = max(slots, default=-1) + 1
            entry = {"slot": number, "uuid": uuid, "state": "HEALTHY", "reason": "bound at install"}
            slots[number] = entry | {"since": round(time.time(), 3), "needs": None, "attempts": []}
            new.append(number)
        if new:
            state = read_state(path, schema=SCHEMA) or {}  # what the watchdog keeps there besides stays
            write_state(path, state | {"gpus": [slots[number] for number in sorted(slots)]}, schema=SCHEMA)
    return new


def find_gpu(uuid: str, proc: Path = _PROC, pci: Path = _PCI) -> Gpu:
    """Where the GPU with this UUID is now; GpuError if the driver does not show it."""
    gpus = visible_gpus(proc, pci)
    for gpu in gpus:
        if gpu.uuid == uuid:
            return gpu
    seen = ", ".join(gpu.uuid for gpu in gpus) or "none"
    unready = unready_gpus(proc)
    if unready:
        raise GpuError(
            f"GPU {uuid} is not there; the driver shows: {seen}, and no UUID yet for {', '.join(unready)}",
            hint="`nvidia-modprobe -u -c 0` and persistence mode bring it up; else see `appliance doctor` and dmesg",
        )
    raise GpuError(f"GPU {uuid} is not there; the driver shows: {seen}", hint="see `appliance doctor` and dmesg")

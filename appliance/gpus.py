"""GPU slots: number N <-> UUID, bound once at install in gpus.json and never renumbered.

The UUIDs come from /proc/driver/nvidia (no NVML here: the watchdog is its only user). Device minor and NUMA node may
change at every boot, so they are looked up by UUID at each start. With `backend = "cpu"` a slot is a number only
("CPU-0"), for hosts without a GPU and for tests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError
from appliance.statefile import read_state, write_state

SCHEMA = 1
_PROC = Path("/proc/driver/nvidia/gpus")
_PCI = Path("/sys/bus/pci/devices")


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
    """The GPUs of this host by minor, from /proc/driver/nvidia/gpus/*/information; empty without a driver."""
    found = []
    for directory in sorted(proc.iterdir()) if proc.is_dir() else ():
        fields = {}
        for line in (directory / "information").read_text(errors="replace").splitlines():
            key, separator, value = line.partition(":")
            if separator:
                fields[key.strip()] = value.strip()
        uuid, minor = fields.get("GPU UUID", ""), fields.get("Device Minor", "")
        if not uuid.startswith("GPU-") or "?" in uuid or not minor.isdigit():
            continue  # no client has opened it since the driver was loaded: the UUID reads GPU-????
        found.append(Gpu(uuid, int(minor), fields.get("Model", "?"), directory.name, _numa_node(pci / directory.name)))
    return sorted(found, key=lambda gpu: gpu.minor)


def _numa_node(device: Path) -> int | None:
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def read_slots(path: Path) -> dict[int, dict[str, Any]]:
    """gpus.json: slot number -> its entry (uuid, state, reason, since, needs, attempts)."""
    state = read_state(path, schema=SCHEMA)
    return {int(entry["slot"]): entry for entry in (state or {}).get("gpus", [])}


def bind_slots(path: Path, uuids: list[str]) -> list[int]:
    """Adds a slot for each UUID that has none yet, after the highest number; returns the new numbers. What is bound
    stays bound, also while its GPU is away. Done at install, under its lock."""
    slots = read_slots(path)
    known = {entry["uuid"] for entry in slots.values()}
    new = []
    for uuid in uuids:
        if uuid in known:
            continue
        number = max(slots, default=-1) + 1
        entry = {"slot": number, "uuid": uuid, "state": "HEALTHY", "reason": "bound at install"}
        slots[number] = entry | {"since": round(time.time(), 3), "needs": None, "attempts": []}
        new.append(number)
    if new:
        write_state(path, {"gpus": [slots[number] for number in sorted(slots)]}, schema=SCHEMA)
    return new


def find_gpu(uuid: str, proc: Path = _PROC, pci: Path = _PCI) -> Gpu:
    """Where the GPU with this UUID is now; GpuError if the driver does not show it."""
    gpus = visible_gpus(proc, pci)
    for gpu in gpus:
        if gpu.uuid == uuid:
            return gpu
    seen = ", ".join(gpu.uuid for gpu in gpus) or "none"
    raise GpuError(f"GPU {uuid} is not there; the driver shows: {seen}", hint="see `appliance doctor` and dmesg")

"""How much memory this process can still get: asked before the weights are loaded, so that a model that does not fit is
refused with both numbers instead of being killed half-way by the kernel."""

from __future__ import annotations

import mmap
from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least of MemAvailable and what each cgroup v2 above this process leaves. None if nothing is known.

    Pages of the page cache count as available in both: the kernel drops them when memory is asked for.
    """
    found = [_mem_available(proc), *_cgroup_rooms(proc, cgroups)]
    known = [value for value in found if value is not None]
    return min(known) if known else None


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Resident set of this process (proc(5), statm)."""
    return int((proc / "self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _mem_available(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _cgroup_rooms(proc: Path, cgroups: Path) -> list[int | None]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), None)  # the v2 hierarchy
    if own is None:
        return []
    group = cgroups / own.strip().lstrip("/")
    rooms = []
    while group != cgroups and cgroups in group.parents:
        rooms.append(_room(group))
        group = group.parent
    return rooms


def _room(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
        return max(0, int(limit) - max(0, used - cache))
    except (OSError, ValueError):  # no memory controller here
        return None

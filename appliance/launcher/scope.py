"""The scope of an engine: what is asked of systemd, and what the kernel shows of it afterwards. Nothing here changes
the host; launcher/scope_call.py does.

A scope cannot be sandboxed or restarted by systemd (systemd.scope(5)): it takes resource control only. So the child
drops its own privileges (launcher/trampoline.py) and the launcher restarts.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.hostconfig import parse_cpus

CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_USEC = 100_000  # systemd's CPUQuotaPeriodSec= default


def slice_name(gpu: int) -> str:
    """A dash is a level of the hierarchy: a child of appliance.slice."""
    return f"appliance-gpu{gpu}.slice"


def scope_name(gpu: int, release: str) -> str:
    """Release names (paths.RELEASE_NAME) have only characters that a unit name may have as they are; the longest is
    85 bytes of systemd's 255."""
    return f"appliance-gpu{gpu}-{release}.scope"


def scope_pattern(gpu: int) -> str:
    """For ListUnitsByPatterns: every scope of this slot (the digits end at a dash, so 1 is never 11)."""
    return f"appliance-gpu{gpu}-*.scope"


@dataclass(frozen=True, slots=True)
class ScopePlan:
    """Limits of one scope; None: not limited."""

    gpu: int
    release: str
    memory_max: int  # bytes
    cpu_weight: int
    tasks_max: int
    cpu_quota: int | None = None  # percent of one CPU
    allowed_cpus: tuple[int, ...] | None = None
    devices: tuple[str, ...] = ()  # nodes that may be opened for reading and writing, by path
    stop_seconds: float = 90.0

    @property
    def name(self) -> str:
        return scope_name(self.gpu, self.release)

    @property
    def cgroup_suffix(self) -> str:
        """How the path of its cgroup ends."""
        return f"/appliance.slice/{slice_name(self.gpu)}/{self.name}"

    def properties(self) -> dict[str, tuple[str, Any]]:
        """Name -> (D-Bus signature, value) for StartTransientUnit, without PIDs; of org.freedesktop.systemd1(5)."""
        found: dict[str, tuple[str, Any]] = {
            "Description": ("s", f"LLM appliance: engine of release {self.release} on GPU slot {self.gpu}"),
            "Slice": ("s", slice_name(self.gpu)),
            "CollectMode": ("s", "inactive-or-failed"),  # no failed scope stays behind to block its name
            "TimeoutStopUSec": ("t", int(self.stop_seconds * 1e6)),
            "MemoryMax": ("t", self.memory_max),
            "MemorySwapMax": ("t", 0),  # weights that are paged in token by token look like a sick GPU
            "CPUWeight": ("t", self.cpu_weight),
            "TasksMax": ("t", self.tasks_max),
            "DevicePolicy": ("s", "closed"),
            "DeviceAllow": ("a(ss)", [(path, "rw") for path in self.devices]),
        }
        if self.cpu_quota is not None:
            found["CPUQuotaPerSecUSec"] = ("t", self.cpu_quota * 10_000)
        if self.allowed_cpus is not None:
            found["AllowedCPUs"] = ("ay", cpu_mask(self.allowed_cpus))
        return found


def cpu_mask(cpus: tuple[int, ...]) -> list[int]:
    """AllowedCPUs= on the bus: CPU n is bit n % 8 of byte n // 8."""
    mask = bytearray(max(cpus) // 8 + 1)
    for cpu in cpus:
        mask[cpu // 8] |= 1 << cpu % 8
    return list(mask)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the read-back showed: each a sentence. `wrong` stops the engine, `unknown` is said aloud."""

    wrong: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def own_cgroup(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Path of `pid` in the cgroup v2 hierarchy, as /sys/fs/cgroup shows it; None if it is gone or not in it."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), None)


def check_scope(plan: ScopePlan, path: str | None, unit: dict[str, Any], cgroups: Path = CGROUPS) -> Findings:
    """Compares what is with what was asked: the cgroup `path` the child is in, the kernel's files there, and for
    devices (the kernel's filter cannot be read) the properties `unit` that systemd reports."""
    if path is None or not path.endswith(plan.cgroup_suffix):
        return Findings(wrong=(f"the child is in the cgroup {path!r}, not in ...{plan.cgroup_suffix}",))
    wrong, unknown = [], []
    if unit.get("ControlGroup") != path and not str(unit.get("ControlGroup", "")).endswith(plan.cgroup_suffix):
        wrong.append(f"systemd has the scope at {unit.get('ControlGroup')!r}")
    if unit.get("DevicePolicy") != "closed":
        wrong.append(f"DevicePolicy is {unit.get('DevicePolicy')!r}, not 'closed'")
    allowed = sorted((str(node), str(mode)) for node, mode in unit.get("DeviceAllow", []))
    if allowed != sorted((node, "rw") for node in plan.devices):
        wrong.append(f"DeviceAllow is {allowed}, not {list(plan.devices)} rw")
    available = _controllers(cgroups)
    for controller, file, expected in _expected_files(plan):
        if controller not in available:
            unknown.append(controller)
            continue
        found = _read(cgroups / path.lstrip("/") / file)
        if found is None:
            wrong.append(f"{file} is missing: systemd did not enable the {controller} controller")
        elif not _same(file, found, expected):
            wrong.append(f"{file} is {found!r}, not {expected!r}: is there a drop-in for this scope or its slice?")
    swap = _read(cgroups / path.lstrip("/") / "memory.swap.max")
    if swap not in (None, "0"):  # absent: this kernel does not account for swap
        wrong.append(f"memory.swap.max is {swap!r}, not '0'")
    missing = tuple(f"no {controller} controller: its limits do not bite" for controller in dict.fromkeys(unknown))
    return Findings(tuple(wrong), missing)


def _expected_files(plan: ScopePlan) -> list[tuple[str, str, str]]:
    """(controller, file, value as the kernel writes it), cgroup-v2.rst."""
    quota = "max" if plan.cpu_quota is None else str(plan.cpu_quota * _PERIOD_USEC // 100)
    expected = [
        ("memory", "memory.max", str(plan.memory_max // mmap.PAGESIZE * mmap.PAGESIZE)),
        ("pids", "pids.max", str(plan.tasks_max)),
        ("cpu", "cpu.max", f"{quota} {_PERIOD_USEC}"),
        ("cpu", "cpu.weight", str(plan.cpu_weight)),
    ]
    if plan.allowed_cpus is not None:
        expected.append(("cpuset", "cpuset.cpus", ",".join(map(str, plan.allowed_cpus))))
    return expected


def _same(file: str, found: str, expected: str) -> bool:
    if file == "cpuset.cpus":
        return parse_cpus(found) == parse_cpus(expected)
    if file == "cpu.max":  # systemd lengthens the period of a tiny quota: the ratio counts
        quota, _, period = found.partition(" ")
        wanted, _, wanted_period = expected.partition(" ")
        if "max" in (quota, wanted):
            return quota == wanted
        return int(quota) * int(wanted_period) == int(wanted) * int(period)
    return found == expected


def _controllers(cgroups: Path) -> set[str]:
    return set((_read(cgroups / "cgroup.controllers") or "").split())


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def oom_kills(gpu: int, cgroups: Path = CGROUPS) -> int | None:
    """Processes the kernel killed at a memory limit in this GPU's slice, ever: the slice outlives its scopes. None
    where there is no memory controller."""
    text = _read(cgroups / "appliance.slice" / slice_name(gpu) / "memory.events")
    counts = dict(line.split() for line in (text or "").splitlines() if len(line.split()) == 2)
    return int(counts["oom_kill"]) if counts.get("oom_kill", "").isdigit() else None


def scope_groups(gpu: int, cgroups: Path = CGROUPS) -> list[str] | None:
    """Names of this slot's scopes that have a cgroup; None where cgroup v2 is not mounted at `cgroups`."""
    if not (cgroups / "cgroup.procs").exists():
        return None
    directory = cgroups / "appliance.slice" / slice_name(gpu)
    return sorted(group.name for group in directory.glob("*.scope")) if directory.is_dir() else []


def processes_in(path: str, cgroups: Path = CGROUPS) -> list[int]:
    """Pids in the cgroup `path` (an engine's scope has no groups below it); empty when it is gone."""
    return [int(pid) for pid in (_read(cgroups / path.lstrip("/") / "cgroup.procs") or "").split()]

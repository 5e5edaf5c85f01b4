"""The machine under it: cgroups, limits, disks, memory, clock, kernel command line, Python."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from appliance.doctor.report import Check, Finding, Host, degraded, failed, ok, unknown
from appliance.log import format_bytes

NEEDED_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
_MIN_STATE_BYTES = 1 << 30
_LOW_BYTES = 20 << 30
_LOW_FRACTION = 0.05
_LOW_INODES = 10_000
_BAD_CMDLINE = {
    "systemd.unified_cgroup_hierarchy=0": "asks for cgroup v1",
    "systemd.unified_cgroup_hierarchy=no": "asks for cgroup v1",
    "systemd.unified_cgroup_hierarchy=false": "asks for cgroup v1",
    "cgroup_disable=memory": "takes MemoryMax away",
    "cgroup_no_v1=none": "leaves controllers to cgroup v1",
}


def cgroup(host: Host) -> Finding:
    text = host.read("/sys/fs/cgroup/cgroup.controllers")
    fix = "remove systemd.unified_cgroup_hierarchy=0 from the kernel command line and reboot"
    if text is None:
        if (host.root / "sys/fs/cgroup/unified/cgroup.controllers").exists():
            return failed("cgroups are hybrid (v1 with v2 beside it): limits would not hold", fix)
        return failed("no cgroup v2 at /sys/fs/cgroup", fix)
    missing = [name for name in NEEDED_CONTROLLERS if name not in text.split()]
    if missing:
        return failed(
            f"cgroup v2 without {', '.join(missing)}",
            "boot with systemd.unified_cgroup_hierarchy=1 and without cgroup_disable=; for memory cgroup_enable=memory",
        )
    return ok(f"cgroup v2 with {', '.join(NEEDED_CONTROLLERS)}")


def memlock(host: Host) -> Finding:
    """What engines inherit. Pinned host memory of CUDA usually does not count, which is no reason to rely on it."""
    unit = "appliance-gpu@0.service"
    show = host.units([unit], ["LoadState", "LimitMEMLOCK"])
    if show is None or show[unit].get("LoadState") != "loaded":
        return unknown("the unit of the launchers is not installed, so it has no limit to look at")
    limit = show[unit].get("LimitMEMLOCK", "")
    if limit in ("infinity", str(2**64 - 1)):
        return ok("LimitMEMLOCK=infinity")
    return degraded(
        f"LimitMEMLOCK={limit} for launchers and engines", "a drop-in of ours or yours lowers it: `systemctl cat`"
    )


def disk(host: Host) -> list[Finding]:
    """Space where we write. A full state directory stops drains and releases, a full cache only makes starts slow."""
    found = []
    for path in (host.paths.state, host.paths.models, host.paths.cache):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        space = host.space(there)
        what = f"{path}: {format_bytes(space.free_bytes)} free of {format_bytes(space.total_bytes)}"
        fix = "free some space (`appliance release list`, `appliance model list`), or mount a larger disk"
        if path == host.paths.state and space.free_bytes < _MIN_STATE_BYTES:
            found.append(failed(what, fix))
        elif space.free_bytes < min(_LOW_BYTES, _LOW_FRACTION * space.total_bytes):
            found.append(degraded(what, fix))
        elif space.free_inodes is not None and space.free_inodes < _LOW_INODES:
            found.append(degraded(f"{path}: {space.free_inodes} inodes free", "remove small files there"))
        else:
            found.append(ok(what))
    return found


def clock(host: Host) -> Finding:
    """Certificates, deadlines of keys and events of several hosts compare times."""
    result = host.command("timedatectl", "show", "--property=NTPSynchronized", "--value")
    if not result.ok:
        return unknown(f"cannot ask: {result.why()}")
    if result.text.strip() == "yes":
        return ok("the clock is synchronized")
    return degraded("the clock is not synchronized", "systemctl enable --now systemd-timesyncd (or chrony)")


def cmdline(host: Host) -> Finding:
    text = host.read("/proc/cmdline")
    if text is None:
        return unknown("/proc/cmdline cannot be read")
    words = text.split()
    for word in words:
        if word in _BAD_CMDLINE:
            return failed(f"kernel command line: {word} {_BAD_CMDLINE[word]}", "remove it (/etc/default/grub), reboot")
    return ok(" ".join(words)[:300] or "empty")


def hugepages(host: Host) -> Finding:
    """Reserved huge pages are memory that no engine of ours can use."""
    fields = {}
    for line in (host.read("/proc/meminfo") or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdecimal():
            fields[words[0]] = int(words[1])
    if "MemTotal" not in fields:
        return unknown("/proc/meminfo cannot be read")
    reserved_kib = fields.get("HugePages_Total", 0) * fields.get("Hugepagesize", 0)
    transparent = (host.read("/sys/kernel/mm/transparent_hugepage/enabled") or "").partition("[")[2].partition("]")[0]
    text = f"{format_bytes(fields['MemTotal'] * 1024)} memory, {format_bytes(reserved_kib * 1024)} in huge pages"
    if reserved_kib > fields["MemTotal"] // 4:
        return degraded(f"{text}: we use none of those", "lower vm.nr_hugepages unless something else needs them")
    return ok(f"{text}; transparent huge pages: {transparent or 'not there'}")


def python(host: Host) -> Finding:
    """The interpreter that runs this, which is that of launchers and gateways; nothing is imported."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return failed(f"Python {version} at {sys.executable}", "install the appliance for Python 3.11 to 3.13")
    missing = [name for name in ("gi", "pydbus") if importlib.util.find_spec(name) is None]
    if missing:
        return degraded(
            f"Python {version} at {sys.executable} has no {', '.join(missing)}: launchers cannot make scopes with it",
            "apt install python3-gi python3-pydbus, and a venv with --system-site-packages (the bundle does both)",
        )
    return ok(f"Python {version} at {Path(sys.executable)}")


CHECKS: dict[str, Check] = {
    "cgroup": cgroup,
    "memlock": memlock,
    "disk": disk,
    "clock": clock,
    "cmdline": cmdline,
    "memory": hugepages,
    "python": python,
}

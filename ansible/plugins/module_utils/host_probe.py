# Copyright: the LLM appliance maintainers
# SPDX-License-Identifier: Apache-2.0
"""What preflight has to know of a host, read from /proc, /sys and /etc below `root`; nothing is changed.

Unknown stays unknown: a value that cannot be read is None, never a guess.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

_LISTEN = "0A"  # TCP_LISTEN of include/net/tcp_states.h, as /proc/net/tcp shows it
_OUR_SERVICE = re.compile(r"appliance-((gpu|gateway)@[^/]+|canary)\.service")
_MAPPED_VERSION = re.compile(r" /usr/lib/appliance/([^/\n]+)/")


def read_text(path: Path, limit: int = 1 << 20) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(limit).decode("utf-8", errors="replace")
    except OSError:
        return None


def distribution(root: Path) -> dict[str, str | None]:
    """id and version of /etc/os-release (os-release(5))."""
    text = read_text(root / "etc/os-release") or read_text(root / "usr/lib/os-release") or ""
    fields = dict(re.findall(r"^([A-Z_]+)=\"?([^\"\n]*)\"?$", text, re.M))
    return {"id": fields.get("ID"), "version": fields.get("VERSION_ID"), "name": fields.get("PRETTY_NAME")}


def cgroup(root: Path) -> dict[str, Any]:
    """version 2 where /sys/fs/cgroup is the unified hierarchy; its controllers."""
    text = read_text(root / "sys/fs/cgroup/cgroup.controllers")
    return {"version": 1 if text is None else 2, "controllers": (text or "").split()}


def free_bytes(path: Path) -> int | None:
    """Of the file system that `path` is on, or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def has_keys(root: Path) -> bool:
    """API keys are configured on the host: a line that is no comment."""
    text = read_text(root / "etc/appliance/credentials/api-keys") or ""
    return any(line.strip() and not line.strip().startswith("#") for line in text.splitlines())


def memory_bytes(root: Path) -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB$", read_text(root / "proc/meminfo") or "", re.M)
    return int(found[1]) << 10 if found else None


def listeners(root: Path, ports: list[int]) -> list[dict[str, Any]]:
    """Who listens on these TCP ports: [{port, unit, pid, process}]; unit and pid are None where it cannot be seen."""
    wanted = set(ports)
    sockets: dict[str, int] = {}  # inode -> port
    for name in ("tcp", "tcp6"):
        for line in (read_text(root / "proc/net" / name, 16 << 20) or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == _LISTEN:
                port = int(words[1].rpartition(":")[2], 16)
                if port in wanted:
                    sockets[words[9]] = port
    found = {}
    for pid, inode in _owners(root, set(sockets)) if sockets else ():
        unit, process = _unit(root, pid), (read_text(root / "proc" / pid / "comm") or "").strip()
        found[inode] = {"port": sockets[inode], "unit": unit, "pid": int(pid), "process": process}
    unseen = {"unit": None, "pid": None, "process": None}
    rows = [found.get(inode, {"port": port} | unseen) for inode, port in sockets.items()]
    return sorted(rows, key=lambda row: (row["port"], row["pid"] or 0))


def _owners(root: Path, inodes: set[str]) -> list[tuple[str, str]]:
    """(pid, inode) of processes that have one of these sockets open."""
    found = []
    for directory in (root / "proc").iterdir():
        if not directory.name.isdecimal():
            continue
        try:
            entries = list((directory / "fd").iterdir())
        except OSError:
            continue  # it ended meanwhile
        for entry in entries:
            try:
                link = os.readlink(entry)
            except OSError:
                continue  # closed meanwhile; its other files still count
            if link.startswith("socket:[") and link[8:-1] in inodes:
                found.append((directory.name, link[8:-1]))
    return found


def _unit(root: Path, pid: str) -> str | None:
    """appliance-gateway@stable.service, from the process's cgroup."""
    text = read_text(root / "proc" / pid / "cgroup") or ""
    names = [name for name in text.strip().split("/") if name.endswith((".service", ".scope"))]
    return names[-1] if names else None


def running_versions(root: Path) -> dict[str, set[str]]:
    """Unit -> versions of the code that its processes have mapped, for launchers, gateways and the canary.
    Engines are in scopes of their own and run the version of their release."""
    found: dict[str, set[str]] = {}
    for directory in (root / "proc").iterdir():
        unit = _unit(root, directory.name) if directory.name.isdecimal() else None
        if unit and _OUR_SERVICE.fullmatch(unit):
            maps = read_text(directory / "maps", 16 << 20) or ""
            found.setdefault(unit, set()).update(_MAPPED_VERSION.findall(maps))
    return found


def canary_run(root: Path) -> str | None:
    """What to say of a canary run that is on; None where none is. A file that cannot be understood counts as one: an
    upgrade in the middle of a run would restart what it judges."""
    text = read_text(root / "var/lib/appliance/canary.json", 4 << 20)
    if text is None:
        return None
    try:
        run = json.loads(text)
        ended = run["phase"] in ("settled", "aborted", "failed")
        return None if ended else f"run {run['id']} of {run['release']} ({run['phase']})"
    except (ValueError, TypeError, LookupError):
        return "a run whose file /var/lib/appliance/canary.json cannot be understood"


def slots(root: Path) -> list[int]:
    """Numbers of the GPU slots that are bound (gpus.json, appliance/gpus.py); empty where there are none."""
    try:
        entries = json.loads(read_text(root / "var/lib/appliance/gpus.json") or "{}").get("gpus", [])
        return sorted(int(entry["slot"]) for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # damaged: `appliance gpus bind` says so


def nvidia(root: Path) -> dict[str, Any]:
    """What the NVIDIA driver says, without opening a device."""
    version = read_text(root / "proc/driver/nvidia/version") or ""
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", version)
    modules = {line.split()[0] for line in (read_text(root / "proc/modules") or "").splitlines() if line}
    gpus = []
    directory = root / "proc/driver/nvidia/gpus"
    for gpu in sorted(directory.iterdir()) if directory.is_dir() else ():
        text = read_text(gpu / "information") or ""
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
        gpus.append({"pci": gpu.name, "uuid": fields.get("GPU UUID"), "model": fields.get("Model")})
    mig = (root / "proc/driver/nvidia/capabilities").glob("gpu*/mig/gi*")
    return {
        "driver": found[1] if found else None,
        "gpus": gpus,
        "mig": sorted({path.parents[1].name for path in mig}),
        "modules": sorted(modules & {"nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nouveau"}),
        "pci_devices": _nvidia_pci(root),
    }


def _nvidia_pci(root: Path) -> list[str]:
    """PCI addresses of NVIDIA display and 3D controllers (vendor 10de, class 03xxxx), driver or not."""
    found = []
    devices = root / "sys/bus/pci/devices"
    for device in sorted(devices.iterdir()) if devices.is_dir() else ():
        vendor, kind = read_text(device / "vendor") or "", read_text(device / "class") or ""
        if vendor.strip() == "0x10de" and kind.startswith("0x03"):
            found.append(device.name)
    return found

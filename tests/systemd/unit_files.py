"""Reads systemd/ for its tests, and the systemd tools that judge it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.programs import need

FOLDER = Path(__file__).parents[2] / "systemd"
UNITS = sorted(path.name for kind in ("service", "target", "slice") for path in FOLDER.glob(f"*.{kind}"))
SERVICES = [name for name in UNITS if name.endswith(".service")]
INSTANCES = {
    "appliance-gpu@.service": "appliance-gpu@0.service",
    "appliance-gateway@.service": "appliance-gateway@stable.service",
    "appliance-gpu-reset@.service": "appliance-gpu-reset@GPU\\x2d5fd4f087\\x2d86f3.service",
    "appliance-report@.service": "appliance-report@appliance-gpu@0.service.service",
}
PYTHON = "usr/lib/appliance/current/venv/bin/python"


@dataclass(frozen=True)
class Setting:
    section: str
    key: str
    value: str
    commented: bool  # a comment above it, or above the run of settings it stands in


def settings(name: str) -> list[Setting]:
    """All settings of a unit in order."""
    found, section, commented = [], "", False
    for line in (FOLDER / name).read_text().splitlines():
        if line.startswith("["):
            section, commented = line.strip("[]"), False
        elif line.startswith("#"):
            commented = not line.startswith("# -- sandbox") or line.partition(". ")[2] != ""
        elif not line.strip():
            commented = False
        else:
            key, _, value = line.partition("=")
            found.append(Setting(section, key, value, commented))
            if key in ("PrivateDevices", "CapabilityBoundingSet"):
                continue  # the line that follows may share its comment
            commented = False
    return found


def values(name: str, key: str) -> list[str]:
    return [setting.value for setting in settings(name) if setting.key == key]


def tool(name: str) -> str:
    """Path of a program of Debian's package systemd (which need not run)."""
    return need(name, "systemd")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def make_root(path: Path) -> Path:
    """A root directory with Debian's own units (of this machine) and ours installed, and a stub for our Python."""
    installed = path / "usr/lib/systemd/system"
    shutil.copytree("/lib/systemd/system", installed, symlinks=True)
    for unit in UNITS:
        shutil.copy(FOLDER / unit, installed / unit)
    for program in (PYTHON, "bin/kill"):
        (path / program).parent.mkdir(parents=True, exist_ok=True)
        (path / program).write_text("#!/bin/sh\n")
        (path / program).chmod(0o755)
    return path

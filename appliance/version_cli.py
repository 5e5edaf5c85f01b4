"""`appliance version`: ours, the interpreter's, the packages', the driver's and the releases'."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from appliance import __version__
from appliance.arguments import add_common
from appliance.log import ApplianceError, ExitCode, emit_json, printable
from appliance.paths import SLOT_NAMES, Paths
from appliance.releases import ReleaseStore
from appliance.slots import pointer
from appliance.statefile import read_bounded

_PACKAGES = ("aiohttp", "msgspec", "numpy", "uvloop", "jinja2", "prometheus-client", "pycuda", "cuda-bindings")


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)


def run(args: argparse.Namespace, root: Path = Path("/")) -> int:
    found = versions(Paths.default(), root)
    if args.json:
        emit_json(found)
        return ExitCode.DONE
    print(f"appliance {found['version']}")
    for key in ("python", "kernel", "system", "driver"):
        print(f"{key:<10} {printable(found[key] or 'none')}")
    print(f"{'installed':<10} {', '.join(found['installed']) or 'none'} (current: {found['current'] or 'none'})")
    for slot, release in found["slots"].items():
        print(
            f"{slot:<10} {release['release']} (engine {release['engine_version'] or '?'})"
            if release
            else f"{slot:<10} -"
        )
    for name, version in found["packages"].items():
        print(f"  {name} {version or 'not installed'}")
    return ExitCode.DONE


def versions(paths: Paths, root: Path = Path("/")) -> dict[str, Any]:
    """The JSON document. What is not there is null."""
    current = paths.lib / "current"
    return {
        "schema": 1,
        "version": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "system": _system(root),
        "driver": (_first_line(root / "proc/driver/nvidia/version") or "").removeprefix("NVRM version: ") or None,
        "installed": _installed(paths.lib),
        "current": os.path.basename(os.path.realpath(current)) if current.is_dir() else None,
        "slots": {slot: _release(paths, slot) for slot in SLOT_NAMES},
        "packages": {name: _package(name) for name in _PACKAGES},
    }


def _installed(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _first_line(path: Path) -> str | None:
    try:
        return read_bounded(path, 1 << 16).decode(errors="replace").partition("\n")[0].strip()
    except (OSError, ApplianceError):
        return None


def _system(root: Path) -> str | None:
    try:
        text = read_bounded(root / "etc/os-release", 1 << 16).decode(errors="replace")
    except (OSError, ApplianceError):
        return None
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return fields.get("PRETTY_NAME", "").strip('"') or None


def _release(paths: Paths, slot: str) -> dict[str, Any] | None:
    try:
        name = pointer(paths, slot)
        if name is None:
            return None
    except ApplianceError:  # `doctor` says what is wrong with it
        return None
    try:
        version = ReleaseStore(paths).get(name).engine_version
    except ApplianceError:
        version = None
    return {"release": name, "engine_version": version}


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

"""Releases: complete by names and sizes (digests: `appliance release verify`), slots, golden answers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from appliance.doctor.report import Check, Finding, Host, degraded, failed, ok, unknown
from appliance.gpus import visible_gpus
from appliance.log import ApplianceError
from appliance.paths import RELEASE_NAME, SLOT_NAMES
from appliance.slots import SlotError, pointer
from appliance.statefile import read_state

_SCHEMA = 1


def quick_problem(directory: Path) -> str | None:
    """What names and sizes say is wrong with the release in `directory`; None if nothing."""
    if not RELEASE_NAME.fullmatch(directory.name):
        return "its name is no release name"
    try:
        if read_state(directory / "release.json", schema=_SCHEMA) is None:
            return "release.json is missing"
        manifest = read_state(directory / "manifest.json", schema=_SCHEMA)
    except ApplianceError as error:
        return error.message
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    files = manifest.get("files") if manifest else None
    if not isinstance(files, dict) or not files:
        return "manifest.json is missing or lists no files"
    problems = [problem for name, entry in files.items() if (problem := _file_problem(directory, name, entry))]
    return f"{problems[0]}" + (f" and {len(problems) - 1} more" if len(problems) > 1 else "") if problems else None


def _file_problem(directory: Path, name: str, entry: Any) -> str | None:
    size = entry.get("size") if isinstance(entry, dict) else None
    if name.startswith("/") or ".." in Path(name).parts or type(size) is not int:
        return f"its manifest has a bad entry {name[:80]!r}"
    try:
        found = os.stat(directory / name).st_size
    except OSError as error:
        return f"{name}: {error.strerror}"
    return None if found == size else f"{name}: {found} bytes, its manifest says {size}"


def releases(host: Host) -> list[Finding]:
    directory = host.paths.releases
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    names = [entry for entry in entries if not entry.name.startswith(".")]
    used = {_pointed(host, slot) for slot in SLOT_NAMES}
    found = []
    for entry in names:
        if problem := quick_problem(entry):
            fix = "remove it and add it again: appliance release remove, appliance release add"
            make = failed if entry.name in used else degraded
            found.append(make(f"release {entry.name}: {problem}", fix))
    return found or [ok(f"{len(names)} releases, complete by names and sizes")]


def slots(host: Host) -> list[Finding]:
    found = []
    for slot in SLOT_NAMES:
        try:
            name = pointer(host.paths, slot)
        except SlotError as error:
            found.append(failed(error.message, error.hint or ""))
            continue
        if name is None and slot == "stable":
            found.append(failed("slot stable has no release: nothing is served", "appliance release use NAME"))
        elif name is not None and not host.paths.release(name).is_dir():
            found.append(failed(f"slot {slot} points at {name}, which is not there", "appliance release use NAME"))
        elif name is not None:
            found.append(ok(f"slot {slot}: {name}"))
    return found


def _pointed(host: Host, slot: str) -> str | None:
    """None as well where the pointer is broken: `slots` says so."""
    try:
        return pointer(host.paths, slot)
    except SlotError:
        return None


def golden(host: Host) -> list[Finding]:
    """Golden answers for each model of device that serves: without them a wrong answer is not noticed."""
    if host.config is None:
        return [unknown("the configuration cannot be read, so it is not known which devices serve")]
    if host.cpu_only:
        devices = {"cpu"}
    else:
        gpus = visible_gpus(host.root / "proc/driver/nvidia/gpus", host.root / "sys/bus/pci/devices")
        devices = {re.sub(r"[^A-Za-z0-9._-]+", "-", gpu.model).strip("-.") for gpu in gpus}
    names = list(dict.fromkeys(name for slot in SLOT_NAMES if (name := _pointed(host, slot))))
    if not names:
        return [ok("no slot has a release")]
    found = []
    for name in names:
        missing = sorted(d for d in devices if not (host.paths.release(name) / "golden" / f"{d}.json").is_file())
        if missing:
            found.append(
                degraded(
                    f"release {name} has no golden answers for {', '.join(missing)}",
                    "add it again with `appliance release add ... --golden auto`",
                )
            )
    return found or [ok("golden answers are there for every device that serves")]


CHECKS: dict[str, Check] = {"releases": releases, "slots": slots, "golden": golden}

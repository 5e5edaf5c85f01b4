"""Slot pointers: which release `stable` and `canary` serve. A symlink to ../releases/NAME, swapped by one rename.

That rename is the commit point of every change of a release: before it the old one is served after a reboot, after it
the new one. Read by launchers, gateways and the CLI; set by `appliance release use` and the canary controller.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from appliance.log import ApplianceError, BusyError, UsageError
from appliance.paths import RELEASE_NAME, SLOT_NAMES, Paths
from appliance.statefile import sync_directory

_TARGET = "../releases/"
_LOCK_SECONDS = 5.0  # the pointer is swapped in milliseconds


class SlotError(ApplianceError):
    """A slot pointer that leads nowhere or is none of ours; names it and says what to do."""


def read_slot(paths: Paths, slot: str) -> str | None:
    """The release that `slot` points at, or None while it points at nothing. SlotError if that release is not there
    (never an empty answer, which would stop its engines)."""
    name = pointer(paths, slot)
    if name is not None and not (paths.release(name) / "release.json").is_file():
        raise SlotError(
            f"slot {slot} points at the release {name!r}, which is not in {paths.releases}",
            hint=f"see `appliance release list`; then `appliance release use NAME --slot {slot}`",
        )
    return name


def pointer(paths: Paths, slot: str) -> str | None:
    """As read_slot, but does not look whether the release is there."""
    path = paths.slot_pointer(check_slot(slot))
    try:
        target = os.readlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SlotError(
            f"{path} is no slot pointer: {error.strerror}",
            hint=f"move it away; then `appliance release use NAME --slot {slot}`",
        ) from None
    name = target.removeprefix(_TARGET)
    if not target.startswith(_TARGET) or not RELEASE_NAME.fullmatch(name):
        raise SlotError(
            f"{path} points at {target!r}, which is no release",
            hint=f"remove it; then `appliance release use NAME --slot {slot}`",
        )
    return name


def slots_of(paths: Paths, release: str) -> list[str]:
    """The slots that point at `release`."""
    return [slot for slot in SLOT_NAMES if pointer(paths, slot) == release]


def set_slot(paths: Paths, slot: str, release: str | None) -> None:
    """Points `slot` at `release` (None: at nothing): symlink + rename + fsync, durable on return. SlotError if the
    release is not there; the pointer is then as it was."""
    path = paths.slot_pointer(check_slot(slot))
    if release is not None and not (RELEASE_NAME.fullmatch(release) and (paths.release(release)).is_dir()):
        raise SlotError(f"there is no release {release!r} to point {slot} at", hint="see `appliance release list`")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o755)  # whatever the umask is: gateways read it
    # Not the directory itself: whoever may open a file for reading may lock it (flock(2)).
    lock = os.open(path.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(lock, path.parent)
        temporary = path.with_name(f".{slot}.tmp")
        temporary.unlink(missing_ok=True)  # of a writer that was killed
        if release is None:
            path.unlink(missing_ok=True)
        else:
            temporary.symlink_to(_TARGET + release)
            os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        os.close(lock)


def _lock(fd: int, directory: Path) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise BusyError(f"{directory} is being changed by another process", hint="wait for it to end")
        time.sleep(0.02)


def check_slot(slot: str) -> str:
    """`slot` if there is such a slot, else UsageError."""
    if slot not in SLOT_NAMES:
        raise UsageError(f"there is no slot {slot!r}", hint=f"slots: {', '.join(SLOT_NAMES)}")
    return slot

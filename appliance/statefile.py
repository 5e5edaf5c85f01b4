"""State on disk: one JSON object with a schema version, replaced atomically, read back strictly.

tmp + fsync + rename + fsync of the directory: after a kill or power cut at any instant the old or the new state is
there, whole. Nothing here knows what the state means.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError, BusyError
from appliance.state_hints import damaged_hint

MAX_BYTES = 4 << 20


class StateError(ApplianceError):
    """A state file that cannot be understood. It is never overwritten: a human has to look."""


def write_state(path: Path, state: dict[str, Any], *, schema: int, durable: bool = True, mode: int = 0o644) -> None:
    """Replaces `path`. `durable=False` (no fsync) is for files under /run, which no reboot survives anyway.

    ASCII only (\\u escapes), so that text from a command line with invalid UTF-8 cannot make a file that nobody reads.
    """
    data = json.dumps({"schema": schema} | state | {"schema": schema}, indent=1, allow_nan=False).encode() + b"\n"
    if durable:
        _sweep(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        try:
            os.fchmod(fd, mode)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        except OSError as error:  # of a descriptor, so it names no file: a full disk, most often
            error.filename = str(path)
            raise
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def _sweep(path: Path) -> None:
    """Removes what writers of this file left behind when they were killed."""
    prefix, suffix = f".{path.name}.", ".tmp"
    with os.scandir(path.parent) as entries:
        left = [entry.name for entry in entries if entry.name.startswith(prefix) and entry.name.endswith(suffix)]
    for name in left:
        pid = name[len(prefix) :].partition(".")[0]
        if pid.isdecimal() and not os.path.exists(f"/proc/{int(pid)}"):
            path.with_name(name).unlink(missing_ok=True)


def remove_state(path: Path) -> bool:
    """Removes `path` durably; False if there was none."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    sync_directory(path.parent)
    return True


def sync_directory(path: Path) -> None:
    """Makes renames, links and creations in `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_bounded(path: Path, limit: int = MAX_BYTES) -> bytes:
    """A regular file of at most `limit` bytes; never blocks on a FIFO or a device. StateError, or OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StateError(f"{path} is no regular file", hint="it is not ours; move it away")
        data = bytearray()
        while chunk := os.read(fd, 1 << 16):
            data += chunk
            if len(data) > limit:
                raise StateError(f"{path} is larger than {limit} bytes", hint="it is not ours; move it away")
        return bytes(data)
    finally:
        os.close(fd)


def read_state(path: Path, *, schema: int) -> dict[str, Any] | None:
    """The object in `path`, or None where there is no such file. StateError names the file and the fault: it is not
    JSON, is no object, is over MAX_BYTES, or has another schema (a newer version wrote it)."""
    try:
        data = read_bounded(path)
    except FileNotFoundError:
        return None
    except StateError as error:
        raise StateError(error.message, hint=damaged_hint(path)) from None
    try:
        state = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path} is not JSON: {error}", hint=damaged_hint(path)) from None
    if not isinstance(state, dict):
        raise StateError(f"{path} holds no JSON object", hint=damaged_hint(path))
    found = state.pop("schema", None)
    if type(found) is not int or found != schema:  # True == 1 in Python, not in a file
        raise StateError(
            f"{path} has schema {found!r}, this version reads {schema}",
            hint=f"another version wrote it: install that one again; else {damaged_hint(path)}",
        )
    return state


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")  # Python's reader takes NaN and Infinity; jq and our own --json would not


@contextlib.contextmanager
def state_lock(path: Path, *, wait_seconds: float = 5.0) -> Iterator[None]:
    """Excludes other processes from a read-change-write of the state file `path` (flock on `.NAME.lock` beside it; the
    kernel drops it when the holder dies). BusyError when somebody else has it for longer than `wait_seconds`."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        raise StateError(f"{path.parent} is not there", hint="is the appliance installed on this host?") from None
    try:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyError(f"{path} is being changed by another process", hint="try again") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)

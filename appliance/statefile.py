"""State on disk: one JSON object with a schema version, replaced atomically, read back strictly.

tmp + fsync + rename + fsync of the directory: after a kill or power cut at any instant the old or the new state is
there, whole. Nothing here knows what the state means.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError

MAX_BYTES = 4 << 20


class StateError(ApplianceError):
    """A state file that cannot be understood. It is never overwritten: a human has to look."""


def write_state(path: Path, state: dict[str, Any], *, schema: int, durable: bool = True, mode: int = 0o644) -> None:
    """Replaces `path`. `durable=False` (no fsync) is for files under /run, which no reboot survives anyway."""
    data = json.dumps({"schema": schema} | state, ensure_ascii=False, indent=1, allow_nan=False).encode() + b"\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(fd, mode)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if durable:
            os.fsync(fd)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    os.replace(temporary, path)
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes renames, links and creations in `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_state(path: Path, *, schema: int) -> dict[str, Any] | None:
    """The object in `path`, or None where there is no such file. StateError names the file and the fault: it is not
    JSON, is no object, is over MAX_BYTES, or has another schema (a newer version wrote it)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StateError(f"{path} is no regular file")
        data = b""
        while chunk := os.read(fd, 1 << 16):
            data += chunk
            if len(data) > MAX_BYTES:
                raise StateError(f"{path} is larger than {MAX_BYTES} bytes", hint="it is not ours; move it away")
    finally:
        os.close(fd)
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"{path} is not JSON: {error}", hint="move it away; `appliance doctor` says what is lost"
        ) from None
    if not isinstance(state, dict):
        raise StateError(f"{path} holds no JSON object", hint="move it away; `appliance doctor` says what is lost")
    found = state.pop("schema", None)
    if found != schema:
        raise StateError(
            f"{path} has schema {found!r}, this version reads {schema}",
            hint="another version wrote it: install that one again, or move the file away",
        )
    return state

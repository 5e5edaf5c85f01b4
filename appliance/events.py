"""The append-only log of what changed on this host: one JSON object a line in /var/lib/appliance/events.jsonl.

Every transition of a GPU, an engine, a release or a hold is one line. A line is one write() to a file opened with
O_APPEND, so lines of several processes never mix; a kill in the middle of a write leaves a torn last line, which the
next writer closes and readers skip. Rotated at MAX_BYTES to events.jsonl.1 (one old file is kept). Writers exclude each
other on .events.jsonl.lock, which nobody else can open: whoever may read a file may also lock it (flock(2)).

An event never stops the work it tells of: where it cannot be written (disk full, no permission) it goes to stderr,
that is to the journal, with the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

MAX_BYTES = 16 << 20
_LOCK_SECONDS = 1.0


def append_event(path: Path, event: str, **fields: Any) -> bool:
    """Adds one event with the time (UTC seconds), this process (unless `pid` is given) and its fields; None values are
    left out. True if it is in the file, False if it went to stderr instead."""
    kept = {key: value for key, value in fields.items() if value is not None and key != "ts"}
    line = json.dumps({"ts": round(time.time(), 3), "event": event, "pid": os.getpid()} | kept, default=str)
    try:
        _append(path, line.encode() + b"\n")
    except OSError as error:
        with contextlib.suppress(OSError):  # both places are gone: nobody is left to tell
            print(f"event not in {path} ({error.strerror}): {line}", file=sys.stderr, flush=True)
        return False
    return True


def _append(path: Path, line: bytes) -> None:
    with _locked(path) as locked:
        _write(path, line, may_rotate=locked)


def _write(path: Path, line: bytes, *, may_rotate: bool) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        data = b"\n" + line if torn else line
        written = os.write(fd, data)
        if written != len(data):
            raise OSError(0, f"only {written} of {len(data)} bytes were written: is the disk full?")
        if may_rotate and size + written > MAX_BYTES:
            os.replace(path, path.with_name(path.name + ".1"))
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Other writers are kept out: what is opened meanwhile is the current file. False after _LOCK_SECONDS (a writer is
    stopped) or where there can be no lock file: it goes on and does not rotate; O_APPEND still keeps lines whole."""
    try:
        fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _lock(fd, time.monotonic() + _LOCK_SECONDS)
    finally:
        os.close(fd)


def _lock(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """All events, oldest first; torn lines are skipped."""
    old = path.with_name(path.name + ".1")
    files: list[IO[bytes]] = []
    try:
        for _ in range(3):  # a rotation between the two opens would hide the events that moved
            for file in files:
                file.close()
            before = _inode(old)
            files = [file.open("rb") for file in (old, path) if file.exists()]
            if _inode(old) == before:
                break
        for lines in files:
            for line in lines:
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict):
                    yield event
    finally:
        for file in files:
            file.close()


def last_events(path: Path, count: int) -> list[dict[str, Any]]:
    """The last `count` events, oldest first."""
    return list(deque(read_events(path), maxlen=count))

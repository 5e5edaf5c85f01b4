"""The append-only log of what changed on this host: one JSON object a line in /var/lib/appliance/events.jsonl.

Every transition of a GPU, an engine, a release or a hold is one line. A line is one write() to a file opened with
O_APPEND, so lines of several processes never mix; a kill in the middle of a write leaves a torn last line, which the
next writer closes and readers skip. Rotated at MAX_BYTES to events.jsonl.1 (one old file is kept).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 16 << 20


def append_event(path: Path, event: str, **fields: Any) -> None:
    """Adds one event with the time (UTC seconds), this process and its fields; None values are left out."""
    kept = {key: value for key, value in fields.items() if value is not None}
    line = json.dumps({"ts": round(time.time(), 3), "event": event, "pid": os.getpid()} | kept, default=str)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, ("\n" if torn else "").encode() + line.encode() + b"\n")
        if size > MAX_BYTES and os.stat(path).st_ino == os.fstat(fd).st_ino:
            os.replace(path, path.with_name(path.name + ".1"))
    finally:
        os.close(fd)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """All events, oldest first; torn lines are skipped."""
    for file in (path.with_name(path.name + ".1"), path):
        try:
            lines = file.open("rb")
        except FileNotFoundError:
            continue
        with lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    yield event

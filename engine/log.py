"""Structured logs: one JSON object a line on stderr, or native journald fields when stderr is the journal.

Every record carries `event` (a short stable name to filter on) and, where there is one, `req_id`, the id that a
request keeps through all layers. Prompts and outputs never come here unless asked for (ApiConfig.log_prompts).
journald protocol: systemd.io/JOURNAL_NATIVE_PROTOCOL.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

MAX_WAITING_LINES = 10_000
FLUSH_SECONDS = 1.0  # at the end of the process, for a reader that is slow
JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
_PRIORITY = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


def log_event(logger: logging.Logger, level: int, event: str, message: str = "", **fields: Any) -> None:
    """Log `event` with structured fields; None values are left out. `exc_info=True` adds the traceback."""
    exc_info = fields.pop("exc_info", None)
    if logger.isEnabledFor(level):
        kept = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, message or event, extra={"event": event, "fields": kept}, exc_info=exc_info)


def record_fields(record: logging.LogRecord) -> dict[str, Any]:
    """The structured view of a record, shared by both handlers."""
    out: dict[str, Any] = {
        "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": getattr(record, "event", "log"),
        "msg": record.getMessage(),
    }
    for key, value in getattr(record, "fields", {}).items():
        out.setdefault(key, value)
    if record.exc_info:
        out["traceback"] = logging.Formatter().formatException(record.exc_info)
    return out


def _encode(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=repr)
    except UnicodeEncodeError:  # a lone surrogate out of stray bytes: keep it, escaped
        return json.dumps(value, default=repr).encode()


class JsonFormatter(logging.Formatter):
    """One JSON object per line; a newline inside a value is escaped, so that a client cannot forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        return _encode(record_fields(record)).decode()


class LineWriter:
    """Writes lines to a file descriptor from a thread of its own. Whoever reads our log may stop reading (a full pipe,
    a paused terminal, a hung log driver): then lines are dropped and counted, and nothing here ever waits for it."""

    def __init__(self, fd: int, max_lines: int = MAX_WAITING_LINES) -> None:
        self._fd, self._max_lines = fd, max_lines
        self._lines: collections.deque[bytes] = collections.deque()
        self._lost = 0
        self._wake = threading.Condition()
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        data = line.encode("utf-8", "replace") + b"\n"
        with self._wake:
            if len(self._lines) >= self._max_lines:
                self._lost += 1
                return
            self._lines.append(data)
            self._wake.notify_all()

    def flush(self, seconds: float) -> None:
        """Wait until everything is written, at most so long."""
        with self._wake:
            self._wake.wait_for(lambda: not self._lines and not self._busy, seconds)

    def close(self) -> None:
        self.flush(FLUSH_SECONDS)
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                data = self._lines.popleft()
                self._busy = True
                if self._lost and not self._lines:  # there is room again
                    lost, self._lost = self._lost, 0
                    text = f"{lost} lines were lost: nobody read the log"
                    data += _encode({"level": "warning", "event": "log_lost", "msg": text, "lost": lost}) + b"\n"
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # the descriptor was made non-blocking by somebody who shares it
                select.select([], [self._fd], [], 1.0)
                with self._wake:
                    self._lines.appendleft(data)
            except OSError:
                pass  # a closed pipe or a full disk: there is no other place to say so


class LineHandler(logging.Handler):
    """JSON lines through a LineWriter."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.put(self.format(record))

    def flush(self) -> None:
        pass  # called from the event loop too; close() waits, at the end

    def close(self) -> None:
        self._writer.close()
        super().close()


class JournalHandler(logging.Handler):
    """Sends records to journald over its datagram socket: req_id becomes APPLIANCE_REQ_ID, event APPLIANCE_EVENT, and
    so on, so that `journalctl APPLIANCE_REQ_ID=...` shows one request through all layers."""

    def __init__(self, path: Path = JOURNAL_SOCKET, identifier: str = "appliance", fallback_fd: int = 2) -> None:
        super().__init__()
        self._fallback = LineWriter(fallback_fd)
        self._identifier = identifier
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)  # a stuck journal must not stop the event loop
        self._socket.connect(os.fspath(path))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._socket.send(journal_datagram(record, self._identifier))
        except OSError:
            # Full buffer or a record over the datagram limit: stderr still reaches the journal.
            self._fallback.put(JsonFormatter().format(record))

    def close(self) -> None:
        self._fallback.close()
        self._socket.close()
        super().close()


def journal_datagram(record: logging.LogRecord, identifier: str) -> bytes:
    """One entry in journald's native format (values with a newline are length-prefixed)."""
    fields = record_fields(record)
    entry: dict[str, Any] = {
        "MESSAGE": fields.pop("msg"),
        "PRIORITY": _PRIORITY.get(record.levelname, 6),
        "SYSLOG_IDENTIFIER": identifier,
    }
    fields.pop("ts")
    entry.update({"APPLIANCE_" + _field_name(key): value for key, value in fields.items()})
    out = bytearray()
    for key, value in entry.items():
        data = value.encode("utf-8", "replace") if isinstance(value, str) else _encode(value)
        if b"\n" in data:
            out += key.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"
        else:
            out += key.encode() + b"=" + data + b"\n"
    return bytes(out)


def _field_name(key: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in key.upper())[:54]


def setup_logging(level: str = "INFO", *, identifier: str = "appliance") -> None:
    """Install one handler on the root logger: the journal when our stderr is connected to it, else JSON lines."""
    handler: logging.Handler
    if _stderr_is_journal():
        handler = JournalHandler(identifier=identifier)
    else:
        handler = LineHandler(LineWriter(2))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _stderr_is_journal() -> bool:
    """systemd.exec(5): $JOURNAL_STREAM holds device:inode of stderr when it is the journal."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return stream == f"{status.st_dev}:{status.st_ino}" and JOURNAL_SOCKET.exists()

"""Structured logs: one JSON object a line on stderr, or native journald fields when stderr is the journal.

Every record carries `event` (a short stable name to filter on) and, where there is one, `req_id`, the id that a
request keeps through all layers. Prompts and outputs never come here unless asked for (ApiConfig.log_prompts).
journald protocol: systemd.io/JOURNAL_NATIVE_PROTOCOL.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

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


class JournalHandler(logging.Handler):
    """Sends records to journald over its datagram socket: req_id becomes APPLIANCE_REQ_ID, event APPLIANCE_EVENT, and
    so on, so that `journalctl APPLIANCE_REQ_ID=...` shows one request through all layers."""

    def __init__(self, path: Path = JOURNAL_SOCKET, identifier: str = "appliance") -> None:
        super().__init__()
        self._identifier = identifier
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)  # a stuck journal must not stop the event loop
        self._socket.connect(os.fspath(path))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._socket.send(journal_datagram(record, self._identifier))
        except OSError:
            # Full buffer or a record over the datagram limit: stderr still reaches the journal.
            sys.stderr.write(JsonFormatter().format(record) + "\n")

    def close(self) -> None:
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
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _stderr_is_journal() -> bool:
    """systemd.exec(5): $JOURNAL_STREAM holds device:inode of stderr when it is the journal."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return stream == f"{status.st_dev}:{status.st_ino}" and JOURNAL_SOCKET.exists()

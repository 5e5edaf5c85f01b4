"""Asking a launcher without waiting for it: appliance/control.py's protocol on the loop."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.control import MAX_REPLY_BYTES
from appliance.launcher.loop import READ, WRITE, Loop

Done = Callable[[dict[str, Any] | None], None]
"""Gets the reply, which has "ok"; None: nobody is there, it hung up, or it is late."""


class Asking:
    """One request in flight. Calls back exactly once, unless cancelled."""

    def __init__(self, loop: Loop, path: Path, request: dict[str, Any], seconds: float, done: Done) -> None:
        """`seconds`: until the reply is there; with "wait" it should be more than the request's "timeout"."""
        self._loop, self._done = loop, done
        self._out = json.dumps(request).encode() + b"\n"
        self._in = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._timer = loop.later(seconds, lambda: self._finish(None))
        if self._socket.connect_ex(os.fspath(path)):  # absent, refused, or its backlog is full
            self._timer.cancel()
            self._timer = loop.later(0, lambda: self._finish(None))
        else:
            loop.watch(self._socket.fileno(), WRITE, self._send)

    def cancel(self) -> None:
        self._done = lambda _: None
        self._finish(None)

    def _send(self) -> None:
        try:
            self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            return
        except OSError:
            self._finish(None)
            return
        if not self._out:
            self._loop.watch(self._socket.fileno(), READ, self._receive)

    def _receive(self) -> None:
        try:
            chunk = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self._in += chunk
        if chunk and not self._in.endswith(b"\n") and len(self._in) <= MAX_REPLY_BYTES:
            return
        self._finish(_parse(bytes(self._in)))

    def _finish(self, reply: dict[str, Any] | None) -> None:
        self._timer.cancel()
        if self._socket.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._done(reply)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return reply if isinstance(reply, dict) and isinstance(reply.get("ok"), bool) else None

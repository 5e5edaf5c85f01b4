"""HTTP over a Unix socket with one limit for the whole exchange: http.client's own is one for each read, and a server
that drips would be listened to for hours."""

from __future__ import annotations

import http.client
import socket
import time
from pathlib import Path
from typing import Any


class _Socket(socket.socket):
    deadline = 0.0

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)
        return super().recv_into(*args, **kwargs)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, seconds: float) -> None:
        """`seconds`: from the connect to the last byte of the answer; TimeoutError."""
        super().__init__("localhost", timeout=seconds)
        self._path, self._seconds = path, seconds

    def connect(self) -> None:
        self.sock = sock = _Socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.deadline = time.monotonic() + self._seconds
        sock.settimeout(self._seconds)
        sock.connect(str(self._path))

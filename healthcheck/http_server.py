"""GET over a Unix socket: a few routes, one request a connection, nothing that blocks the loop."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from appliance.launcher.loop import READ, WRITE, Loop

Route = Callable[[], tuple[str, bytes]]
"""Content type and body, made at the moment it is asked for."""

MAX_REQUEST_BYTES = 8 << 10
MAX_CLIENTS = 32
REQUEST_SECONDS = 5.0
_BACKLOG = 64


class HttpServer:
    """HTTP/1.x, GET and HEAD only; the connection closes after the answer."""

    def __init__(self, loop: Loop, path: Path, routes: Mapping[str, Route], *, group: int) -> None:
        """`group`: may connect, besides root."""
        self.loop, self.routes, self._path = loop, routes, path
        self.clients: set[_Client] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)  # we hold the watchdog's lock: it is a dead one's
        old = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(old)
        os.chown(path, -1, group)
        os.chmod(path, 0o660)
        self._socket.listen(_BACKLOG)
        loop.watch(self._socket.fileno(), READ, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:  # it left, or descriptors ran out: the next one may do better
            return
        sock.setblocking(False)
        if len(self.clients) >= MAX_CLIENTS:
            sock.close()
            return
        self.clients.add(_Client(self, sock))

    def close(self) -> None:
        self.loop.unwatch(self._socket.fileno())
        self._socket.close()
        for client in list(self.clients):
            client.close()
        self._path.unlink(missing_ok=True)


class _Client:
    def __init__(self, server: HttpServer, sock: socket.socket) -> None:
        self._server, self._socket = server, sock
        self._in, self._out = bytearray(), b""
        self._timer = server.loop.later(REQUEST_SECONDS, self.close)
        server.loop.watch(sock.fileno(), READ, self._read)

    def _read(self) -> None:
        try:
            chunk = self._socket.recv(1 << 13)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self._in += chunk
        if not chunk or len(self._in) > MAX_REQUEST_BYTES:
            self.close()
        elif b"\r\n\r\n" in self._in:
            self._out = self._answer(bytes(self._in.partition(b"\r\n")[0]))
            self._server.loop.watch(self._socket.fileno(), WRITE, self._write)

    def _answer(self, line: bytes) -> bytes:
        words = line.decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response("400 Bad Request", "text/plain", b"not HTTP/1.x\n")
        if words[0] not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"GET only\n")
        route = self._server.routes.get(words[1].partition("?")[0])
        if route is None:
            there = " ".join(self._server.routes)
            return _response("404 Not Found", "text/plain", f"there are: {there}\n".encode())
        answer = _response("200 OK", *route())
        return answer if words[0] == "GET" else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    def _write(self) -> None:
        try:
            self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            return
        except OSError:
            self._out = b""
        if not self._out:
            self.close()

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._timer.cancel()
        with contextlib.suppress(OSError):
            self._server.loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._server.clients.discard(self)


def _response(status: str, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body

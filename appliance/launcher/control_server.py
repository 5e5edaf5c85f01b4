"""The control socket: one JSON line in, one JSON line out, then it closes. Slow, oversized or silent clients cost one
descriptor for a few seconds and nothing else.

Who may: the kernel says which uid connected (SO_PEERCRED, unix(7)); root everything, the appliance user "status". What
that user opens is counted apart: an engine gone wild must not keep an operator from holding its GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.launcher.loop import READ, WRITE, Loop
from appliance.log import ExitCode

MAX_REQUEST_BYTES = 64 << 10
MAX_CLIENTS = 64  # of root
MAX_PUBLIC_CLIENTS = 16  # of all others
_BACKLOG = 256
REQUEST_SECONDS = 5.0  # for the whole request to arrive, and for the reply to be taken
PUBLIC_OPS = frozenset({"status"})


def failure(error: str, *, hint: str | None = None, code: int = ExitCode.FAILED) -> dict[str, Any]:
    """An error reply."""
    return {"ok": False, "error": error, "hint": hint, "exit_code": int(code)}


def parse_request(line: bytes) -> dict[str, Any] | str:
    """The request in one line, or what is wrong with it."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return "the request is not one line of JSON"
    if not isinstance(request, dict) or not isinstance(request.get("op"), str):
        return 'the request is no JSON object with an "op"'
    return request


class Client:
    """One connection, from accept to close."""

    def __init__(self, server: ControlServer, sock: socket.socket, uid: int) -> None:
        self._server, self._loop, self._socket, self.uid = server, server.loop, sock, uid
        self._in, self._out = bytearray(), b""
        self.closed = False
        self.asked = False
        self.on_close: Callable[[], None] = lambda: None  # of a request that waits
        self._timer = self._loop.later(REQUEST_SECONDS, lambda: self.reply(failure("the request did not arrive")))
        self._loop.watch(sock.fileno(), READ, self._read)

    def _read(self) -> None:
        try:
            chunk = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        if self.asked:
            return  # more than one line: ignored, the connection is only watched for its end
        self._in += chunk
        line, newline, _ = self._in.partition(b"\n")
        if len(line) > MAX_REQUEST_BYTES:
            self.reply(failure(f"the request is longer than {MAX_REQUEST_BYTES} bytes", code=ExitCode.USAGE))
        elif newline:
            self._ask(bytes(line))

    def _ask(self, line: bytes) -> None:
        self.asked = True
        self._timer.cancel()
        self._in.clear()
        request = parse_request(line)
        if isinstance(request, str):
            self.reply(failure(request, code=ExitCode.USAGE))
        elif self.uid in self._server.admins or (self.uid == self._server.public_uid and request["op"] in PUBLIC_OPS):
            self._server.handle(request, self)
        else:
            self.reply(failure(f"uid {self.uid} may not do this", hint="run as root", code=ExitCode.REFUSED))

    def reply(self, answer: dict[str, Any]) -> None:
        """Sends it and closes; nothing happens if the client has left."""
        if self.closed or self._out:
            return
        self.asked = True
        self._timer.cancel()
        self._out = json.dumps(answer).encode() + b"\n"
        self._timer = self._loop.later(REQUEST_SECONDS, self.close)
        self._loop.watch(self._socket.fileno(), WRITE, self._write)

    def _write(self) -> None:
        try:
            self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not self._out:
            self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._timer.cancel()
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._server.clients.discard(self)
        self.on_close()


class ControlServer:
    def __init__(
        self,
        loop: Loop,
        path: Path,
        handle: Callable[[dict[str, Any], Client], None],
        *,
        admins: frozenset[int],
        public_uid: int,
        group: int,
    ) -> None:
        """handle: gets a permitted request and its client, and replies now or later. `admins` may ask for everything,
        `public_uid` for PUBLIC_OPS; `group` may connect."""
        self.loop, self.handle, self.admins, self.public_uid = loop, handle, admins, public_uid
        self.clients: set[Client] = set()
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)  # we hold the slot's lock: it is a dead launcher's
        old = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(old)
        os.chown(path, 0 if os.geteuid() == 0 else -1, group)
        os.chmod(path, 0o660)
        self._socket.listen(_BACKLOG)
        loop.watch(self._socket.fileno(), READ, self._accept)

    def _accept(self) -> None:
        for _ in range(_BACKLOG):  # who is sent away costs little; nobody waits behind them for long
            try:
                sock, _ = self._socket.accept()
            except OSError:  # nobody is left, or descriptors ran out: the next one may do better
                return
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        alike = sum((client.uid in self.admins) is (uid in self.admins) for client in self.clients)
        if alike >= (MAX_CLIENTS if uid in self.admins else MAX_PUBLIC_CLIENTS):
            with sock, contextlib.suppress(OSError):
                sock.send(json.dumps(failure("too many clients at once", code=ExitCode.BUSY)).encode() + b"\n")
            return
        self.clients.add(Client(self, sock, uid))

    def close(self) -> None:
        """Idempotent."""
        if self._socket.fileno() < 0:
            return
        self.loop.unwatch(self._socket.fileno())
        self._socket.close()
        for client in list(self.clients):
            client.close()
        self._path.unlink(missing_ok=True)

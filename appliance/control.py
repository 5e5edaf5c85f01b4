"""Asking a launcher or the watchdog: one JSON line over its control socket, one JSON line back
(launcher/control_server.py)."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError, ExitCode
from appliance.paths import Paths

MAX_REQUEST_BYTES = 64 << 10
MAX_REPLY_BYTES = 4 << 20
_KNOCK_SECONDS = 0.01
_REPLY_GRACE = 5.0  # beyond `timeout`, for the launcher's own "timed out" to arrive


class ControlError(ApplianceError):
    """A launcher, or the watchdog, that refused, failed or did not answer; `exit_code` says which."""

    def __init__(self, message: str, *, hint: str | None = None, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = code


class SocketClient:
    """A process of ours that listens on a control socket. `who`, `unit` and `start` (how to have it running again) are
    for messages; `about` goes before what it says itself."""

    def __init__(self, path: Path, who: str, unit: str, start: str, about: str = "") -> None:
        self._path, self._who, self._unit, self._start, self._about = path, who, unit, start, about

    def call(self, op: str, *, timeout: float = 30.0, **args: Any) -> dict[str, Any]:
        """The reply to `op`. `timeout`: seconds until it is reached (with wait=True) or answered.

        ControlError: not running (1), not permitted (4), timed out (3), or as the other side says."""
        request = json.dumps({"op": op, "timeout": timeout} | args).encode() + b"\n"
        try:
            line = self._exchange(request, time.monotonic() + timeout + _REPLY_GRACE)
        except (FileNotFoundError, ConnectionRefusedError):
            raise ControlError(
                f"{self._who} is not running",
                hint=f"{self._start}; `systemctl status {self._unit}` says why it stopped",
            ) from None
        except PermissionError:
            raise ControlError(f"no permission to ask {self._who}", hint="run as root", code=ExitCode.REFUSED) from None
        except TimeoutError:
            raise ControlError(
                f"{self._who} did not answer {op} within {timeout + _REPLY_GRACE:g} s",
                hint=f"see `systemctl status {self._unit}`",
                code=ExitCode.INCONCLUSIVE,
            ) from None
        except OSError as error:
            raise ControlError(f"{self._who} hung up: {error.strerror}") from None
        return self._check(op, line)

    def _exchange(self, request: bytes, deadline: float) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            self._connect(sock, deadline)
            # Who refuses at once (too busy) answers and closes without reading: its words are there to be read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(request)
            reply = bytearray()
            while not reply.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                sock.settimeout(left)
                chunk = sock.recv(1 << 16)
                if not chunk or len(reply) > MAX_REPLY_BYTES:
                    break
                reply += chunk
            return bytes(reply)

    def _connect(self, sock: socket.socket, deadline: float) -> None:
        """A full queue of connections is EAGAIN at once (connect(2), AF_UNIX with a timeout): somebody else knocks a
        lot, and the launcher is about to take us."""
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            try:
                sock.connect(str(self._path))
                return
            except BlockingIOError:
                time.sleep(_KNOCK_SECONDS)
        raise TimeoutError

    def _check(self, op: str, line: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or not isinstance(reply.get("ok"), bool):
            raise ControlError(
                f"{self._who} ended in the middle of {op}",
                hint=f"see `journalctl -u {self._unit}`",
            )
        if not reply["ok"]:
            code = reply.get("exit_code")
            raise ControlError(
                f"{self._about}{reply.get('error')}",
                hint=reply.get("hint"),
                code=ExitCode(code) if code in list(ExitCode) else ExitCode.FAILED,
            )
        return reply


class ControlClient(SocketClient):
    """The launcher of one GPU slot."""

    def __init__(self, paths: Paths, gpu: int) -> None:
        start = f"`appliance start {gpu}`, also after too many starts; its holds are kept on disk"
        who, unit = f"the launcher of GPU {gpu}", f"appliance-gpu@{gpu}"
        super().__init__(paths.control_socket(gpu), who, unit, start, about=f"GPU {gpu}: ")


class WatchdogClient(SocketClient):
    """The watchdog of this host (healthcheck/requests.py has its ops)."""

    def __init__(self, paths: Paths) -> None:
        super().__init__(
            paths.watchdog_control, "the watchdog", "appliance-watchdog", "`systemctl start appliance-watchdog`"
        )

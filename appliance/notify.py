"""sd_notify(3): what a service tells systemd. One datagram a call; never blocks, never fails the caller."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

from appliance.log import printable

_MAX_CHARS = 2000  # of one value; a datagram that is too long is lost with all that is in it


class Notifier:
    """The notification socket of this process; without one (no systemd) every call does nothing."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self.present = self._address is not None
        self.watchdog_seconds = _watchdog_seconds(environ)
        """How often WATCHDOG=1 must come at the latest (sd_watchdog_enabled(3)); None: nobody waits for it."""

    def send(self, **fields: str | int) -> bool:
        """`send(READY=1, STATUS="serving")`. False where there is no socket or systemd does not take it now: its
        timeouts then decide, as they would for a service that hangs."""
        if self._address is None:
            return False
        text = "\n".join(f"{key}={_one_line(value)}" for key, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
            with contextlib.suppress(OSError):
                sock.sendto(text.encode(), self._address)
                return True
        return False


def _one_line(value: str | int) -> str:
    """systemd takes no datagram with a NUL or an invalid character, and `systemctl status` shows the rest as it is."""
    return printable(" ".join(str(value).splitlines()))[:_MAX_CHARS]


def _address(name: str) -> str | None:
    if name.startswith("@"):  # the abstract namespace
        return "\0" + name[1:]
    return name if name.startswith("/") else None


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    micros, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or int(micros) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(micros) / 1e6

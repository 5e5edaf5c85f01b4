"""sd_notify: the datagrams of sd_notify(3), received as systemd receives them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from appliance.notify import Notifier


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_fields_arrive_as_lines(tmp_path: Path, kind: str) -> None:
    name = str(tmp_path / "notify") if kind == "path" else f"@appliance-test-notify-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0", 1))
        assert Notifier({"NOTIFY_SOCKET": name}).send(READY=1, STATUS="two\nlines")
        assert sock.recv(4096) == b"READY=1\nSTATUS=two lines"


@pytest.mark.parametrize("name", ["", "relative", "/nowhere/notify"])
def test_without_systemd_nothing_happens(name: str) -> None:
    assert Notifier({"NOTIFY_SOCKET": name}).send(READY=1) is False


def test_a_systemd_that_does_not_read_never_blocks_us(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        results = [notifier.send(WATCHDOG=1) for _ in range(2000)]
    assert results[0] is True and results[-1] is False


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_as_sd_watchdog_enabled_has_it(environ: dict[str, str], seconds: float | None) -> None:
    assert Notifier(environ).watchdog_seconds == seconds

"""Deadlines that two files have to agree on: whoever waits waits longer than whoever is waited for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from healthcheck.reset_plan import CLIENT_UNITS, Limits

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "systemd/appliance-gpu-reset@.service").read_text()
TIMEOUTS = tomllib.loads((ROOT / "healthcheck/policy.toml").read_text())["timeouts"]


def seconds(setting: str) -> int:
    """Of the reset unit; a plain number is seconds (systemd.time(7))."""
    (value,) = re.findall(rf"^{setting}=(\d+)$", UNIT, re.MULTILINE)
    return int(value)


def test_the_reset_unit_ends_before_the_watchdog_gives_its_gpu_up() -> None:
    """At its limit a start gets SIGTERM, after TimeoutStopSec= SIGKILL; then ExecStopPost=, which writes the result of
    what was killed, has as long again (systemd.service(5)). The watchdog looks for the unit's end every few seconds."""
    longest = seconds("TimeoutStartSec") + 2 * seconds("TimeoutStopSec")
    assert longest + 30 <= TIMEOUTS["reset"]


def test_one_reset_is_waited_for_longer_than_it_may_take() -> None:
    assert TIMEOUTS["reset"] < TIMEOUTS["turn"]


def test_the_reset_itself_ends_before_its_unit_is_killed() -> None:
    """healthcheck/reset.py in the worst case: every part uses up its limit, every client is stopped and started."""
    limits = Limits()
    free = 2 * limits.free
    clients = 2 * limits.unit * len(CLIENT_UNITS)
    queries = 5 * limits.query  # state before, persistence off, a look at the GPU, persistence on, one to spare
    assert free + clients + limits.reset + queries <= seconds("TimeoutStartSec")
    assert limits.unit * len(CLIENT_UNITS) + limits.query <= seconds("TimeoutStopSec"), "ExecStopPost= restores"

"""What a gateway does differently while the canary controller moves connections: it closes them sooner, so that a pool
of keep-alive connections follows the weights, and it counts the addresses they come from.

The controller says so in paths.canary_marker: {"schema": 1, "run": ID, "draining_slot": "stable" | "canary" | null}; no
file: no run. It is looked at as often as the launchers' files. One that cannot be read changes nothing.

A connection is only ever closed by an answer that says so (`Connection: close`, RFC 9112 9.6), never while it is idle:
a request that is on its way would be lost, and its client would see a reset.
"""

from __future__ import annotations

import ipaddress
import logging
import random
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import Annotated, Literal

import msgspec

from appliance.log import ApplianceError
from appliance.statefile import read_state
from engine.log import log_event

logger = logging.getLogger(__name__)

SCHEMA = 1
MAX_REQUESTS = 100  # that a connection answers during a run, at most; drawn between half of it and all,
MAX_SECONDS = 60.0  # as the age is: connections of a pool shall not all end at once
MAX_CLIENTS = 1024
"""Addresses that are told apart in one run. A verdict asks for a few; nobody shall be able to fill our memory."""


class Marker(msgspec.Struct, kw_only=True, frozen=True):
    run: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | int
    draining_slot: Literal["stable", "canary"] | None = None


class Clients:
    """Distinct addresses of the clients of one run, up to MAX_CLIENTS: IPv4 addresses and IPv6 networks of 64 bits
    (one host has many addresses in its network)."""

    def __init__(self) -> None:
        self.run: str | None = None
        self._seen: set[str] = set()

    def begin(self, run: str | None) -> None:
        """From now on addresses are of `run`, of which there are none yet; None: they are not looked at."""
        self._seen.clear()
        self.run = run

    def add(self, address: str) -> None:
        if self.run is not None and len(self._seen) < MAX_CLIENTS:
            self._seen.add(_network(address))

    def merge(self, run: str | None, keys: Iterable[str]) -> None:
        """What another worker has seen in the same run."""
        if run is not None and run == self.run:
            for key in keys:
                if len(self._seen) >= MAX_CLIENTS:
                    return
                self._seen.add(key)

    @property
    def keys(self) -> list[str]:
        return list(self._seen)

    @property
    def number(self) -> int:
        return len(self._seen)


def _network(address: str) -> str:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return (parsed.packed[:8]).hex()


class Leave:
    """When one connection ends in one run. `answers`: what it has answered by now, `since`: when it was opened."""

    def __init__(self, run: str, began: float, since: float, answers: int) -> None:
        self.run = run
        self._answers = answers + random.randint(MAX_REQUESTS // 2, MAX_REQUESTS)
        # One that was open before the run gets its time, too: else all of a pool would end with their next answer.
        self._at = max(since, began) + MAX_SECONDS * random.uniform(0.5, 1.0)

    def due(self, answers: int, now: float) -> bool:
        return answers >= self._answers or now >= self._at


class RunWatch:
    """The run that is on, as this process has read it."""

    def __init__(self, path: Path, slot: str) -> None:
        self.run: str | None = None
        self.draining = False  # our slot's connections shall end as soon as they can
        self.clients = Clients()
        self._path, self._slot = path, slot
        self._began = 0.0
        self._error: str | None = None

    def poll(self) -> None:
        """Look once."""
        try:
            state = read_state(self._path, schema=SCHEMA)
            marker = None if state is None else msgspec.convert(state, Marker)
        except (ApplianceError, OSError, ValueError, RecursionError) as error:
            if str(error) != self._error:  # once, not ten times a second
                self._error = str(error)
                words = f"{self._path}: {error}; what was in force stays in force"
                log_event(logger, logging.ERROR, "canary_marker", words)
            return
        self._error = None
        run = None if marker is None else str(marker.run)
        draining = marker is not None and marker.draining_slot == self._slot
        if (run, draining) != (self.run, self.draining):
            log_event(logger, logging.INFO, "canary_run", run=run, before=self.run, draining=draining)
        if run != self.run:
            self._began = monotonic()
            self.clients.begin(run)
        self.run, self.draining = run, draining

    def leave(self, since: float, answers: int) -> Leave:
        """For a connection that has no Leave of this run yet."""
        assert self.run is not None
        return Leave(self.run, self._began, since, answers)

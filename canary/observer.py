"""Watches one run: whether the canary lives (no statistics), and what the judge says (nothing but statistics)."""

from __future__ import annotations

import time
from typing import Any

from appliance.launcher.state import say
from appliance.log import ApplianceError
from canary.seams import Judge, Parts, Reading
from canary.types import Policy, SideCounts, Verdict

_DEAD_SAMPLES = 2  # one may be an accident
_BLIND_FACTOR = 5.0  # times liveness_seconds without any answer: nobody watches the canary


class Observer:
    """Of one run, in one process. Times are CLOCK_MONOTONIC."""

    def __init__(self, policy: Policy, parts: Parts, evidence: dict[str, Any] | None) -> None:
        self.weight = 0.0  # of the rule now
        self.alive: bool | None = None  # None: not known yet
        self.canary: SideCounts | None = None
        self.stable: SideCounts | None = None
        self.error: str | None = None
        self._policy, self._parts, self._evidence = policy, parts, evidence
        self._judge: Judge | None = None
        self._dead = 0
        self._heard = self._lived = time.monotonic()
        self._judged = 0.0

    def prepare(self) -> None:
        """Makes the judge, which may load libraries; in the thread that may wait. Once."""
        if self._judge is None:
            self._judge = self._parts.judge(self._policy, self._evidence)

    def begin_step(self) -> None:
        if self._judge is not None:
            self._judge.begin_step()

    def sampled(self, result: Any) -> None:
        """Counts of both gateways, or the exception instead."""
        now = time.monotonic()
        if isinstance(result, Exception):
            if self.error is None:
                say(f"<3>the gateways cannot be asked: {result}")
            self.error = getattr(result, "message", None) or str(result)
            return
        self.canary, self.stable = result
        self.error, self._heard = None, now
        assert self.canary is not None
        self.alive = self.canary.alive
        self._dead = 0 if self.alive else self._dead + 1
        if self.alive:
            self._lived = now

    def dead(self, liveness_seconds: float) -> str | None:
        """Why the canary must get no more connections, whatever the statistics say."""
        now = time.monotonic()
        if self.error is not None and now - self._heard > _BLIND_FACTOR * liveness_seconds:
            return f"the gateways could not be asked for {now - self._heard:.0f} s: nobody watches the canary ({self.error})"
        if self._dead >= _DEAD_SAMPLES or (self._dead and now - self._lived >= liveness_seconds):
            return "the canary's gateway does not answer"
        return None

    def due(self, interval: float) -> bool:
        return self.canary is not None and time.monotonic() - self._judged >= interval

    def judge(self, *, final: bool) -> Verdict | None:
        """The verdict on all that was seen; None while there is nothing to judge."""
        if self._judge is None or self.canary is None or self.error is not None:
            return None
        self._judged = time.monotonic()
        kernel = None
        try:
            kernel = self._parts.rules.counters().get("canary")
        except ApplianceError as error:
            say(f"<4>the rule's counters cannot be read: {error.message}")
        self._judge.observe(
            Reading(
                at=self._judged, canary=self.canary, stable=self.stable, weight=self.weight, kernel_connections=kernel
            )
        )
        return self._judge.verdict(final=final)

    def evidence(self) -> dict[str, Any] | None:
        return self._judge.evidence() if self._judge is not None else None

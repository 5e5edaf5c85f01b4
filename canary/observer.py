"""Watches one run: whether the canary lives (no statistics), and what the judge says (nothing but statistics)."""

from __future__ import annotations

import time
from typing import Any

from appliance.launcher.state import say
from appliance.log import ApplianceError
from canary.run import Run
from canary.samples import Reading
from canary.seams import Judge, Parts
from canary.types import Verdict
from canary.windows import look_due

_DEAD_READINGS = 2  # one may be an accident
_BLIND_FACTOR = 5.0  # times liveness_seconds without any number of the canary: nobody watches it
GOLDEN_SECONDS = 60.0  # golden answers are compared again, beside once in each step


class Observer:
    """Of one run, in one process. Times are CLOCK_MONOTONIC."""

    def __init__(self, run: Run, parts: Parts) -> None:
        self.weight = 0.0  # of the rule now
        self.alive: bool | None = None  # None: not known yet
        self.reading: Reading | None = None
        self.kernel: dict[str, int] | None = None  # new connections by the rule's counters
        self._policy, self._parts, self._evidence = run.policy, parts, run.evidence
        self._samples = parts.samples(run.policy, {"stable": run.stable, "canary": run.release})
        self._judge: Judge | None = None
        self._base: dict[str, int] | None = None  # of the kernel's counters, when this step was first judged
        self._begun: float | None = None  # weight of a step that the judge has not been told of
        self._dead = 0
        self._seen = time.monotonic()
        self._judged = self._told = 0.0
        self._step_from = self._judged_at = 0  # the canary's requests when this step began, and at the last look
        self._golden: bool | None = None
        self._golden_at: float | None = None

    # -- in the thread that may wait
    def read(self) -> Reading:
        """Counts of both gateways; the first call makes the judge, which loads libraries."""
        if self._judge is None:
            self._judge = self._parts.judge(self._policy, self._evidence)
        return self._samples.read()

    # -- in the loop
    def begin_step(self, weight: float) -> None:
        self._begun, self._golden_at, self._base = weight, None, None

    def golden_due(self) -> bool:
        return self._golden_at is None or time.monotonic() - self._golden_at >= GOLDEN_SECONDS

    def golden(self, right: bool | None) -> None:
        """None: could not be compared; asked again soon."""
        now = time.monotonic()
        self._golden_at = now if right is not None else now - GOLDEN_SECONDS + self._policy.interval
        self._golden = right if self._golden is not False else False

    def sampled(self, reading: Reading) -> None:
        self.reading = reading
        if reading.canary is not None:
            self._seen = time.monotonic()
        if "canary" in reading.not_alive:
            self.alive, self._dead = False, self._dead + 1
        elif reading.canary is not None:
            self.alive, self._dead = True, 0

    def dead(self) -> str | None:
        """Why the canary must get no more connections, whatever the statistics say."""
        if self._dead >= _DEAD_READINGS and self.reading is not None:
            return f"the canary is not alive: {self.reading.not_alive.get('canary')}"
        blind = time.monotonic() - self._seen
        if blind > _BLIND_FACTOR * self._policy.liveness_seconds:
            return f"nobody watches the canary: its gateway could not be asked for {blind:.0f} s"
        return None

    def due(self) -> bool:
        requests = self.reading.canary.requests if self.reading and self.reading.canary else 0
        new, so_far = requests - self._judged_at, self._judged_at - self._step_from
        return look_due(time.monotonic() - self._judged, new, so_far, self._policy.interval)

    def tell_due(self) -> bool:
        """Whether a verdict that ends nothing is to be kept and shown: once in an interval, however often it looks."""
        if time.monotonic() - self._told < self._policy.interval:
            return False
        self._told = time.monotonic()
        return True

    def judge(self) -> Verdict | None:
        """The verdict on all that was seen; None while there is nothing to judge by: no reading yet, or the canary was
        not alive at the last one, which liveness decides."""
        if self._judge is None or self.reading is None or self.alive is False:
            return None
        self._judged = time.monotonic()
        self._judged_at = self.reading.canary.requests if self.reading.canary else 0
        if self._begun is not None:
            self._judge.begin_step(self._begun)
            self._begun, self._step_from = None, self._judged_at
        try:
            self.kernel = self._parts.rules.counters()
        except ApplianceError as error:
            if self.kernel is not None:
                say(f"<4>the rule's counters cannot be read: {error.message}")
            self.kernel = None
        self._base = self._base or self.kernel
        golden, self._golden = self._golden, None
        kernel = self.kernel["canary"] if self.kernel is not None else None
        return self._judge.look(self.reading, weight=self.weight, kernel=kernel, golden_ok=golden)

    def observed(self) -> dict[str, int] | None:
        """New connections of this step by the kernel's counters; None: unknown."""
        if self.kernel is None or self._base is None:
            return None
        return {side: count - self._base[side] for side, count in self.kernel.items()}

    def evidence(self) -> dict[str, Any] | None:
        return self._judge.evidence() if self._judge is not None else None

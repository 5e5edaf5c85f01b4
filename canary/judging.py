"""The judge of one run: turns readings into windows, windows into evidence, and asks judge.py. Holds the evidence; the
judging itself is pure. Imported in a run only: scipy takes a second and 60 MB."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from canary import windows
from canary.evidence import Evidence, Kernel
from canary.judge import judge
from canary.samples import Reading
from canary.types import Policy, SideCounts, Verdict, Window

_MAX_AGE_INTERVALS = 2.0
_MIN_AGE = 2.0  # seconds


class EvidenceJudge:
    """seams.Judge."""

    def __init__(self, policy: Policy, kept: dict[str, Any] | None) -> None:
        """`kept`: of `evidence()`, from before a restart of the controller."""
        self._policy = policy
        self._evidence = Evidence()
        self._before: windows.Reading | None = None
        if kept is not None:
            # What the kernel counted while nobody looked can be matched with nothing.
            self._evidence = replace(msgspec.convert(kept, Evidence), kernel=Kernel())

    def begin_step(self, weight: float) -> None:
        self._evidence = self._evidence.begin_step(weight)

    def look(self, reading: Reading, *, weight: float, kernel: int | None, golden_ok: bool | None) -> Verdict:
        if not self._evidence.steps:
            self.begin_step(weight)
        window = self._window(reading, weight, kernel, golden_ok)
        self._evidence = self._evidence.add(window, self._policy)
        return judge(window, self._evidence, self._policy)

    def _window(self, reading: Reading, weight: float, kernel: int | None, golden_ok: bool | None) -> Window:
        stable = reading.stable if weight < 100 else None  # at 100 % it gets no new connections
        if reading.canary is None or reading.invalid is not None:
            return _invalid(reading.invalid or "the canary's counters cannot be read", reading.canary, golden_ok)
        now = windows.Reading(
            at=reading.at, canary=reading.canary, stable=stable, kernel_connections=kernel, golden_ok=golden_ok
        )
        before = self._before
        if before is None:
            self._before = now
            return _invalid("the first reading", reading.canary, golden_ok)
        window = windows.difference(before, now, max(_MIN_AGE, _MAX_AGE_INTERVALS * self._policy.interval))
        # What went uncounted in a window that cannot be judged is in the next one.
        self._before = windows.baseline(before, now, window)
        return window

    def evidence(self) -> dict[str, Any]:
        value: dict[str, Any] = msgspec.to_builtins(self._evidence)
        return value


def _invalid(why: str, canary: SideCounts | None, golden_ok: bool | None) -> Window:
    nothing = SideCounts(epoch=canary.epoch if canary else windows.UNKNOWN, at=canary.at if canary else 0.0)
    return Window(seconds=0.0, canary=nothing, stable=None, golden_ok=golden_ok, invalid=why)

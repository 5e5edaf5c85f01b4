"""What has been counted in a run: readings of counters -> windows -> evidence, which the judge judges.

Windows (canary/windows.py) are added one by one. Everything here is a frozen value that msgspec turns into JSON and
back, so that a controller started anew goes on with what was seen.

Kept apart for each step: counts of both sides and the moment of the one fixed look. Kept over the run: the sequential
comparison with stable, which grows window by window. Warm-up is left out of latencies, never out of errors.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from canary import stats
from canary.types import Limit, Policy, SideCounts, Window
from canary.windows import GOLDEN, UNKNOWN, Liveness, Reading, baseline, difference

__all__ = ["GOLDEN", "Evidence", "Kernel", "Liveness", "Reading", "Tally", "baseline", "difference"]

# How many times stable's share may be the canary's before a comparison speaks against it. The first: for blame, where
# the absolute limit has been crossed already. The second: for "not worse", where small differences harm nobody.
EQUAL: Final = 1.0
TOLERATED: Final = 1.25

LOOK_PART: Final = 0.8  # of alpha, for the fixed-size test; the rest for the sequential one after it
LATENCIES: Final = ("itl", "ttft", "request")
LOST: Final = "lost_connection"  # class of errors: the kernel sent it to the canary, no gateway accepted it
SETTLE_SECONDS: Final = 2.0  # so long may a connection that the rule has counted wait for the gateway


def limit_key(limit: Limit) -> str:
    """Its name in SideCounts.slow: "itl:0.08"."""
    return f"{limit.metric}:{limit.seconds:g}"


class Tally(msgspec.Struct, kw_only=True, frozen=True):
    """Sums of one side. `timed` are the requests of the windows whose latencies count."""

    requests: int = 0
    errors: dict[str, int] = {}
    rejected: int = 0
    connections: int = 0
    clients: int = 0  # the most seen at once
    timed: int = 0
    observations: dict[str, int] = {}
    slow: dict[str, int] = {}

    @property
    def bad(self) -> int:
        """Requests that failed. Wrong golden answers are no requests of clients and are judged on their own."""
        return sum(count for name, count in self.errors.items() if name != GOLDEN)

    def with_window(self, window: SideCounts, *, timed: bool) -> Tally:
        return Tally(
            requests=self.requests + window.requests,
            errors=_add(self.errors, window.errors),
            rejected=self.rejected + window.rejected,
            connections=self.connections + window.connections,
            clients=max(self.clients, window.clients),
            timed=self.timed + (window.requests if timed else 0),
            observations=_add(self.observations, window.observations) if timed else self.observations,
            slow=_add(self.slow, window.slow) if timed else self.slow,
        )

    def plus(self, other: Tally) -> Tally:
        return Tally(
            requests=self.requests + other.requests,
            errors=_add(self.errors, other.errors),
            rejected=self.rejected + other.rejected,
            connections=self.connections + other.connections,
            clients=max(self.clients, other.clients),
            timed=self.timed + other.timed,
            observations=_add(self.observations, other.observations),
            slow=_add(self.slow, other.slow),
        )

    def independent(self, metric: str) -> float:
        """Part of an observation that counts as independent of the others. The tokens of one stream are slow together,
        so that a request with 500 of them tells as much as one observation, not as 500."""
        seen = self.observations.get(metric, 0)
        return min(1.0, self.timed / seen) if seen else 1.0

    def share_counts(self, limit: Limit | None) -> tuple[float, float]:
        """(bad, all) of the error rate (None) or of a latency limit, in effective numbers."""
        if limit is None:
            return self.bad, self.requests
        scale = self.independent(limit.metric)
        return self.slow.get(limit_key(limit), 0) * scale, self.observations.get(limit.metric, 0) * scale


def _add(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


class Look(msgspec.Struct, frozen=True):
    """(bad, all) at the one moment of a step at which the fixed-size test is made."""

    bad: float
    total: float


class Step(msgspec.Struct, kw_only=True, frozen=True):
    """What was seen at one weight."""

    weight: float
    seconds: float = 0.0  # that valid windows cover
    canary: Tally = Tally()
    stable: Tally | None = None  # in the same windows; None: without a stable side
    baseline: Tally = Tally()  # the canary, in the windows that had a stable side
    golden: int = 0  # times that the golden answers were right
    looks: dict[str, Look] = {}  # "errors" or limit_key -> when the fixed look was taken


class Kernel(msgspec.Struct, kw_only=True, frozen=True):
    """Connections that the rule sent to the canary beside those its gateway accepted.

    A lower bound of the lost ones: those counted SETTLE_SECONDS ago or longer less all that are accepted by now. So it
    never takes for lost what only waits, or what was read a moment later than the gateway's counters; losses show in
    full at the first lull. Connections that reached the canary's port on another way could hide some."""

    waiting: list[tuple[float, int]] = []  # (age in seconds, connections) not yet due
    due: int = 0
    accepted: int = 0
    lost: int = 0  # since the last gap
    known: bool = False  # in the newest window

    def with_window(self, seconds: float, counted: int | None, accepted: int) -> Kernel:
        if counted is None:  # what waited can no longer be matched
            return Kernel()
        waiting = [(age + seconds, number) for age, number in self.waiting]
        due = self.due + sum(number for age, number in waiting if age >= SETTLE_SECONDS)
        accepted = self.accepted + accepted
        return Kernel(
            waiting=[*(entry for entry in waiting if entry[0] < SETTLE_SECONDS), (0.0, counted)],
            due=due,
            accepted=accepted,
            lost=max(self.lost, due - accepted),
            known=True,
        )


class Evidence(msgspec.Struct, kw_only=True, frozen=True):
    """Of one run. `begin_step` first, then `add` for each window; both return the new value."""

    steps: list[Step] = []
    epoch: str | None = None  # of the canary's gateway
    warm: float = 0.0  # seconds since the canary's gateway got its first window
    restarts: int = 0  # of the canary's gateway
    invalid_windows: int = 0
    kernel: Kernel = Kernel()
    worse: dict[str, list[float]] = {}  # comparison -> sums of stats.worse_increment

    @property
    def step(self) -> Step:
        return self.steps[-1]

    @property
    def total(self) -> Tally:
        """The canary's counts of all steps."""
        total = Tally()
        for step in self.steps:
            total = total.plus(step.canary)
        return total

    def begin_step(self, weight: float) -> Evidence:
        """Of the first step, of each further one, and of a step that is tried again."""
        return replace(self, steps=[*self.steps, Step(weight=weight)])

    def add(self, window: Window, policy: Policy) -> Evidence:
        """An invalid window adds no counts. Where the canary's gateway started anew, the step's time and the warm-up
        begin again: what went on before its end is unknown."""
        if not self.steps:
            raise ValueError("begin_step comes before add")
        if window.invalid is not None:
            return self._without(window)
        timed = self.warm >= policy.warmup_seconds
        kernel = self.kernel.with_window(window.seconds, window.kernel_connections, window.canary.connections)
        lost = kernel.lost - self.kernel.lost if kernel.known else 0
        canary = window.canary
        if lost:  # a connection that nobody took is a request that failed
            canary = replace(canary, requests=canary.requests + lost, errors=_add(canary.errors, {LOST: lost}))
        step = self.step
        step = replace(
            step,
            seconds=step.seconds + window.seconds,
            canary=step.canary.with_window(canary, timed=timed),
            golden=step.golden + (window.golden_ok is True),
        )
        if window.stable is not None:
            step = replace(
                step,
                stable=(step.stable or Tally()).with_window(window.stable, timed=timed),
                baseline=step.baseline.with_window(canary, timed=timed),
            )
        grown = replace(
            self,
            steps=[*self.steps[:-1], step],
            epoch=window.canary.epoch,
            warm=self.warm + window.seconds,
            kernel=kernel,
        )
        return grown._compared(canary, window.stable, policy, timed=timed)._with_looks(policy)

    def _without(self, window: Window) -> Evidence:
        epoch = self.epoch if window.canary.epoch == UNKNOWN else window.canary.epoch
        began_anew = self.epoch is not None and self.epoch != epoch
        step = self.step
        if window.golden_ok:
            step = replace(step, golden=step.golden + 1)
        kept = replace(self, invalid_windows=self.invalid_windows + 1, kernel=Kernel(), epoch=epoch)
        if not began_anew:
            return replace(kept, steps=[*self.steps[:-1], step])
        step = replace(step, seconds=0.0, golden=0)
        return replace(kept, steps=[*self.steps[:-1], step], warm=0.0, restarts=self.restarts + 1)

    def _compared(self, canary: SideCounts, stable: SideCounts | None, policy: Policy, *, timed: bool) -> Evidence:
        if stable is None:
            return self
        worse = dict(self.worse)
        for key, ratio, metric, bad, stable_bad in _comparisons(canary, stable, policy):
            if metric in LATENCIES and not timed:
                continue
            total, stable_total = _totals(canary, metric), _totals(stable, metric)
            increment = stats.worse_increment(bad, total, stable_bad, stable_total, ratio) * self._independent(metric)
            worse[key] = (np.asarray(worse.get(key, 0.0)) + increment).tolist()
        return replace(self, worse=worse)

    def _independent(self, metric: str) -> float:
        """As Tally.independent, of both sides of this step. A likelihood ratio to a power below one is an e-value still
        (Jensen), and where all tokens of a request are slow together it is that of the request."""
        if metric not in LATENCIES or self.step.stable is None:
            return 1.0
        return self.step.stable.plus(self.step.baseline).independent(metric)

    def _with_looks(self, policy: Policy) -> Evidence:
        """The fixed look of a step is taken once its time is over and enough was seen that it could pass at all: a rule
        that depends on numbers of observations only, so the test keeps its level."""
        step = self.step
        if step.seconds < step_time(policy):
            return self
        looks, total = dict(step.looks), self.total
        for name, limit, share in absolute_metrics(policy):
            bad, seen = total.share_counts(limit)
            if name not in looks and seen >= stats.needed(share, LOOK_PART * policy.alpha):
                looks[name] = Look(bad, seen)
        return replace(self, steps=[*self.steps[:-1], replace(step, looks=looks)])


def step_time(policy: Policy) -> float:
    """Seconds of valid windows that make a step complete. The controller's clock begins and ends between readings, so
    up to two intervals of a step are in no window of it."""
    return policy.step_seconds - min(2 * policy.interval, policy.step_seconds / 2)


def absolute_metrics(policy: Policy) -> list[tuple[str, Limit | None, float]]:
    """(name, limit or None for errors, allowed share) of each."""
    named = [(limit_key(limit), limit, limit.share) for limit in policy.limits]
    return [("errors", None, policy.error_rate), *named]


def _comparisons(canary: SideCounts, stable: SideCounts, policy: Policy) -> list[tuple[str, float, str, int, int]]:
    """(key in Evidence.worse, tolerated ratio, metric, canary's bad ones, stable's)."""
    result = [
        ("errors", EQUAL, "requests", _bad(canary), _bad(stable)),
        ("rejected", TOLERATED, "offered", canary.rejected, stable.rejected),
    ]
    for limit in policy.limits:
        key = limit_key(limit)
        result.append((f"limit {key}", EQUAL, limit.metric, canary.slow.get(key, 0), stable.slow.get(key, 0)))
    if policy.ttft_not_worse:
        for key in sorted(first_token_edges(canary.slow) & first_token_edges(stable.slow)):
            result.append((f"not worse {key}", TOLERATED, "ttft", canary.slow[key], stable.slow[key]))
    return result


def first_token_edges(slow: dict[str, int]) -> set[str]:
    return {key for key in slow if key.startswith("ttft:")}


def _bad(side: SideCounts) -> int:
    return sum(count for name, count in side.errors.items() if name != GOLDEN)


def _totals(side: SideCounts, metric: str) -> int:
    match metric:
        case "requests":
            return side.requests
        case "offered":
            return side.requests + side.rejected
        case _:
            return side.observations.get(metric, 0)

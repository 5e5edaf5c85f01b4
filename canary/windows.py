"""Windows between two readings of cumulative counters, and whether a canary is alive. Pure.

A window that must not be judged says why (Window.invalid): unknown numbers are never taken for zeros.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from canary.types import Policy, SideCounts, Window

GOLDEN: Final = "golden"  # class of errors: the canary's gateway or a probe found a golden answer wrong
LOOK_REQUESTS: Final = 20
LOOK_SHARE: Final = 0.05  # of the requests of a step
UNKNOWN: Final = "unknown"  # epoch of a side that could not be read
_SPAN_SLACK: Final = 0.5  # seconds by which the times of both sides' readings may differ, and a fifth of the window


def look_due(seconds: float, new: int, so_far: int, interval: float) -> bool:
    """Whether to judge again: `interval` seconds after the last time, and sooner where the canary has had enough `new`
    requests beside the `so_far` ones of this step. At 1,000 requests/s a bad release is so found after hundreds, not
    after as many as an interval brings. Depends on numbers only, never on what was bad: windows stay fair."""
    return seconds >= interval or new >= max(LOOK_REQUESTS, LOOK_SHARE * so_far)


class Reading(msgspec.Struct, kw_only=True, frozen=True):
    """Both sides' cumulative counters at one moment."""

    at: float  # monotonic seconds
    canary: SideCounts
    stable: SideCounts | None  # None at 100 %
    kernel_connections: int | None = None  # cumulative; None: the rule could not be read
    golden_ok: bool | None = None  # None: not asked since the reading before


def difference(before: Reading, after: Reading, max_age: float) -> Window:
    """The window between two readings. One that must not be judged says why in `invalid`: counters that began anew or
    went down, a side read more than `max_age` seconds before `after.at`, numbers that are no counts (NaN)."""
    pairs = [("the canary", before.canary, after.canary)]
    stable = None
    invalid = None
    if after.stable is not None:
        if before.stable is None:
            invalid = "stable: the first reading of it"
        else:
            pairs.append(("stable", before.stable, after.stable))
    for side, old, new in pairs:
        invalid = invalid or _invalid(side, old, new, after.at, max_age)
    seconds = after.canary.at - before.canary.at
    if not invalid and len(pairs) == 2 and before.stable and after.stable:
        other = after.stable.at - before.stable.at
        if abs(other - seconds) > _SPAN_SLACK + 0.2 * max(other, seconds):
            invalid = f"the sides were read over different times: {seconds:.1f} s and {other:.1f} s"
        stable = _minus(before.stable, after.stable)
    if invalid:
        return Window(
            seconds=0.0, canary=_nothing(after.canary), stable=None, golden_ok=after.golden_ok, invalid=invalid
        )
    kernel = None
    if before.kernel_connections is not None and after.kernel_connections is not None:
        kernel = after.kernel_connections - before.kernel_connections
        if kernel < 0:
            kernel = None  # the rule was made anew: unknown what it counted
    canary = _minus(before.canary, after.canary)
    return Window(seconds=seconds, canary=canary, stable=stable, kernel_connections=kernel, golden_ok=after.golden_ok)


def baseline(before: Reading, after: Reading, window: Window) -> Reading:
    """The reading with which the window after `window` begins. What a late or missing reading hid is in the counters
    still and must not be lost: those windows are the ones with errors. Counters that began anew have forgotten it."""
    if window.invalid is None:
        return after
    sides = [(before.canary, after.canary)]
    if after.stable is not None:
        if before.stable is None:
            return after
        sides.append((before.stable, after.stable))
    return before if all(_goes_on(old, new) for old, new in sides) else after


def _goes_on(old: SideCounts, new: SideCounts) -> bool:
    counts = _flat(new)
    return old.epoch == new.epoch and all(counts.get(name, -1) >= value for name, value in _flat(old).items())


def _invalid(side: str, old: SideCounts, new: SideCounts, now: float, max_age: float) -> str | None:
    if old.epoch != new.epoch:
        return f"{side}: its gateway started anew, so its counters did"
    if not abs(now - new.at) <= max_age:  # so that NaN is old, too
        return f"{side}: its counters were last read {now - new.at:.1f} s ago"
    if not new.at > old.at:
        return f"{side}: no new reading of its counters"
    before, after = _flat(old), _flat(new)
    if missing := before.keys() - after.keys():
        return f"{side}: {min(missing)} is no longer reported"
    for name, value in after.items():
        if type(value) is not int or value < 0:
            return f"{side}: {name} is {value!r}, no count"
        if value < before.get(name, 0):
            return f"{side}: {name} went down from {before[name]} to {value}"
    return _inconsistent(side, _minus(old, new))


def _inconsistent(side: str, window: SideCounts) -> str | None:
    bad = sum(count for name, count in window.errors.items() if name != GOLDEN)
    if bad > window.requests:
        return f"{side}: {bad} errors among {window.requests} requests"
    for key, slow in window.slow.items():
        metric = key.partition(":")[0]
        if slow > window.observations.get(metric, 0):
            return f"{side}: {slow} slow ones ({key}) among {window.observations.get(metric, 0)}"
    return None


def _flat(counts: SideCounts) -> dict[str, int]:
    flat = {name: getattr(counts, name) for name in ("requests", "rejected", "connections")}
    for group in ("errors", "observations", "slow"):
        flat |= {f"{group}[{name}]": value for name, value in getattr(counts, group).items()}
    return flat


def _minus(old: SideCounts, new: SideCounts) -> SideCounts:
    return replace(
        new,
        requests=new.requests - old.requests,
        errors=_sub(old.errors, new.errors),
        rejected=new.rejected - old.rejected,
        connections=new.connections - old.connections,
        observations=_sub(old.observations, new.observations),
        slow=_sub(old.slow, new.slow),
    )  # `clients` is no counter: how many there are now


def _sub(old: dict[str, int], new: dict[str, int]) -> dict[str, int]:
    return {name: value - old.get(name, 0) for name, value in new.items()}


def _nothing(side: SideCounts) -> SideCounts:
    return SideCounts(epoch=side.epoch, at=side.at, clients=side.clients, alive=side.alive)


class Liveness(msgspec.Struct, kw_only=True, frozen=True):
    """Whether the canary has been dead for long enough to act without statistics. Unknown is not dead."""

    dead_since: float | None = None

    def see(self, alive: bool | None, at: float) -> Liveness:
        if alive is None:
            return self
        if alive:
            return Liveness()
        return self if self.dead_since is not None else Liveness(dead_since=at)

    def tripped(self, at: float, policy: Policy) -> bool:
        return self.dead_since is not None and at - self.dead_since >= policy.liveness_seconds

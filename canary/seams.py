"""What the controller needs of the other parts of the canary; wiring.py puts the real ones in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from canary.types import Policy, SideCounts, Verdict


@dataclass(frozen=True, slots=True)
class RuleState:
    """Of the kernel's rules, as they were read."""

    weight: float | None  # percent; None: our rules are not there, which is weight 0
    run: str | None = None
    drift: tuple[str, ...] = ()  # what somebody changed
    conntrack_percent: float | None = None


class Rules(Protocol):
    """netfilter, or what a test puts in its place. Every method raises ApplianceError where the kernel says no."""

    def read(self) -> RuleState: ...

    def set_weight(self, run: str, weight: float) -> None:
        """Percent of new connections; read back before it returns. Never touches connections that are there."""
        ...

    def repair(self) -> list[str]:
        """Puts back what others changed; says what that was."""
        ...

    def counters(self) -> dict[str, int]:
        """New connections since the host's start: {"canary": n, "stable": n}; never goes down in one boot."""
        ...

    def remove(self) -> None: ...

    def diff(self) -> str:
        """What `repair` would change, for people; empty if nothing."""
        ...

    def draining(self) -> int | None:
        """Connections to the canary that are still there; None: unknown."""
        ...


class Samples(Protocol):
    """Counts of both gateways."""

    def read(self) -> tuple[SideCounts, SideCounts | None]:
        """(canary, stable); ApplianceError where they cannot be had."""
        ...

    def problem(self, policy: Policy) -> str | None:
        """Why the gateways cannot measure what `policy` asks for; None if they can."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at everything that counts."""

    at: float  # CLOCK_MONOTONIC
    canary: SideCounts
    stable: SideCounts | None
    weight: float
    kernel_connections: int | None = None  # to the canary, cumulative
    golden_ok: bool | None = None


class Judge(Protocol):
    """Statistics of one run. NaN, no data and stale counts are INCONCLUSIVE, never PASS."""

    def begin_step(self) -> None: ...

    def observe(self, reading: Reading) -> None: ...

    def verdict(self, *, final: bool) -> Verdict:
        """`final`: the step's time is over; PASS is only said then."""
        ...

    def evidence(self) -> dict[str, Any]:
        """For the state file; JudgeFactory takes it back."""
        ...


JudgeFactory = Callable[[Policy, dict[str, Any] | None], Judge]


@dataclass(frozen=True, slots=True)
class Parts:
    """All of them, as a controller gets them."""

    rules: Rules
    samples: Samples
    judge: JudgeFactory

"""What the controller needs of the other parts of the canary; wiring.py puts the real ones in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from canary.samples import Reading
from canary.types import Policy, Verdict


class RuleState(Protocol):
    """Of the kernel's rules, as they were read."""

    @property
    def weight(self) -> float | None:
        """Percent; None: our rules are not there, which is weight 0."""
        ...

    @property
    def run(self) -> str | None: ...

    @property
    def drift(self) -> tuple[str, ...]:
        """What somebody changed."""
        ...

    @property
    def conntrack_percent(self) -> float | None: ...


class Rules(Protocol):
    """canary.netfilter.apply.Netfilter, or what a test puts in its place. Every method raises ApplianceError where the
    kernel says no."""

    def read(self) -> RuleState: ...

    def set_weight(self, run: str, weight: float) -> Any:
        """Percent of new connections; read back before it returns. Never touches connections that are there."""
        ...

    def repair(self) -> list[str]:
        """Puts back what others changed; says what that was."""
        ...

    def counters(self) -> dict[str, int]:
        """New connections since this object was made: {"canary": n, "stable": n}."""
        ...

    def diff(self) -> str:
        """What `repair` would change, for people; empty if nothing."""
        ...

    def notes(self) -> list[str]:
        """Rules of others that the canary cannot do justice to."""
        ...

    def draining(self) -> int | None:
        """Connections to the canary that are still there; None: unknown."""
        ...


class Samples(Protocol):
    """canary.samples.Samples, of one run."""

    def read(self) -> Reading: ...

    def check(self) -> None:
        """SamplesError where the gateways cannot measure what the policy limits."""
        ...


class Judge(Protocol):
    """Statistics of one run (judging.py). NaN, no data and stale counts are INCONCLUSIVE, never PASS."""

    def begin_step(self, weight: float) -> None: ...

    def look(self, reading: Reading, *, weight: float, kernel: int | None, golden_ok: bool | None) -> Verdict:
        """Adds what was counted since the look before, and judges all of it. `kernel`: connections that the rule sent
        to the canary, cumulative; None: unknown. `golden_ok`: None where they were not compared since."""
        ...

    def evidence(self) -> dict[str, Any]:
        """For the state file; JudgeFactory takes it back."""
        ...


JudgeFactory = Callable[[Policy, dict[str, Any] | None], Judge]
SamplesFactory = Callable[[Policy, Mapping[str, str]], Samples]
"""The policy, and slot -> the release that is judged there."""


@dataclass(frozen=True, slots=True)
class Parts:
    """All of them, as a controller gets them."""

    rules: Rules
    samples: SamplesFactory
    judge: JudgeFactory

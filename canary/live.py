"""What status shows beside the run: of this process and of this run only, and unknown when it is old."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from canary.run import Run

_FRESH_SECONDS = 10.0


@dataclass(slots=True)
class Live:
    """Times are those of the loop's clock."""

    rule: float | None = None  # percent, as read back
    rule_error: str | None = None
    rule_seconds: float | None = None  # the last change took
    drift: list[str] = field(default_factory=list)
    repairs: int = 0  # times that others had changed the rules, in any run
    _counts: dict[str, tuple[int, float]] = field(default_factory=dict)

    def counted(self, what: str, result: Any, now: float) -> None:
        """`what`: in_work (requests), draining (connections). Anything but a number is unknown."""
        if type(result) is int:
            self._counts[what] = result, now
        else:
            self._counts.pop(what, None)

    def count(self, what: str, now: float) -> int | None:
        """None: unknown, or seen too long ago."""
        number, at = self._counts.get(what, (0, -_FRESH_SECONDS))
        return number if now - at < _FRESH_SECONDS and what in self._counts else None

    def told(self, run: Run | None) -> dict[str, Any]:
        """For those who only read files (Store.say_alive). The run as it is, which a full disk may not have."""
        said = {
            "repairs": self.repairs, "rule": self.rule, "rule_seconds": self.rule_seconds,
            "rule_error": self.rule_error,
        }  # fmt: skip
        return said if run is None else said | {"run": run.id, "phase": str(run.phase), "weight": run.weight}

    def of_next_run(self) -> Live:
        """Nothing of the run before is known of the next one; the rules are the same."""
        return Live(rule=self.rule, rule_error=self.rule_error, repairs=self.repairs)

    def end_of_run(self) -> None:
        """Nobody looks any more."""
        self.drift = []
        self._counts.clear()

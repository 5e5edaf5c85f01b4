"""When an engine that ended by itself is started again: 1, 2, 4 ... seconds, then not any more. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

FINAL_STATUSES = {2: "usage", 4: "refused: configuration, model or sizes"}
"""Exit statuses of an engine after which a restart does not help."""


@dataclass(slots=True)
class Backoff:
    """Seconds throughout; `window` and `limit` as in [restart] of appliance.toml."""

    first_delay: float
    max_delay: float
    limit: int
    window: float
    ends: list[float] = field(default_factory=list)
    late: int = 0  # starts in a row for which systemd was late

    def ended(self, now: float) -> float | None:
        """An engine ended at `now` (monotonic): the delay before its next start, or None: it stays down."""
        self.ends = [end for end in self.ends if now - end < self.window]
        self.ends.append(now)
        self.late = 0
        return None if len(self.ends) >= self.limit else self._delay(len(self.ends))

    def not_started(self) -> float:
        """It was not the engine that ended: systemd made no scope in time, as on a host that is just booting. That is
        tried again without end and does not count."""
        self.late += 1
        return self._delay(self.late)

    def _delay(self, count: int) -> float:
        return min(self.first_delay * 2.0 ** min(count - 1, 60), self.max_delay)

    def reset(self) -> None:
        """Somebody asked for it: what happened before does not count."""
        self.ends.clear()
        self.late = 0


def exit_text(returncode: int, *, killed_because: str | None = None, oom: bool = False, said: str = "") -> str:
    """How an engine ended, in words, for status and events. `said`: its own last sentence."""

    if returncode < 0:
        try:
            text = f"killed by {signal.Signals(-returncode).name}"
        except ValueError:
            text = f"killed by signal {-returncode}"
    else:
        text = f"exit status {returncode}"
        if returncode in FINAL_STATUSES:
            text += f" ({FINAL_STATUSES[returncode]})"
    if oom:
        text += "; the kernel killed a process at MemoryMax"
    if said:
        text += f": {said}"
    return f"{killed_because}; {text}" if killed_because else text

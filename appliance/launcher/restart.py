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

    def ended(self, now: float) -> float | None:
        """An engine ended at `now` (monotonic): the delay before its next start, or None: it stays down."""
        self.ends = [end for end in self.ends if now - end < self.window]
        self.ends.append(now)
        count = len(self.ends)
        if count >= self.limit:
            return None
        return min(self.first_delay * 2.0 ** min(count - 1, 60), self.max_delay)

    def reset(self) -> None:
        """Somebody asked for it: what happened before does not count."""
        self.ends.clear()


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

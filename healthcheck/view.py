"""One reading beside what was before: what the checks of checks.py and link_checks.py look at."""

from __future__ import annotations

import msgspec

from healthcheck.limits import Limits
from healthcheck.types import Check, GpuReading, Signal, Status


class Baseline(msgspec.Struct, frozen=True):
    """What the next reading of a GPU is compared with. Kept over restarts (checks.encode_baselines)."""

    counters: dict[str, tuple[int, float]] = {}  # as last read, and when (UTC seconds)
    best: dict[str, int] = {}  # the most that was ever seen, where less is a loss: NVLinks
    streaks: dict[str, int] = {}  # readings in a row
    windows: dict[str, str] = {}  # the last readings, newest at the end: "0010"


class View:
    """Collects the signals and the next baseline while the checks ask."""

    def __init__(self, reading: GpuReading, before: Baseline, limits: Limits) -> None:
        self.reading, self.limits = reading, limits
        self.signals: list[Signal] = []
        self._before = before
        self._counters = dict(before.counters)
        self._best = dict(before.best)
        self._streaks = dict(before.streaks)
        self._windows = dict(before.windows)

    @property
    def next(self) -> Baseline:
        return Baseline(self._counters, self._best, self._streaks, self._windows)

    def signal(self, key: str, detail: str) -> None:
        self.signals.append(Signal(key, self.reading.uuid, detail, self.reading.at, "nvml"))

    def number(self, name: str) -> float | int | None:
        value = self.reading.fields.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def flag(self, name: str) -> bool | None:
        value = self.reading.fields.get(name)
        return value if isinstance(value, bool) else None

    def unknown(self, check: str, name: str) -> Check:
        return Check(check, Status.UNKNOWN, self.reading.unknown.get(name) or self.reading.error or "not read")

    def added(self, name: str) -> int:
        """What a counter has gained since the last reading; 0 for the first one, and where it went back: that is a new
        beginning (a reset, or a driver that was loaded anew), and what is on it by now was seen by nobody."""
        now, last = self.number(name), self._before.counters.get(name)
        if now is None:
            return 0
        self._counters[name] = int(now), self.reading.at
        return max(0, int(now) - last[0]) if last is not None else 0

    def rate(self, name: str) -> float | None:
        """added() per second; None for the first reading and where the clock went back."""
        last, added = self._before.counters.get(name), self.added(name)
        seconds = self.reading.at - last[1] if last is not None else 0.0
        return added / seconds if seconds > 0 else None

    def best(self, name: str, value: int) -> int:
        """The most that was seen so far, this one included."""
        self._best[name] = max(value, self._best.get(name, value))
        return self._best[name]

    def best_before(self, name: str) -> int | None:
        return self._before.best.get(name)

    def streak(self, name: str, bad: bool) -> int:
        """For how many readings in a row, this one included."""
        self._streaks[name] = self._before.streaks.get(name, 0) + 1 if bad else 0
        return self._streaks[name]

    def recent(self, name: str, bad: bool) -> int:
        """In how many of the last `clocks_window` readings, this one included."""
        window = self._before.windows.get(name, "") + ("1" if bad else "0")
        self._windows[name] = window[-self.limits.clocks_window :]
        return self._windows[name].count("1")

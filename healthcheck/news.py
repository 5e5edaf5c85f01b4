"""What is worth a line in the history: a level that lasts is signalled at every reading, and is one event an hour."""

from __future__ import annotations

from healthcheck.types import Signal

NEW_AFTER = 300.0  # s: a signal that was away so long is a new one; longer than between two tries of a GPU that hangs
TELL_AGAIN = 3600.0  # s: one that stays


class News:
    def __init__(self, probe_interval: float = 0.0) -> None:
        self._new_after = max(NEW_AFTER, 3 * probe_interval)
        self._told: dict[tuple[str | None, str], tuple[float, float, int]] = {}  # -> last seen, last told, times since

    def tell(self, signal: Signal) -> int | None:
        """How often it came since it was told last (0: it is new); None: nothing to tell."""
        key = signal.uuid, signal.key
        seen, told, count = self._told.get(key, (float("-inf"), float("-inf"), 0))
        new = signal.at - seen > self._new_after or signal.at < seen  # the clock was set back
        if new or signal.at - told > TELL_AGAIN:
            self._told[key] = signal.at, signal.at, 0
            return 0 if new else count + 1
        self._told[key] = signal.at, told, count + 1
        return None

    def forget(self, uuid: str) -> None:
        """This GPU was repaired: whatever it shows from now on is new."""
        self._told = {key: value for key, value in self._told.items() if key[0] != uuid}

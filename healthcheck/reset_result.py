"""The result that the reset unit leaves (healthcheck/reset.py writes it), and when it is an old one."""

from __future__ import annotations

from typing import Any

from appliance.launcher.state import say
from appliance.log import ApplianceError
from appliance.paths import Paths
from appliance.statefile import read_state, remove_state

SCHEMA = 1


def read_result(paths: Paths, uuid: str) -> dict[str, Any] | None:
    """Of the reset that was asked for last; None: there is none yet. Whoever asks removes the one before first: a clock
    that was set back makes an old one look new, and a new one old."""
    try:
        result = read_state(paths.gpu_reset(uuid), schema=SCHEMA)
    except (ApplianceError, OSError):  # half a moment later it may be there
        return None
    return result if result is not None and isinstance(result.get("ok"), bool) else None


class Results:
    """Removes results around the writing of the ledger, so that one that is there while the ledger says RESETTING is of
    that reset, wherever the watchdog was killed and whatever the clock did."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._old: set[str] = set()  # UUIDs
        self._noted: set[str] = set()

    def begins(self, uuid: str) -> None:
        """A reset is asked for next."""
        self._old.add(uuid)

    def noted(self, uuid: str) -> None:
        """The machine knows its end, or waits for none."""
        self._noted.add(uuid)

    def before_save(self) -> None:
        """OSError: the ledger must not say RESETTING yet."""
        for uuid in list(self._old):
            remove_state(self._paths.gpu_reset(uuid))
            self._old.discard(uuid)

    def after_save(self) -> None:
        """What cannot be removed now goes before the next reset at the latest."""
        for uuid in self._noted:
            try:
                remove_state(self._paths.gpu_reset(uuid))
            except OSError as error:
                say(f"<4>{self._paths.gpu_reset(uuid)}: {error.strerror}")
        self._noted.clear()

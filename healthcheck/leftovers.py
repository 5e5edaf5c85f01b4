"""Holds of the watchdog that are in force: what a ledger that was lost, or restored from before, does not know of.

Read at the start and when a slot is bound; machine.py:found_held compares them with the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from appliance.launcher.state import say
from appliance.log import ApplianceError, printable
from appliance.paths import Paths
from appliance.statefile import read_state
from healthcheck.actions import OWNER
from healthcheck.machine_types import FoundHeld

_SCHEMA = 1  # of both files
_MAX_REASON = 300


def found_holds(paths: Paths, slots: Iterable[int]) -> Iterator[FoundHeld]:
    """Of each slot that its launcher holds for us: as on the disk (it outlives reboots), else as the launcher shows it
    (a hold that could not be written)."""
    for slot in slots:
        entry = _hold(paths.holds(slot)) or _hold(paths.launcher_state(slot))
        if entry is not None:
            since = entry.get("since")
            reason = printable(str(entry.get("reason") or "no reason was given"))[:_MAX_REASON]
            yield FoundHeld(slot, reason, float(since) if isinstance(since, (int, float)) else None)


def _hold(path: Path) -> dict[str, Any] | None:
    try:
        state = read_state(path, schema=_SCHEMA) or {}
    except (OSError, ApplianceError) as error:  # its launcher does not start with it either: nothing serves there
        say(f"<4>{path}: {error}: whether the watchdog held this GPU is not known")
        return None
    holds = state.get("holds")
    entry = holds.get(OWNER) if isinstance(holds, dict) else None
    return entry if isinstance(entry, dict) else None

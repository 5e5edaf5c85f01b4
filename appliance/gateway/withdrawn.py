"""Is a release gone for good from this host? Then a stream of it that was cut has nothing to wait for."""

from __future__ import annotations

from collections.abc import Iterable

from appliance.gateway.engines import LauncherState
from appliance.paths import Paths
from appliance.slots import SlotError, slots_of

_NEVER_AGAIN = frozenset({"gone", "draining", "stopping", "failed"})
"""Of appliance/launcher/lifecycle.py: an engine in these states takes no further request, and comes back only where a
slot names its release."""


def withdrawn(paths: Paths, launchers: Iterable[LauncherState], release: str) -> bool:
    """No slot names `release`, and no launcher has an engine of it that serves, starts, or will be started again.

    False where that is not known: a pointer that cannot be read, or no launcher that has reported."""
    states = list(launchers)
    entries = [entry for state in states for entry in state.engines if entry.release == release]
    if not states or any(entry.state not in _NEVER_AGAIN for entry in entries):
        return False
    try:
        return not slots_of(paths, release)
    except SlotError:
        return False

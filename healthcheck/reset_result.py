"""The result that the reset unit leaves (healthcheck/reset.py writes it)."""

from __future__ import annotations

from typing import Any

from appliance.log import ApplianceError
from appliance.paths import Paths
from appliance.statefile import read_state

SCHEMA = 1
_CLOCK_SLACK = 0.01  # s: times are rounded to a millisecond


def read_result(paths: Paths, uuid: str, requested: float) -> dict[str, Any] | None:
    """Of the reset that was asked for at `requested` (UTC seconds); None: there is none yet, or an older one."""
    try:
        result = read_state(paths.gpu_reset(uuid), schema=SCHEMA)
    except (ApplianceError, OSError):  # half a moment later it may be there
        return None
    started = (result or {}).get("started")
    if result is None or isinstance(started, bool) or not isinstance(started, (int, float)):
        return None
    return result if started >= requested - _CLOCK_SLACK else None

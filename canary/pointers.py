"""The slot pointers as a run finds them."""

from __future__ import annotations

from appliance.paths import Paths
from appliance.slots import SlotError, pointer
from canary.run import Phase, Run, Stage


def is_committed(paths: Paths, run: Run) -> bool:
    """Does stable name the run's release? A pointer that leads nowhere does not."""
    try:
        return pointer(paths, "stable") == run.release
    except SlotError:
        return False


def moved_pointer(paths: Paths, run: Run) -> str | None:
    """Why the run's numbers mean nothing any more: somebody else changed a slot. None where that decides nothing."""
    if run.committed or run.phase is Phase.ROLLING_BACK or (run.phase, run.stage) == (Phase.PROMOTING, Stage.COMMIT):
        return None
    try:
        stable, canary = pointer(paths, "stable"), pointer(paths, "canary")
    except SlotError as error:
        return error.message
    if stable != run.stable:
        return f"the slot stable was changed to {stable} by somebody else"
    if run.phase in (Phase.STEP, Phase.PROMOTING) and canary != run.release:
        return f"the slot canary was changed to {canary} by somebody else"
    return None

"""When canary.json cannot be understood: which run was on is not known, so it serves nobody.

The controller sets the rule to 0 first, keeps the file as canary.json.damaged-TIME, and takes what the run has left
(slot, leases, engines) over as a run of a new number that is rolling back: so it drains, survives kills and is told of
like any other.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from appliance.events import append_event
from appliance.launcher.state import say
from appliance.leases import Leases
from appliance.log import ApplianceError
from appliance.paths import RELEASE_NAME, Paths
from appliance.slots import pointer
from appliance.statefile import sync_directory
from canary.happenings import Now
from canary.placement import Placement
from canary.run import MAX_REASON_CHARS, Phase, Run, Stage
from canary.seams import Rules
from canary.store import EVENT_PREFIX, Damaged, Store, boot_id, reason_of
from canary.types import Policy

DRAIN_SECONDS = 60.0  # for requests in work of the lost run


def take_over(store: Store, placement: Placement, rules: Rules, error: Damaged, now: Now) -> Run | None:
    """What is left of the lost run, to be saved and rolled back by the caller; None: nothing that is known."""
    say(f"<3>{error.message}")
    zero(rules, "0")
    kept = keep(store.paths)
    left = leftovers(store.paths, placement)
    run = _rolling_back(store, placement, left, f"{error.message}; it is kept as {kept}", now) if left else None
    append_event(
        store.paths.events, f"{EVENT_PREFIX}state_lost", run=run.id if run else None, reason=error.message,
        kept=str(kept) if kept else None, left=left,
    )  # fmt: skip
    if run is None:
        forget(store.paths)
    return run


def zero(rules: Rules, run: str) -> str | None:
    """Weight 0 now, before anything else is looked at; what went wrong."""
    try:
        rules.set_weight(run, 0.0)
    except (ApplianceError, OSError) as error:
        say(f"<3>the rule cannot be set to 0: {reason_of(error)}")
        return reason_of(error)
    return None


def keep(paths: Paths) -> Path | None:
    """A second name for the damaged file, so that the next save does not destroy it; None: that could not be done."""
    path, stamp = paths.canary_run, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    try:
        for old in path.parent.glob(f"{path.name}.damaged-*"):
            if os.path.samestat(old.lstat(), path.lstat()):
                return old  # of a start before this one, which could not save anything
        if os.path.lexists(aside):
            aside = aside.with_name(f"{aside.name}.{time.time_ns()}")
        try:
            os.link(path, aside, follow_symlinks=False)
        except OSError:  # a directory, or a file system without links
            path.rename(aside)
        sync_directory(path.parent)
    except OSError as error:
        say(f"<3>{path} cannot be kept as {aside}: {reason_of(error)}")
        return None
    return aside


def forget(paths: Paths) -> None:
    """Removes the damaged file where it is kept under another name."""
    path = paths.canary_run
    try:
        if any(os.path.samestat(old.lstat(), path.lstat()) for old in path.parent.glob(f"{path.name}.damaged-*")):
            path.unlink()
            sync_directory(path.parent)
    except FileNotFoundError:
        pass  # it was renamed
    except OSError as error:
        say(f"<3>{path} cannot be removed: {reason_of(error)}")


def leftovers(paths: Paths, placement: Placement) -> list[str]:
    """Releases that may still have engines beside stable's, the likeliest first: what the canary slot points at, then
    those of leases.json."""
    try:
        stable, found = pointer(paths, "stable"), [pointer(paths, "canary")]
        if stable is None:
            return []
        leases = Leases(placement.fleet())
        found += [release for _, release in leases.all()]
        found += leases.retiring()
    except (ApplianceError, OSError, KeyError, TypeError, ValueError) as error:
        say(f"<3>what the lost run has left cannot be read: {error}")
        return []
    return [name for name in dict.fromkeys(found) if name and name != stable and RELEASE_NAME.fullmatch(name)]


def _rolling_back(store: Store, placement: Placement, left: list[str], reason: str, now: Now) -> Run | None:
    try:
        stable, number = pointer(store.paths, "stable"), store.next_id()
        kind = placement.fleet().config.engine.placement
    except ApplianceError as error:
        say(f"<3>what the lost run has left stays: {error.message}; `canary cleanup` removes it")
        return None
    assert stable is not None  # else nothing is left over
    reason = reason[:MAX_REASON_CHARS]
    told = {
        "event": "rolling_back", "seq": 1, "phase": str(Phase.ROLLING_BACK), "stage": str(Stage.DRAIN), "step": 0,
        "weight": 0.0, "reason": reason, "by": "controller",
    }  # fmt: skip
    return Run(
        id=number, release=left[0], stable=stable, policy=Policy(), boot_id=boot_id(), created_at=now.utc,
        by="controller", placement=kind, phase=Phase.ROLLING_BACK, stage=Stage.DRAIN, seq=1, entered=now.boot,
        entered_at=now.utc, progress=now.boot, until=now.boot + DRAIN_SECONDS, ending="aborted", reason=reason,
        last_event=told,
    )  # fmt: skip

"""Taking a promoted release back while the former one's engines are still kept: the commit in the other direction.

The controller has saved that it goes back before anything here is done; each of it may be killed anywhere and done
again. The gateway serves the newer release until an engine of the pointer's is admitted (appliance/gateway/engines.py:
Engines.serving), so the pointer may go back first, and no request finds nobody.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from appliance.fleet import engine_of
from appliance.leases import Leases
from appliance.log import ApplianceError
from appliance.releases import ReleaseStore
from appliance.slots import pointer, set_slot
from canary.outcome import Result, ok, wait
from canary.placement import Placement
from canary.run import Run

_UP = ("starting", "loading", "ready")


def revert(placement: Placement, run: Run) -> Result:
    """The stable pointer names the former release on return of `ok`."""
    paths, fleet = placement.paths, placement.fleet()
    store, leases = ReleaseStore(paths), Leases(fleet)
    try:
        with store.changing():
            if (now := pointer(paths, "stable")) not in (run.release, run.stable):
                return ok(f"stable is {now} by now: left as it is")
            store.get(run.stable)
            leases.retired(run.stable)
            if now != run.stable:
                set_slot(paths, "stable", run.stable)
    except ApplianceError as error:
        return wait(error.message)
    return ok(f"stable is {run.stable}")


def serving(placement: Placement, run: Run, cancelled: threading.Event) -> Result:
    """Until the gateway of stable serves the former release again, which its launchers are told to run."""
    paths = placement.paths
    if (now := pointer(paths, "stable")) != run.stable:
        return ok(f"stable is {now} by now: left as it is")
    fleet, coming = placement.fleet(cancelled), []
    # Exclusive: GPUs that went over to the release come back with its withdrawal.
    for gpu, state in fleet.survey()[0].items() if run.placement == "shared" else ():
        found = engine_of(state, run.stable).get("state")
        if found not in _UP:  # it broke, or its launcher was started again, in the bake
            with suppress(ApplianceError):  # a GPU that cannot have it must not keep the others waiting
                fleet.call(gpu, "run", release=run.stable, wait=False, timeout=30.0)
                found = _UP[0]
        if found in _UP[:-1]:
            coming.append(f"GPU {gpu}")
    if coming:
        return wait(f"{run.stable} starts on {', '.join(coming)}")
    return placement.gateway("stable", run.stable, cancelled)

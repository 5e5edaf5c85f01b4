"""Which work belongs to which stage of a run. Done in the controller's other thread (worker.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from canary import hooks, reverting
from canary.outcome import Result
from canary.placement import Placement
from canary.run import Phase, Run, Stage

Job = Callable[[threading.Event], Result]


def job_of(placement: Placement, run: Run) -> Job:
    """The work of the stage that `run` is in."""
    match (run.phase, run.stage):
        case (Phase.STARTING, Stage.ENGINES):
            return lambda cancelled: placement.start(run, cancelled)
        case (Phase.WARMING, Stage.GATEWAY):
            return lambda cancelled: placement.gateway("canary", run.release, cancelled)
        case (Phase.STEP, Stage.MOVE):
            return lambda cancelled: placement.move(run, cancelled)
        case (_, Stage.VERIFY):
            return lambda cancelled: placement.verify(run, cancelled)
        case (Phase.ROLLING_BACK, Stage.COMMIT):
            return lambda _: reverting.revert(placement, run)
        case (Phase.ROLLING_BACK, Stage.SERVING):
            return lambda cancelled: reverting.serving(placement, run, cancelled)
        case (_, Stage.SERVING):
            return lambda cancelled: placement.gateway("stable", run.release, cancelled)
        case (_, Stage.FOLLOW):
            return lambda cancelled: placement.follow(run, cancelled)
        case (_, Stage.WITHDRAW):
            return lambda cancelled: placement.withdraw(run, cancelled)
        case (_, Stage.POST):
            return lambda _: hooks.call(run, "post")
        case (Phase.ROLLING_BACK, Stage.HOOK):
            return lambda _: hooks.call(run, "rollback")
        case (Phase.PROMOTING, Stage.HOOK):
            return lambda _: hooks.call(run, "promote")
        case (Phase.STEP, Stage.HOOK):
            return lambda _: hooks.call(run, "step")
        case _:
            return lambda _: hooks.call(run, "pre")

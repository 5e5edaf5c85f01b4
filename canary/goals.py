"""What a run in a given place wants of the host: pure, and only from the run as it was saved. A controller that starts
again goes on by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from canary.run import Phase, Run, Stage

_JOBS = frozenset({
    (Phase.STARTING, Stage.HOOK), (Phase.STARTING, Stage.ENGINES), (Phase.WARMING, Stage.GATEWAY),
    (Phase.STEP, Stage.HOOK), (Phase.STEP, Stage.MOVE), (Phase.STEP, Stage.VERIFY), (Phase.PROMOTING, Stage.HOOK),
    (Phase.PROMOTING, Stage.VERIFY), (Phase.PROMOTING, Stage.COMMIT), (Phase.SETTLING, Stage.SERVING),
    (Phase.SETTLING, Stage.FOLLOW), (Phase.SETTLING, Stage.POST), (Phase.ROLLING_BACK, Stage.WITHDRAW),
    (Phase.ROLLING_BACK, Stage.HOOK), (Phase.ROLLING_BACK, Stage.POST), (Phase.ROLLING_BACK, Stage.COMMIT),
    (Phase.ROLLING_BACK, Stage.SERVING),
})  # fmt: skip
_STOPS_FOR_PAUSE = frozenset({Phase.STARTING, Phase.WARMING, Phase.STEP, Phase.PROMOTING})


@dataclass(frozen=True, slots=True)
class Plan:
    weight: float  # of the rule
    job: str | None  # Run.job_key of what should be in work
    observe: bool  # count, judge, look whether it lives
    redirect: bool  # the canary gateway serves the stable release: what it still gets goes there
    draining_slot: Literal["canary"] | None  # this gateway closes connections
    marker: bool  # a run is on: gateways close keep-alive connections in time


def plan(run: Run, now: float) -> Plan:
    """Of a run that is over: weight 0 and nothing else."""
    back, over = run.phase is Phase.ROLLING_BACK, run.over
    carries = run.phase in (Phase.STEP, Phase.PROMOTING) or (run.phase, run.stage) == (Phase.SETTLING, Stage.SERVING)
    stopped = run.paused is not None and run.phase in _STOPS_FOR_PAUSE
    works = (run.phase, run.stage) in _JOBS and not stopped and now >= run.retry
    draining = back or (run.phase is Phase.SETTLING and run.stage is not Stage.SERVING)
    return Plan(
        weight=run.weight if carries else 0.0,
        job=run.job_key if works else None,
        observe=run.phase in (Phase.STEP, Phase.PROMOTING) and not run.skip_analysis,
        redirect=back and run.stage in (Stage.SERVING, Stage.DRAIN),  # after it the withdrawal empties the slot
        draining_slot="canary" if draining else None,
        marker=not over,
    )


def final_due(run: Run, now: float) -> bool:
    """Is the time of this step over, so that it has to be decided?"""
    return run.stage is Stage.OBSERVE and run.paused is None and now >= run.step_ends

"""What a run does next: pure. `step` takes a run and an event and gives the run afterwards; goals.plan says what a run
in a given place wants of the host. Both know no clock, file or process, so every order of events can be tried.

    starting(hook engines) -> warming(gateway) -> step i(hook move observe verify [held]) -> promoting(hook verify
    commit) | settling(serving bake follow post) -> settled
    any before the commit -> rolling_back(drain withdraw hook post) -> aborted | failed
    settling(serving bake) -> rolling_back(commit serving drain withdraw hook post) -> aborted

The commit is the rename of the stable pointer. Before it an abort wins wherever the run is. After it, as long as the
old engines are kept (the bake), an abort is a commit in the other direction: the pointer goes back first, the release's
engines go last. Once they stop there is only `canary undo`. A controller that starts again calls `step` with Resumed
and goes on by goals.plan, as if nothing had been.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from canary.happenings import (
    Abort,
    Committed,
    Drained,
    Event,
    JobDone,
    Judged,
    Now,
    Pause,
    Promote,
    Refused,
    Resume,
    Resumed,
    SetWeight,
    Tick,
    Trip,
)
from canary.run import Ending, Phase, Run, Stage, StepResult
from canary.types import Outcome

RETRY_SECONDS = 5.0


# -- transitions


def step(run: Run, event: Event, now: Now) -> Run:
    """The run after `event`; the same object where it changes nothing. Refused for a command that makes no sense
    there; an abort is never refused before the commit."""
    if isinstance(event, Abort):
        return _abort(run, event, now)
    if run.over:
        if isinstance(event, Pause | Resume | Promote | SetWeight):
            raise no_way_back(run)
        return run
    match event:
        case JobDone():
            return _job_done(run, event, now) if event.key == run.job_key else run
        case Judged():
            return _judged(run, event, now)
        case Trip():
            return run if _no_way_back(run) else roll_back(run, "failed", event.reason, now, kept=_drain(run))
        case Tick():
            return _tick(run, now)
        case Drained():
            if (run.phase, run.stage) == (Phase.ROLLING_BACK, Stage.DRAIN):
                return _to(run, now, Phase.ROLLING_BACK, Stage.WITHDRAW, "drained")
            return run
        case Committed():
            return run if run.committed else _committed(run, now)
        case Resumed():
            return _resumed(run, event, now)
        case Pause() | Resume() | Promote() | SetWeight():
            return _command(run, event, now)


def _to(run: Run, now: Now, phase: Phase, stage: Stage, event: str, **changes: Any) -> Run:
    """One transition: one number, one event."""
    fields = {key: changes.pop(key, None) for key in ("by", "note")}
    changed: dict[str, Any] = {
        "phase": phase, "stage": stage, "attempt": 0, "retry": 0.0, "problem": None, "seq": run.seq + 1,
        "entered": now.boot, "entered_at": now.utc,
    } | changes  # fmt: skip
    after: Run = replace(run, **changed)
    told = {
        "event": event, "seq": after.seq, "phase": str(phase), "stage": str(stage), "step": after.step,
        "weight": after.weight, "reason": after.reason,
    } | fields  # fmt: skip
    return replace(after, last_event={key: value for key, value in told.items() if value is not None})


def _note(run: Run, now: Now, event: str, **changes: Any) -> Run:
    """A change within a stage that is worth an event."""
    return _to(
        run, now, run.phase, run.stage, event, **({"entered": run.entered, "entered_at": run.entered_at} | changes)
    )


def roll_back(run: Run, ending: Ending, reason: str, now: Now, *, kept: float, by: str | None = None) -> Run:
    """Weight 0 now; `kept`: seconds that requests in flight get."""
    results = run.results
    if run.phase is Phase.STEP and run.stage in (Stage.OBSERVE, Stage.VERIFY, Stage.HELD):
        outcome = "fail" if ending == "failed" else "inconclusive"
        results = [*results, _result(run, now, outcome, reason)]
    return _to(
        run, now, Phase.ROLLING_BACK, Stage.DRAIN, "rolling_back", weight=0.0, ending=ending, reason=reason, held=None,
        paused=None, until=now.boot + kept, results=results, by=by, note=str(run.phase),
    )  # fmt: skip


def _drain(run: Run) -> float:
    return run.policy.settle_seconds


def _no_way_back(run: Run) -> bool:
    return run.committed or run.over or run.phase is Phase.ROLLING_BACK


def _result(run: Run, now: Now, outcome: str, reason: str) -> StepResult:
    return StepResult(
        step=run.step, weight=run.weight, outcome=outcome, seconds=round(now.boot - run.step_began, 1), reason=reason
    )


# -- commands


def no_way_back(run: Run) -> Refused:
    """Why a command comes too late for `run`, which is over or promoted for good, and what there is instead."""
    if run.phase is Phase.SETTLING:
        return Refused(
            f"run {run.id} is past its commit point: stable is {run.release}, and the engines of {run.stable} stop",
            hint="`canary status --wait`, then `canary undo` puts the former release back",
        )
    if run.phase is Phase.SETTLED:
        hint = f"`canary undo --to {run.id}` puts {run.stable} back"
        return Refused(f"run {run.id} is over: {run.release} was promoted", hint=hint)
    what = f"run {run.id} is over: rolled back ({run.phase}: {run.reason})"
    return Refused(what, hint="`canary retry` starts it again, after the fix")


def _abort(run: Run, event: Abort, now: Now) -> Run:
    if run.over:
        raise no_way_back(run)
    if run.kept:
        reason = f"after its promotion: {event.reason}"
        return _to(
            run, now, Phase.ROLLING_BACK, Stage.COMMIT, "reverting", weight=0.0, ending="aborted", reason=reason,
            reverted=True, drain=event.drain, by=event.by, note=f"{run.phase}/{run.stage}",
        )  # fmt: skip
    if run.committed:
        raise no_way_back(run)
    if run.phase is Phase.ROLLING_BACK and run.stage in (Stage.COMMIT, Stage.SERVING):
        return replace(run, drain=event.drain) if event.drain < run.drain else run
    if run.phase is Phase.ROLLING_BACK:  # only ever sooner
        until = min(run.until, now.boot + event.drain)
        return replace(run, until=until) if until < run.until else run
    return roll_back(run, "aborted", event.reason, now, kept=event.drain, by=event.by)


def _command(run: Run, event: Pause | Resume | Promote | SetWeight, now: Now) -> Run:
    if run.committed or run.phase is Phase.ROLLING_BACK:
        raise Refused(f"run {run.id} is {run.phase}: it ends by itself", hint="`canary status --wait`")
    match event:
        case Pause():
            if run.paused is not None:
                return run
            # The number of the attempt is part of the job's key: what is in work now decides nothing any more.
            return _note(
                run, now, "paused", paused=event.reason, paused_since=now.boot, attempt=run.attempt + 1, by=event.by
            )
        case Resume():
            return _resume(run, event, now)
        case Promote():
            return _promote(run, event, now)
        case SetWeight():
            return _set_weight(run, event, now)


def _resume(run: Run, event: Resume, now: Now) -> Run:
    if (
        run.stage is Stage.HELD and run.paused is None
    ):  # inconclusive: another round; manual: that is what promote is for
        if run.decided is not None:
            raise Refused(
                f"run {run.id} waits for a decision: {run.held}", hint="`canary promote` or `canary rollback`"
            )
        return _observe(run, now, "resumed", by=event.by)
    if run.paused is None:
        raise Refused(f"run {run.id} is not paused", hint="`canary status`")
    pause = now.boot - run.paused_since
    usual = 0.0 if run.dry_run else run.target
    weight = usual if run.overridden else run.weight
    return _note(
        run, now, "resumed", paused=None, attempt=run.attempt + 1, progress=now.boot, step_ends=run.step_ends + pause,
        step_began=run.step_began + pause, weight=weight, overridden=False, by=event.by,
    )  # fmt: skip


def _promote(run: Run, event: Promote, now: Now) -> Run:
    if run.dry_run:
        raise Refused(f"run {run.id} is a dry run: it never promotes", hint="`canary rollback`, then start without it")
    if run.phase is not Phase.STEP:
        raise Refused(f"run {run.id} is {run.phase}: there is no step to promote from", hint="`canary status`")
    if run.verdict is not None and run.verdict.outcome is Outcome.FAIL:
        raise Refused(f"run {run.id} fails: {run.verdict.reason}", hint="`canary rollback`")
    base = replace(run, paused=None, held=None, progress=now.boot, granted=True)
    if event.full:
        results = [*run.results, _result(run, now, "skipped", f"promoted in full by {event.by}")]
        return _to(base, now, Phase.PROMOTING, Stage.HOOK, "promote_full", results=results, by=event.by)
    if run.stage is Stage.HELD:
        if run.decided is None:
            return _to(base, now, Phase.STEP, Stage.VERIFY, "promote", by=event.by)
        return _next(base, now, by=event.by)
    if run.stage is not Stage.OBSERVE:
        raise Refused(f"run {run.id} is between two steps", hint="in a moment again; or --full")
    return _to(base, now, Phase.STEP, Stage.VERIFY, "promote", by=event.by)


def _set_weight(run: Run, event: SetWeight, now: Now) -> Run:
    if run.phase is not Phase.STEP or run.stage not in (Stage.OBSERVE, Stage.HELD):
        raise Refused(f"run {run.id} is {run.phase}: its weight is not to be set now", hint="`canary status`")
    if run.dry_run:
        raise Refused(
            f"run {run.id} is a dry run: no connection is sent to it", hint="`canary start` without --dry-run"
        )
    by_weight = run.overridden and (run.paused or "").startswith(f"weight {run.weight:g} set by ")
    paused = f"weight {event.weight:g} set by {event.by}" if run.paused is None or by_weight else run.paused
    since = run.paused_since if run.paused is not None else now.boot
    return _note(
        run, now, "weight_set", weight=event.weight, overridden=True, paused=paused, paused_since=since, by=event.by
    )


# -- the way of a run


def _tick(run: Run, now: Now) -> Run:
    if (run.phase, run.stage) == (Phase.ROLLING_BACK, Stage.DRAIN) and now.boot >= run.until:
        return _to(run, now, Phase.ROLLING_BACK, Stage.WITHDRAW, "drain_ended", note="requests were left")
    if (run.phase, run.stage) == (Phase.SETTLING, Stage.BAKE) and now.boot >= run.until:
        return _to(run, now, Phase.SETTLING, Stage.FOLLOW, "baked")
    late = now.boot - run.progress > run.policy.progress_deadline
    if late and not _no_way_back(run) and run.paused is None and run.stage is not Stage.HELD:
        why = f"no progress for {run.policy.progress_deadline:g} s"
        why += f": {run.problem}" if run.problem else f": {run.verdict.reason}" if run.verdict else ""
        return roll_back(run, "failed", why, now, kept=_drain(run))
    return run


def _job_done(run: Run, event: JobDone, now: Now) -> Run:
    if event.outcome == "ok":
        return _advance(run, now, event.text or None)
    if event.outcome == "fail" and not _no_way_back(run):
        return roll_back(run, "failed", event.text, now, kept=_drain(run))
    # Nothing to go back to any more: tried until it works, and said.
    changes = {"attempt": run.attempt + 1, "retry": now.boot + RETRY_SECONDS, "problem": event.text}
    return (
        replace(run, **changes) if run.problem == event.text else _note(run, now, "waiting", note=event.text, **changes)
    )


def _advance(run: Run, now: Now, note: str | None) -> Run:
    match (run.phase, run.stage):
        case (Phase.STARTING, Stage.HOOK):
            return _to(run, now, Phase.STARTING, Stage.ENGINES, "starting", note=note)
        case (Phase.STARTING, Stage.ENGINES):
            return _to(run, now, Phase.WARMING, Stage.GATEWAY, "warming", progress=now.boot, note=note)
        case (Phase.WARMING, Stage.GATEWAY):
            if run.skip_analysis:
                return _to(run, now, Phase.PROMOTING, Stage.HOOK, "promoting", progress=now.boot)
            return _to(run, now, Phase.STEP, Stage.HOOK, "step", step=0, progress=now.boot)
        case (Phase.STEP, Stage.HOOK) if run.placement == "exclusive" and not run.dry_run:
            return _to(run, now, Phase.STEP, Stage.MOVE, "moving", note=note)
        case (Phase.STEP, Stage.HOOK | Stage.MOVE):
            return _observe(run, now, "weight", note=note)
        case (Phase.STEP, Stage.VERIFY):
            return _verified(run, now)
        case (Phase.PROMOTING, Stage.HOOK):
            return _to(run, now, Phase.PROMOTING, Stage.VERIFY, "promoting", note=note)
        case (Phase.PROMOTING, Stage.VERIFY):
            return _to(run, now, Phase.PROMOTING, Stage.COMMIT, "committing", note=note)
        case (Phase.SETTLING, Stage.SERVING):
            kept = 0.0 if run.placement == "exclusive" else run.policy.settle_seconds  # half the GPUs would idle
            return _to(run, now, Phase.SETTLING, Stage.BAKE, "baking", weight=0.0, until=now.boot + kept)
        case (Phase.SETTLING, Stage.FOLLOW):
            return _to(run, now, Phase.SETTLING, Stage.POST, "followed", note=note)
        case (Phase.SETTLING, Stage.POST):
            return _to(run, now, Phase.SETTLED, Stage.OVER, "settled", ended_at=now.utc, note=note)
        case (Phase.ROLLING_BACK, Stage.COMMIT):
            return _to(run, now, Phase.ROLLING_BACK, Stage.SERVING, "reverted", note=note)
        case (Phase.ROLLING_BACK, Stage.SERVING):
            return _to(run, now, Phase.ROLLING_BACK, Stage.DRAIN, "rolling_back", until=now.boot + run.drain)
        case (Phase.ROLLING_BACK, Stage.WITHDRAW):
            return _to(run, now, Phase.ROLLING_BACK, Stage.HOOK, "withdrawn", note=note)
        case (Phase.ROLLING_BACK, Stage.HOOK):
            return _to(run, now, Phase.ROLLING_BACK, Stage.POST, "rollback_told", note=note)
        case (Phase.ROLLING_BACK, Stage.POST):
            ended = Phase.FAILED if run.ending == "failed" else Phase.ABORTED
            return _to(run, now, ended, Stage.OVER, str(ended), ended_at=now.utc, note=note)
        case _:
            return run


def _observe(run: Run, now: Now, event: str, *, by: str | None = None, note: str | None = None) -> Run:
    weight = run.weight if run.dry_run else run.target
    return _to(
        run, now, Phase.STEP, Stage.OBSERVE, event, weight=weight, overridden=False, granted=False, held=None,
        extended=False, verdict=None, decided=None, step_began=now.boot, step_ends=now.boot + run.policy.step_seconds,
        progress=now.boot, by=by, note=note,
    )  # fmt: skip


def _judged(run: Run, event: Judged, now: Now) -> Run:
    run = replace(run, verdict=event.verdict, evidence=event.evidence)
    if run.phase not in (Phase.STEP, Phase.PROMOTING) or (run.dry_run and not event.final):
        return run
    outcome, policy = event.verdict.outcome, run.policy
    if run.dry_run:
        return _to(run, now, Phase.STEP, Stage.VERIFY, "judged", note=f"{outcome}: {event.verdict.reason}")
    if outcome is Outcome.FAIL:
        return roll_back(run, "failed", event.verdict.reason, now, kept=_drain(run))
    if not event.final or run.stage is not Stage.OBSERVE:
        return run
    if outcome is Outcome.PASS:
        return _to(
            run, now, Phase.STEP, Stage.VERIFY, "judged", note=event.verdict.reason, progress=now.boot,
            decided=event.verdict,
        )  # fmt: skip
    if policy.on_inconclusive == "rollback":
        return roll_back(run, "failed", f"inconclusive: {event.verdict.reason}", now, kept=_drain(run))
    if policy.on_inconclusive == "hold":
        held = f"inconclusive: {event.verdict.reason}"
        return _to(run, now, Phase.STEP, Stage.HELD, "held", held=held, note=held)
    if run.extended:  # judged at each interval from now on
        return run
    return _note(run, now, "extended", extended=True, note=event.verdict.reason)


def _verified(run: Run, now: Now) -> Run:
    verdict = run.verdict if run.dry_run else run.decided
    outcome = str(verdict.outcome) if verdict is not None else "skipped"
    run = replace(run, results=[*run.results, _result(run, now, outcome, verdict.reason if verdict else "")])
    if run.manual and not run.granted and not run.dry_run:
        return _to(run, now, Phase.STEP, Stage.HELD, "held", held="manual: waits for `canary promote`")
    return _next(run, now)


def _next(run: Run, now: Now, *, by: str | None = None) -> Run:
    if run.step + 1 < len(run.policy.steps):
        return _to(run, now, Phase.STEP, Stage.HOOK, "step", step=run.step + 1, progress=now.boot, held=None, by=by)
    if run.dry_run:
        judged = ", ".join(f"{result.weight:g} %: {result.outcome}" for result in run.results)
        return roll_back(run, "aborted", f"the dry run is over ({judged})", now, kept=_drain(run))
    return _to(run, now, Phase.PROMOTING, Stage.HOOK, "promoting", progress=now.boot, held=None, by=by)


def _committed(run: Run, now: Now) -> Run:
    return _to(run, now, Phase.SETTLING, Stage.SERVING, "committed", paused=None, held=None)


def _resumed(run: Run, event: Resumed, now: Now) -> Run:
    rebooted = event.boot_id != run.boot_id
    if rebooted:  # the clock began anew
        run = replace(
            run, boot_id=event.boot_id, entered=now.boot, progress=now.boot, until=now.boot, step_began=now.boot,
            step_ends=now.boot + run.policy.step_seconds, paused_since=now.boot,
        )  # fmt: skip
    if event.committed and run.phase is Phase.PROMOTING:
        return _committed(run, now)
    if rebooted and not _no_way_back(run):
        return roll_back(run, "aborted", "reboot", now, kept=0.0)
    ends = now.boot + run.policy.step_seconds if run.stage is Stage.OBSERVE else run.step_ends
    return _note(run, now, "resumed_after_restart", attempt=run.attempt + 1, step_ends=ends)

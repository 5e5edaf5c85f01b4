"""The pure machine: random orders of events, restarts and reboots; what must hold in every place a run can be in."""

from __future__ import annotations

import os
import random

import pytest

from canary import machine
from canary.goals import final_due, plan
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
from canary.machine import step
from canary.run import Hook, Phase, Run, Stage, from_state, to_state
from canary.types import Outcome, Policy, Verdict

SCHEDULES = 20_000 if os.environ.get("APPLIANCE_FULL") == "1" else 400
POLICY = Policy(steps=[5, 50, 100], step_seconds=10, interval=1, progress_deadline=100, settle_seconds=5)


def make(**changes: object) -> Run:
    values: dict[str, object] = {
        "id": "1", "release": "v2", "stable": "v1", "policy": POLICY, "boot_id": "a", "created_at": 0.0,
    }  # fmt: skip
    return Run(**(values | changes))  # type: ignore[arg-type]


def verdict(outcome: Outcome) -> Verdict:
    return Verdict(outcome=outcome, findings=[], reason=f"it is {outcome}")


def walk(run: Run, *events: Event, now: float = 0.0) -> Run:
    for event in events:
        run = step(run, event, Now(now, 0.0))
    return run


def done(run: Run, now: float = 0.0) -> Run:
    """The job of this stage succeeds."""
    return step(run, JobDone(run.job_key, "ok"), Now(now, 0.0))


def until(run: Run, phase: Phase, stage: Stage, at: int = 0) -> Run:
    """Everything goes well until there."""
    while (run.phase, run.stage, run.step) != (phase, stage, at):
        if run.stage is Stage.OBSERVE:
            run = step(run, Judged(verdict(Outcome.PASS), True), Now(run.step_ends, 0.0))
        elif (run.phase, run.stage) == (Phase.PROMOTING, Stage.COMMIT):
            run = walk(run, Committed())
        elif run.stage in (Stage.BAKE, Stage.DRAIN):
            run = walk(run, Tick(), now=run.until)
        else:
            run = done(run)
    return run


BEFORE_COMMIT = [
    (Phase.STARTING, Stage.HOOK), (Phase.STARTING, Stage.ENGINES), (Phase.WARMING, Stage.GATEWAY),
    (Phase.STEP, Stage.HOOK), (Phase.STEP, Stage.OBSERVE), (Phase.STEP, Stage.VERIFY), (Phase.PROMOTING, Stage.HOOK),
    (Phase.PROMOTING, Stage.VERIFY), (Phase.PROMOTING, Stage.COMMIT),
]  # fmt: skip


@pytest.mark.parametrize(("phase", "stage"), BEFORE_COMMIT)
def test_abort_wins_in_every_place_before_the_commit(phase: Phase, stage: Stage) -> None:
    """Also over what was in work at that moment, and over a pause."""
    at = 2 if phase is Phase.PROMOTING else 0
    run = until(make(), phase, stage, at)
    key = run.job_key
    for before in (run, walk(run, Pause("lunch", "ann")) if phase is not Phase.PROMOTING else run):
        aborted = walk(before, Abort("bad feeling", "bob", 30.0))
        assert (aborted.phase, aborted.ending, aborted.reason) == (Phase.ROLLING_BACK, "aborted", "bad feeling")
        assert plan(aborted, 0.0).weight == 0
        late = walk(aborted, JobDone(key, "ok"), Judged(verdict(Outcome.PASS), True), Tick())
        assert late.phase is Phase.ROLLING_BACK


@pytest.mark.parametrize(("phase", "stage"), BEFORE_COMMIT)
def test_reboot_before_the_commit_aborts_in_every_place(phase: Phase, stage: Stage) -> None:
    run = until(make(), phase, stage, 2 if phase is Phase.PROMOTING else 0)
    rebooted = walk(run, Resumed("b", committed=False))
    assert (rebooted.phase, rebooted.reason) == (Phase.ROLLING_BACK, "reboot")
    assert plan(rebooted, 0.0).weight == 0


def test_reboot_between_the_rename_and_its_record_settles() -> None:
    run = until(make(), Phase.PROMOTING, Stage.COMMIT, 2)
    assert walk(run, Resumed("b", committed=True)).phase is Phase.SETTLING


@pytest.mark.parametrize("stage", [Stage.SERVING, Stage.BAKE])
def test_an_abort_in_the_bake_puts_the_pointer_back_first(stage: Stage) -> None:
    """The old engines are kept for exactly this: stable goes back and is served before the engines go."""
    run = walk(until(make(), Phase.SETTLING, stage, 2), Abort("slow", "bob", 30.0))
    seen = []
    while not run.over:
        seen.append(run.stage)
        assert plan(run, 0.0).weight == 0 and not run.committed
        run = walk(run, Tick(), now=run.until) if run.stage is Stage.DRAIN else done(run)
    assert seen == [Stage.COMMIT, Stage.SERVING, Stage.DRAIN, Stage.WITHDRAW, Stage.HOOK, Stage.POST]
    assert (run.phase, run.reverted, run.reason) == (Phase.ABORTED, True, "after its promotion: slow")


def test_a_reboot_while_it_is_taken_back_goes_on_with_it() -> None:
    run = walk(until(make(), Phase.SETTLING, Stage.BAKE, 2), Abort("slow", "bob", 30.0))
    again = walk(run, Resumed("b", committed=True))
    assert (again.phase, again.stage) == (Phase.ROLLING_BACK, Stage.COMMIT)


@pytest.mark.parametrize("stage", [Stage.FOLLOW, Stage.POST])
def test_abort_once_the_old_engines_stop_is_refused_with_the_way_out(stage: Stage) -> None:
    run = until(make(), Phase.SETTLING, stage, 2)
    with pytest.raises(Refused, match="commit point") as refused:
        walk(run, Abort("too late", "bob", 0.0))
    assert "canary undo" in str(refused.value.hint)


@pytest.mark.parametrize("ending", ["settled", "aborted", "failed"])
def test_terminal_states_reject_every_command(ending: str) -> None:
    run = until(make(), Phase.STEP, Stage.OBSERVE)
    if ending == "settled":
        run = until(run, Phase.SETTLED, Stage.OVER, 2)
    else:
        run = walk(run, Abort("x", "bob", 0.0) if ending == "aborted" else Trip("dead"))
        run = until(run, Phase(ending), Stage.OVER)
    for command in (Abort("x", "b", 0), Pause("x", "b"), Resume("b"), Promote("b"), SetWeight("b", 5.0)):
        with pytest.raises(Refused, match="over"):
            walk(run, command)
    assert walk(run, Tick(), Trip("x"), Drained(), Committed(), Resumed("zz", False), now=1e9) is run


def test_resume_stays_in_the_same_step() -> None:
    run = until(make(), Phase.STEP, Stage.OBSERVE, 1)
    again = walk(run, Resumed("a", committed=False), now=3.0)
    assert (again.phase, again.stage, again.step, again.weight) == (Phase.STEP, Stage.OBSERVE, 1, 50)
    assert again.step_ends == 13.0 and again.progress == run.progress  # the deadline goes on, the step begins anew


def test_a_restart_of_an_aborted_run_stays_at_zero() -> None:
    run = walk(until(make(), Phase.STEP, Stage.OBSERVE), Abort("x", "b", 60.0))
    for boot in ("a", "b"):
        again = walk(run, Resumed(boot, committed=False))
        assert again.phase is Phase.ROLLING_BACK and plan(again, 0.0).weight == 0


def test_inconclusive_never_promotes() -> None:
    for policy in ("extend", "hold", "rollback"):
        run = until(make(policy=Policy(steps=[100], on_inconclusive=policy)), Phase.STEP, Stage.OBSERVE)
        after = walk(run, Judged(verdict(Outcome.INCONCLUSIVE), True), now=run.step_ends)
        expected = {"extend": Stage.OBSERVE, "hold": Stage.HELD, "rollback": Stage.DRAIN}
        assert after.stage is expected[policy]
        assert done(after).phase is not Phase.PROMOTING


def test_the_deadline_rolls_back_but_never_while_paused_or_held() -> None:
    run = until(make(), Phase.STEP, Stage.OBSERVE)
    assert walk(run, Tick(), now=101.0).phase is Phase.ROLLING_BACK
    paused = walk(run, Pause("lunch", "ann"))
    assert walk(paused, Tick(), now=1000.0).paused == "lunch"
    again = walk(paused, Resume("ann"), Tick(), now=1000.0)
    assert again.phase is Phase.STEP  # and it counts anew
    assert walk(again, Tick(), now=1101.0).phase is Phase.ROLLING_BACK


def test_a_pause_stops_promotions_and_not_rollbacks() -> None:
    run = walk(until(make(), Phase.STEP, Stage.VERIFY), Pause("lunch", "ann"))
    assert plan(run, 1e6).job is None
    assert walk(run, JobDone(run.job_key.replace("/1", "/0"), "ok")) is run  # what was in work when it came
    assert walk(run, Judged(verdict(Outcome.FAIL), False)).phase is Phase.ROLLING_BACK
    assert walk(run, Trip("dead")).phase is Phase.ROLLING_BACK


def test_skipped_analysis_goes_straight_to_the_commit() -> None:
    run = until(make(skip_analysis=True), Phase.PROMOTING, Stage.COMMIT)
    assert run.weight == 0 and not plan(run, 0.0).observe


def test_a_run_survives_its_file() -> None:
    run = walk(until(make(hooks=[Hook(when="pre", exec=["/bin/true"])]), Phase.STEP, Stage.OBSERVE), Pause("x", "y"))
    assert from_state(to_state(run), "test") == run


class Host:
    """Keeps what the commit does, as the slot pointer would."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        manual, dry = self.random.random() < 0.3, self.random.random() < 0.1
        placement = self.random.choice(["shared", "exclusive"])
        policy = Policy(
            steps=[5, 50] if placement == "exclusive" else [5, 50, 100], step_seconds=10, progress_deadline=200,
            settle_seconds=5, on_inconclusive=self.random.choice(["extend", "hold", "rollback"]),
        )  # fmt: skip
        self.trouble = self.random.choice([0.0, 0.05, 1.0])  # half of all hosts are quiet ones
        self.run = make(manual=manual, dry_run=dry, placement=placement, policy=policy)
        self.boot, self.now, self.committed, self.aborted = "a", 0.0, False, False

    def event(self) -> Event:
        def roll() -> float:
            return self.random.random() / self.trouble if self.trouble else 1.0

        run, key = self.run, self.run.job_key
        judged = self.random.choice([Outcome.PASS, Outcome.PASS, Outcome.INCONCLUSIVE])
        choices: list[Event] = [
            Tick(), JobDone(key, "fail" if roll() < 0.1 else self.random.choice(["ok", "ok", "wait"]), "said"),
            JobDone(key + "9", "fail", "of another attempt"), Drained(),
            Judged(verdict(judged), final_due(run, self.now)),
            Resumed(self.boot, self.committed), Pause("p", "x"), Resume("x"), Promote("x", self.random.random() < 0.2),
            SetWeight("x", self.random.choice([0.0, 3.0, 30.0])),
        ]  # fmt: skip
        if roll() < 0.02:
            return Judged(verdict(Outcome.FAIL), False)
        if roll() < 0.01:
            return Trip("dead")
        if roll() < 0.02:
            return Abort("a", "x", self.random.choice([0.0, 3.0]))
        if roll() < 0.01:
            self.boot += "b"
            return Resumed(self.boot, self.committed)
        if (run.phase, run.stage) == (Phase.PROMOTING, Stage.COMMIT) and self.random.random() < 0.5:
            self.committed = True  # a crash may come between this and the next line
            return Committed() if self.random.random() < 0.7 else Resumed(self.boot, True)
        return self.random.choice(choices)

    def turn(self) -> None:
        self.now += self.random.choice([0.1, 1.0, 5.0, 11.0])
        before, event = self.run, self.event()
        try:
            self.run = step(before, event, Now(self.now, self.now))
        except Refused:
            assert not isinstance(event, Abort) or not before.abortable
            return
        self.check(before, event)

    def check(self, before: Run, event: Event) -> None:
        run = self.run
        wanted = plan(run, self.now)
        assert run.seq - before.seq in (0, 1) and (run.seq == before.seq or run.last_event["seq"] == run.seq)
        assert 0 <= wanted.weight <= 100
        if run.phase in (Phase.STARTING, Phase.WARMING, Phase.ROLLING_BACK) or run.over:
            assert wanted.weight == 0
        if before.phase is Phase.ROLLING_BACK:
            assert run.phase in (Phase.ROLLING_BACK, Phase.ABORTED, Phase.FAILED)
        if isinstance(event, Abort) and before.abortable:
            assert run.phase is Phase.ROLLING_BACK
        if run.committed:
            assert self.committed and not run.dry_run
        if run.dry_run:
            assert wanted.weight == 0
        if run.phase is Phase.PROMOTING and before.phase is Phase.STEP and not isinstance(event, Promote):
            assert [result.outcome in ("pass", "skipped") for result in run.results] == [True] * len(run.results)


def test_random_schedules_end_as_they_must() -> None:
    """Whatever comes in whatever order: no weight where none may be, no way back from a rollback, and an end."""
    ended = dict.fromkeys((Phase.SETTLED, Phase.ABORTED, Phase.FAILED), 0)
    for seed in range(SCHEDULES):
        host = Host(seed)
        for _ in range(3000):
            host.turn()
            if host.run.over:
                break
        assert host.run.over, (seed, host.run.job_key)
        assert (host.run.phase is Phase.SETTLED) == (host.committed and not host.run.reverted), seed
        ended[host.run.phase] += 1
    assert min(ended.values()) > SCHEDULES // 50, ended  # the schedules reach all ends
    assert machine.RETRY_SECONDS > 0

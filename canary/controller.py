"""The controller of runs: one loop, one thread that decides (worker.py has the slow ones).

Every change goes the same way: machine.step gives the run after the event -> saved (fsync) -> announced (event) -> and
only then done (plan -> rule, pointers, marker, jobs). A kill anywhere leaves a state file that says what to go on with;
`start` does so. Rules that cannot be changed stop nothing else: aborts and deadlines are looked at first, each tick.

Only weight 0 needs no record. A run that cannot be saved (a full disk) gets it at once, and nothing else of it begins
until its rollback is saved (keeper.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from appliance.launcher.loop import Loop, Timer
from appliance.launcher.state import say
from appliance.log import ApplianceError, BusyError
from appliance.notify import Notifier
from canary import happenings
from canary.goals import final_due, plan
from canary.happenings import Now
from canary.jobs import job_of
from canary.keeper import Keeper
from canary.live import Live
from canary.lost import take_over
from canary.observer import Observer
from canary.outcome import fail, wait
from canary.placement import Placement
from canary.pointers import is_committed, moved_pointer
from canary.preflight import now as clock
from canary.run import Phase, Run, Stage
from canary.seams import Parts
from canary.store import AbortWish, Damaged, Store, boot_id, reason_of
from canary.types import Outcome
from canary.worker import Cancelled, Worker

TICK_SECONDS = 0.25
DRIFT_SECONDS = 5.0
_IDLE_SECONDS = 10.0
_LOOK_SECONDS = 0.5  # how often the rule is tried again that could not be set
_WEIGHT_TOLERANCE = 0.01  # percent; the kernel keeps a probability as a multiple of 2^-31
_COMMIT = (Phase.PROMOTING, Stage.COMMIT)


@dataclass(slots=True)
class Times:
    """How often the controller looks; seconds. Tests look more often."""

    tick: float = TICK_SECONDS
    drift: float = DRIFT_SECONDS
    sample: float = 0.5


class Controller:
    """Used by the holder of Store.controlling()."""

    def __init__(
        self, store: Store, placement: Placement, parts: Parts, loop: Loop, times: Times | None = None,
        notifier: Notifier | None = None, now: Callable[[], Now] = clock,
    ) -> None:  # fmt: skip
        self.store, self.placement, self.parts, self.loop = store, placement, parts, loop
        self._keeper = Keeper(store, now)
        self.live = Live()
        self.observer: Observer | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._times, self._now, self._notifier = times or Times(), now, notifier
        self._hands = Worker(loop, "hands", self._job_done)
        self._eyes = Worker(loop, "eyes", self._sampled)
        self._weight: float | None = None  # what the rule was last set to by us
        self._rule_at = self._drift_at = self._sample_at = 0.0
        self._alive_at = -_IDLE_SECONDS
        self._said: dict[str, Any] | None = None
        self._marked: tuple[str | None, str | None] | None = None
        self._timer: Timer | None = None
        self._acting = False

    @property
    def run(self) -> Run | None:
        """The present or last one."""
        return self._keeper.run

    @property
    def unsaved(self) -> str | None:
        """Why the run cannot be saved; it waits with weight 0."""
        return self._keeper.unsaved.problem if self._keeper.unsaved is not None else None

    # -- start and end ---------------------------------------------------------------------------------------------

    def start(self, wish: AbortWish | None = None) -> None:
        """Goes on with what the state file says; rolls back what a lost one has left. `wish`: one that is not on
        disk."""
        try:
            run = self.store.load()
        except Damaged as error:
            run = take_over(self.store, self.placement, self.parts.rules, error, self._now())
            if run is not None:
                self._begin(run)
                self._keeper.put(run)
        else:
            if run is not None:
                self.store.announce_missing(run)
                if not run.over:
                    self._begin(run)
                    self._decide(happenings.Resumed(boot_id(), is_committed(self.store.paths, run)))
        if run is None or run.over:
            self._keeper.run = run
            self._clean()
            self._keeper.archive()
        else:
            if wish is not None and self.run is not None and self.run.abortable:
                self._decide(wish.event())
            self._look_for_abort()  # before anything of this run is begun again
            # The rule may still be less than what the file says; it becomes so once the canary is seen to live.
            self._act()
        self._tick()

    def begin(self, run: Run) -> None:
        """A new run, checked by the caller. Refused, and nothing is begun, where it cannot be saved."""
        self._keeper.begin(run)
        self._begin(run)
        self._act()
        self.on_change()

    def _begin(self, run: Run) -> None:
        self._keeper.run = run
        self._weight = None
        self.live = self.live.of_next_run()
        self.observer = Observer(run, self.parts)

    def _clean(self) -> None:
        """No run is on, so no rule of ours may send anything anywhere, whoever left it."""
        try:
            state = self.parts.rules.read()
            if state.weight:
                self.parts.rules.set_weight(state.run or "0", 0.0)
                say(f"rule of run {state.run} with {state.weight:g} % found and no run: set to 0")
            self.live.rule = 0.0
        except (ApplianceError, OSError) as error:
            self.live.rule_error = reason_of(error)
        self._set_marker(None, None)

    def close(self) -> None:
        """The run goes on in the file; whoever starts next goes on with it."""
        if self._timer is not None:
            self._timer.cancel()
        self._hands.close()
        self._eyes.close()

    # -- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: happenings.Event) -> None:
        """One event: decided, saved, announced, done. happenings.Refused for a command that makes no sense now, or
        could not be saved."""
        self._decide(event)
        self._act()
        self._keeper.check(event)

    def _decide(self, event: happenings.Event) -> None:
        assert self.run is not None
        before = self.run
        if self._keeper.decide(event):
            self._note_step(before, self.run)
        if self.run is not before:
            self.on_change()

    def _note_step(self, before: Run, after: Run) -> None:
        began = after.stage is Stage.OBSERVE and before.stage in (Stage.HOOK, Stage.MOVE)
        if began and self.observer is not None:
            self.observer.begin_step(after.weight)

    def _act(self) -> None:
        """Makes the host what the run wants of it."""
        if self.run is None or self._acting:
            return
        if self.unsaved is None and self._raises(plan(self.run, self._now().boot).weight):
            self._look_for_abort()  # what looks like drift may be `canary rollback`, which has set the rule to 0
        self._acting = True
        try:
            if self.unsaved is not None:
                self._set_rule(0.0)
                self._hands.cancel_others(None)
                return
            wanted = plan(self.run, self._now().boot)
            self._set_rule(wanted.weight)
            if wanted.redirect:
                with suppress(ApplianceError, OSError):  # tried again with the next tick
                    self.placement.redirect(self.run)
            self._set_marker(self.run.id if wanted.marker else None, wanted.draining_slot)
            self._hands.cancel_others(wanted.job)
            if wanted.job is not None and (self.run.phase, self.run.stage) != _COMMIT:
                self._hands.submit(wanted.job, job_of(self.placement, self.run))
        finally:
            self._acting = False
        if wanted.job is not None and (self.run.phase, self.run.stage) == _COMMIT and not self._hands.busy:
            self._commit()
        if self.run.over:
            self._end()

    def _end(self) -> None:
        assert self.run is not None
        if self._weight == 0.0 and self.observer is not None and self._keeper.archive():
            self.observer = None
            self.live.end_of_run()
            self.on_change()

    # -- the rule --------------------------------------------------------------------------------------------------

    def _raises(self, weight: float) -> bool:
        return weight > (self._weight or 0.0)

    def _set_rule(self, weight: float) -> None:
        """At once; a rule that cannot be set is tried again, and stops nothing else."""
        assert self.run is not None
        if self._raises(weight) and not (self.observer is not None and self.observer.alive):
            return  # first it has to be seen that the canary lives; after a restart the kernel keeps what it has
        if weight == self._weight or (self.live.rule_error and self.loop.time() - self._rule_at < _LOOK_SECONDS):
            return
        self._rule_at = self.loop.time()
        try:
            self.parts.rules.set_weight(self.run.id, weight)
        except (ApplianceError, OSError) as error:
            if self.live.rule_error is None:
                say(f"<3>the rule cannot be set to {weight:g} %: {reason_of(error)}")
            self.live.rule_error = reason_of(error)
            return
        self._weight, self.live.rule, self.live.rule_error = weight, weight, None
        self.live.counted("in_work", None, self._rule_at)
        self.live.rule_seconds = self.loop.time() - self._rule_at
        if self.observer is not None:
            self.observer.weight = weight

    def _look_at_rules(self) -> None:
        """Others flush tables: put back what is ours, and say so."""
        assert self.run is not None
        try:
            state = self.parts.rules.read()
            self.live.rule = state.weight
            if self._weight is not None and abs((state.weight or 0.0) - self._weight) > _WEIGHT_TOLERANCE:
                self._weight = None  # set again below
            if state.drift:
                self.live.drift = self.parts.rules.repair() or list(state.drift)
                self.live.repairs += 1
                self.store.announce(_told(self.run, "drift", drift=self.live.drift))
        except (ApplianceError, OSError) as error:
            self.live.rule_error = reason_of(error)
        if self.run.over or self.run.phase in (Phase.ROLLING_BACK, Phase.SETTLING):
            self._eyes.submit("draining", lambda _: self.parts.rules.draining())  # a large table takes a while

    def _set_marker(self, run: str | None, draining_slot: Literal["canary"] | None) -> None:
        if self._marked != (run, draining_slot):
            try:
                self.store.mark(run, draining_slot)
                self._marked = (run, draining_slot)
            except OSError as error:
                say(f"<3>{self.store.paths.canary_marker}: {error.strerror}")

    # -- time ------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        active = self.run is not None and (not self.run.over or self.observer is not None)
        self._timer = self.loop.later(self._times.tick if active else _IDLE_SECONDS, self._tick)
        if self._notifier is not None:
            self._notifier.send(WATCHDOG=1)
        self._say_alive()
        if active:
            self.tick()

    def _say_alive(self) -> None:
        """Every few seconds, and at once where what is said is not so any more."""
        said = self.live.told(self.run)
        if said == self._said and self.loop.time() - self._alive_at < self._times.drift:
            return
        self._alive_at = self.loop.time()
        with suppress(OSError):  # it is tried again, and old news raise the alarm
            self.store.say_alive(**said)
            self._said = said

    def poke(self) -> None:
        """Something may have changed on disk; and an idle controller has to wake up."""
        if self._timer is not None:
            self._timer.cancel()
        self._tick()

    def tick(self) -> None:
        """One look at everything. Abort and deadline first: nothing that fails below may keep them waiting."""
        assert self.run is not None
        if self._keeper.save_again():
            self.on_change()
        self._look_for_abort()
        self.handle(happenings.Tick())
        if not self.run.over and (moved := moved_pointer(self.store.paths, self.run)) is not None:
            self.handle(happenings.Trip(moved))
        run, now = self.run, self.loop.time()
        if run.phase is Phase.ROLLING_BACK and run.stage is Stage.DRAIN:
            self._look_at_drain(run)
        rule = self._weight
        self._eyes.submit("in_work", lambda _: (rule, self.placement.in_flight(run)))
        if now - self._drift_at >= self._times.drift:
            self._drift_at = now
            self._look_at_rules()
            self._act()
        if plan(run, self._now().boot).observe and now - self._sample_at >= self._times.sample:
            self._sample_at = now
            observer = self.observer
            assert observer is not None
            self._eyes.submit("sample", lambda _: observer.read())
            self._look_at_golden(run)

    def _look_for_abort(self) -> None:
        assert self.run is not None
        if not self.run.abortable:
            return
        wish = self.store.abort_wish(self.run.id)
        if wish is not None:
            self.handle(wish.event())

    def _look_at_drain(self, run: Run) -> None:
        if self._weight == 0.0 and self.placement.in_work(run) == 0:
            self.handle(happenings.Drained())

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _job_done(self, key: str, result: Any) -> None:
        if isinstance(result, Cancelled):
            result = wait("cancelled")
        elif isinstance(result, BusyError):
            result = wait(result.message)
        elif isinstance(result, Exception):
            text = getattr(result, "message", None) or f"{type(result).__name__}: {result}"
            say(f"<3>{key}: {text}")
            result = fail(str(text))
        outcome, text = result
        self.handle(happenings.JobDone(key, outcome, text))

    def _commit(self) -> None:
        """The last look for an abort and the rename, under the lock that a wish to abort is written under."""
        assert self.run is not None
        run = self.run
        if self.live.rule_error is not None and not run.skip_analysis:
            return
        try:
            with self.store.commit_lock():
                wish = self.store.abort_wish(run.id)
                alive = run.skip_analysis or (self.observer is not None and self.observer.alive)
                if wish is None and alive:
                    result = self.placement.commit(run)
        except (ApplianceError, OSError) as error:
            result, wish, alive = wait(reason_of(error)), None, True
        if wish is not None:
            self.handle(wish.event())
        elif not alive:
            self.handle(happenings.JobDone(run.job_key, "wait", "the canary's gateway does not answer"))
        elif result.outcome == "ok":
            self.handle(happenings.Committed())
        else:
            self.handle(happenings.JobDone(run.job_key, result.outcome, result.text))

    # -- observing -------------------------------------------------------------------------------------------------

    def _look_at_golden(self, run: Run) -> None:
        """Once in each step, and again in a while: exactness makes any difference a fault."""
        if self.observer is not None and run.stage is Stage.OBSERVE and self.observer.golden_due():
            self._eyes.submit("golden", lambda cancelled: self.placement.golden(run, cancelled))

    def _sampled(self, key: str, result: Any) -> None:
        if self.run is None or self.observer is None:
            return
        if key == "golden":
            self.observer.golden(result if isinstance(result, bool) else None)
            return
        if key == "in_work":  # a count of the time before the rule was changed says nothing of now
            rule, result = result if isinstance(result, tuple) else (None, None)
            result = result if rule == self._weight else None
        if key in ("draining", "in_work"):
            self.live.counted(key, result, self.loop.time())
            return
        if isinstance(result, Exception):
            say(f"<3>{key}: {type(result).__name__}: {result}")
        else:
            self.observer.sampled(result)
        if (reason := self.observer.dead()) is not None:
            self.handle(happenings.Trip(reason))
        elif self.observer.due():
            self._judge()
        else:
            self._act()  # a weight that waited for a sign of life

    def _judge(self) -> None:
        assert self.run is not None and self.observer is not None
        final = final_due(self.run, self._now().boot)
        verdict = self.observer.judge()
        if verdict is not None and (verdict.outcome is Outcome.FAIL or self.observer.tell_due() or final):
            self.handle(happenings.Judged(verdict, final, self.observer.evidence()))


def _told(run: Run, event: str, **fields: Any) -> Run:
    """For an event that is no transition."""
    return replace(run, last_event={"event": event, **fields})

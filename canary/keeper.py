"""The run, and what of it is on disk: decided (machine.step), saved, announced, in this order.

A run that cannot be saved (the disk is full, read-only, or gives errors): what is not saved is not announced, and not
begun. Weight 0 is the exception and needs no record, so the run gets it, and goes on to its end (a rollback; settling,
where stable names its release) once that is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from appliance.launcher.state import say
from appliance.log import ApplianceError, BusyError
from canary import machine
from canary.happenings import Abort, Command, Committed, Event, Now, Refused, Trip
from canary.pointers import is_committed
from canary.run import Phase, Run
from canary.store import Store, reason_of


@dataclass(frozen=True, slots=True)
class Unsaved:
    run: Run  # to be saved
    problem: str
    saved: Run | None = None  # what is on disk, where `run` ends for `problem` alone: somebody's reason counts for more

    @property
    def shown(self) -> Run:
        """With what it waits for."""
        return replace(self.run, problem=self.problem)


@dataclass(slots=True)
class Keeper:
    store: Store
    now: Callable[[], Now]
    run: Run | None = None
    unsaved: Unsaved | None = None  # `run` says so, too; the file still has an earlier one
    _not_kept: str | None = None  # why a run that is over is not archived yet

    def decide(self, event: Event) -> bool:
        """Saved and announced on return; True where the run is another one now."""
        assert self.run is not None
        if self.unsaved is not None:
            self._decide_unsaved(self.unsaved, event)
            return False
        after = machine.step(self.run, event, self.now())
        if after is self.run:
            return False
        self.put(after)
        return True

    def _decide_unsaved(self, unsaved: Unsaved, event: Event) -> None:
        """Only what makes the rollback sooner, or says why it is: one transition is all that can be told later."""
        saved = unsaved.saved
        if isinstance(event, Abort) and saved is not None:
            run = replace(saved, boot_id=unsaved.run.boot_id)
            self.unsaved = Unsaved(machine.step(run, event, self.now()), unsaved.problem)
        else:
            after = machine.step(unsaved.run, event, self.now())
            if after.seq == unsaved.run.seq:
                self.unsaved = Unsaved(after, unsaved.problem, saved)
        assert self.unsaved is not None
        self.run = self.unsaved.shown

    def check(self, event: Event) -> None:
        """Refused for a command that `decide` could not save. An abort did what matters: weight 0."""
        if self.unsaved is not None and isinstance(event, Command) and not isinstance(event, Abort):
            raise Refused(self.unsaved.problem, hint="the run is rolled back; free some space: `df -h`")

    def put(self, run: Run) -> None:
        """Saved and announced; or, where it cannot be, over but for being saved."""
        before = self.run
        assert before is not None
        try:
            self.store.save(run)
        except OSError as error:
            self.unsaved = self._stopped(before, run, error)
            self.run = self.unsaved.shown
            say(f"<3>run {run.id}: {self.unsaved.problem}; weight 0, and nothing else until it can be saved")
            return
        self.run = run
        if run.seq != before.seq or run is before:
            self._announce(run)

    def _announce(self, run: Run) -> None:
        self.store.announce(run)
        words = [f"run {run.id} {run.phase}/{run.stage}", f"weight {run.weight:g}", run.reason or run.problem or ""]
        say(" ".join(word for word in words if word))

    def _stopped(self, before: Run, after: Run, error: OSError) -> Unsaved:
        """What a run becomes that was to go from `before`, which is saved, to `after`, which is not: one transition."""
        problem = f"{self.store.paths.canary_run} cannot be written: {reason_of(error)}"
        if after.phase is Phase.ROLLING_BACK or after.committed or after.over:
            return Unsaved(after, problem)
        saved, before = before, replace(before, boot_id=after.boot_id)
        if is_committed(self.store.paths, before):
            return Unsaved(machine.step(before, Committed(), self.now()), problem)
        return Unsaved(machine.step(before, Trip(problem), self.now()), problem, saved)

    def save_again(self) -> bool:
        """What could not be saved before; True if that is done now."""
        if self.unsaved is None:
            return False
        run = self.unsaved.run
        with suppress(OSError):  # it was said; the next tick tries again
            self.store.save(run)
            self.run, self.unsaved = run, None
            say(f"run {run.id} could be saved again: {run.phase}/{run.stage}")
            self.store.announce_missing(run)
            return True
        return False

    def begin(self, run: Run) -> None:
        """The first state of a new run. Refused where the disk does not take it; the file is then as it was."""
        last = self.run
        if last is not None and (not last.over or self.unsaved is not None):
            raise BusyError(f"run {last.id} is {last.phase}", hint="`canary status`")
        try:
            if last is not None:
                self.store.archive(last)
            self.store.clear_abort()
            self.store.save(run)
        except OSError as error:
            with suppress(OSError, ApplianceError):  # it may be there, and only its directory not synced
                if (there := self.store.load()) is not None and there.id == run.id:
                    self.store.forget(last)
            raise Refused(
                f"no run can be started: {self.store.paths.state} cannot be written: {reason_of(error)}",
                hint="free some space (`df -h`), then again",
            ) from None
        self.run = run
        self._announce(run)

    def archive(self) -> bool:
        """True once the run that is over is kept among the earlier ones, and no wish to end it is left."""
        try:
            if self.run is not None:
                self.store.archive(self.run)
            self.store.clear_abort()
        except OSError as error:
            if self._not_kept is None:
                say(f"<3>what is over cannot be kept yet: {reason_of(error)}")
            self._not_kept = reason_of(error)
            return False
        self._not_kept = None
        return True

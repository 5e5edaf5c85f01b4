"""`appliance release use`: putting a release into service without losing a request.

Shared placement: the new engine starts beside the old one on every GPU, is ready and gives its golden answers; then
the slot pointer is swapped (the commit point); then the launchers drain and stop the old engines (op sync).
Exclusive placement: whole GPUs are replaced one at a time; the pointer is swapped when the first is ready.

Every step is an event. A failure before the commit point undoes what was begun; after it the new release is in use and
the same command again finishes the rest. A killed command is undone or finished by the next one (appliance/leases.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from appliance.engine_calls import EngineUnavailable
from appliance.events import append_event
from appliance.fleet import Fleet, FleetError, engine_of, releases_of
from appliance.golden import GoldenDiffers, Verdict, compare
from appliance.golden_record import room_for
from appliance.leases import Leases
from appliance.log import ApplianceError
from appliance.release_build import quick_problem
from appliance.releases import Release, ReleaseError, ReleaseRefused, ReleaseStore
from appliance.slots import pointer, set_slot, slots_of

_STOP_SECONDS = 60.0  # beyond what an old engine gets to drain


class UseFailed(FleetError):
    """`release use` ended before its commit point and undid what it had begun."""


class Unfinished(FleetError):
    """The pointer is swapped, but not every launcher has followed."""


@dataclass(slots=True)
class Outcome:
    release: str
    slot: str
    previous: str | None
    changed: bool = False
    gpus: list[int] = field(default_factory=list)  # that serve it now
    away: dict[int, str] = field(default_factory=dict)  # GPU -> why it does not take part; it follows when it is back
    warnings: list[str] = field(default_factory=list)
    renamed: str | None = None  # what clients with the former model name get from now on


@dataclass(slots=True)
class Rollout:
    """One `release use`. `run` is called by the holder of the lock of the releases."""

    store: ReleaseStore
    fleet: Fleet
    leases: Leases
    release: Release
    slot: str = "stable"
    wait: bool = True  # for the old engines to be drained and stopped
    offline: bool = False  # no launcher runs: only the pointer is set

    def run(self) -> Outcome:
        """What was done. ReleaseRefused (exit 4) where a check says no, UseFailed or FleetTimeout before the commit
        point (undone), Unfinished after it."""
        name, paths = self.release.name, self.fleet.paths
        self.check_files()
        outcome = Outcome(name, self.slot, pointer(paths, self.slot))
        states, outcome.away = self.fleet.survey()
        self._check_reach(states, outcome)
        if outcome.previous == name:
            return self._follow(states, outcome)  # of no GPU, where no launcher runs: they read the pointer at start
        if not states:
            self._commit(outcome)
            return outcome
        self._check_room(states.values())
        self._event("release_use_started", outcome, gpus=sorted(states))
        if self.fleet.config.engine.placement == "exclusive":
            self._exclusive(sorted(states), outcome)
        else:
            self._shared(sorted(states), outcome)
        self._finish(sorted(states), outcome)
        return outcome

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        """Names and sizes; of a linked release every digest, since its files belong to somebody else."""
        name = self.release.name
        self.release.engine_python(self.fleet.paths)
        if problem := quick_problem(self.release.directory(self.fleet.paths)):
            raise ReleaseRefused(
                f"the release {name!r} is damaged: {problem}", hint=f"`appliance release verify {name}`"
            )
        if not self.release.linked:
            return
        result = self.store.verify(name)
        if not result.ok:
            file, problem = next(iter(result.problems.items()))
            raise ReleaseRefused(
                f"the model that the release {name!r} links to has changed: {file}: {problem}",
                hint="a linked model must stay as it is; add a new release of it (without --link it is kept)",
            )

    def _check_reach(self, states: dict[int, dict[str, Any]], outcome: Outcome) -> None:
        if states and self.offline:
            raise ReleaseRefused(
                f"the launcher of GPU {', '.join(map(str, states))} runs",
                hint="leave --offline out: it would be bypassed",
            )
        if not states and not self.offline and outcome.previous != self.release.name:
            why = "; ".join(f"GPU {gpu}: {reason}" for gpu, reason in outcome.away.items()) or "no GPU is bound"
            raise ReleaseError(
                f"no launcher takes engines now ({why})",
                hint="start them: systemctl start appliance.target; or only set the pointer: --offline",
            )
        if self.slot != "stable" and self.fleet.config.engine.placement == "exclusive":
            raise ReleaseRefused(
                f"with engine.placement exclusive the slot {self.slot} is the canary controller's",
                hint="`canary start NAME`",
            )

    def _check_room(self, states: Iterable[dict[str, Any]]) -> None:
        if self.fleet.config.engine.placement == "exclusive":
            return  # the old engines make room
        for state in states:
            if problem := room_for(self.fleet, state, self.release.name):
                raise ReleaseRefused(
                    f"the memory cannot hold it: {problem}",
                    hint="lower engine.gpu_memory_fraction, settle the other slot first, or engine.placement exclusive",
                )

    def _check_golden(self, gpu: int, outcome: Outcome) -> None:
        """The new engine must give the recorded answers before any client sees its."""
        name, paths = self.release.name, self.fleet.paths
        self.fleet.stage(f"comparing golden answers of {name} on GPU {gpu}")
        found = compare(paths, name, paths.engine_socket(gpu, name))
        self._event("release_golden_compared", outcome, gpu=gpu, verdict=found.verdict.value, reason=found.reason)
        if found.verdict is Verdict.DIFFERENT:
            raise GoldenDiffers(name, gpu, found)
        if found.verdict is Verdict.INCONCLUSIVE:
            if found.recorded:
                raise EngineUnavailable(f"{name} on GPU {gpu} gave no golden answers: {found.reason}", hint="try again")
            outcome.warnings.append(f"GPU {gpu}: {found.reason}: its answers are not judged")

    # -- before the commit point -----------------------------------------------------------------------------------

    def _shared(self, gpus: list[int], outcome: Outcome) -> None:
        name = self.release.name
        try:
            for gpu in gpus:
                self._start(gpu, "run", outcome)
            self._until_ready(gpus, outcome)
            for gpu in gpus:
                self._check_golden(gpu, outcome)
            self._commit(outcome)
        except BaseException as error:
            self._undo(error, outcome)
            raise
        outcome.gpus = gpus
        self.leases.settle(name)

    def _exclusive(self, gpus: list[int], outcome: Outcome) -> None:
        first, *others = gpus
        try:
            self._replace(first, outcome)
            self._commit(outcome)
        except BaseException as error:
            self._undo(error, outcome, resync=[first])
            raise
        outcome.gpus.append(first)
        for gpu in others:
            try:
                self._replace(gpu, outcome)
            except ApplianceError as error:
                raise self._unfinished(error, outcome) from error
            outcome.gpus.append(gpu)
        self.leases.settle(self.release.name)

    def _replace(self, gpu: int, outcome: Outcome) -> None:
        self._start(gpu, "replace", outcome)
        self._until_ready([gpu], outcome)
        self._check_golden(gpu, outcome)

    def _start(self, gpu: int, op: str, outcome: Outcome) -> None:
        running = engine_of(self.fleet.state(gpu), self.release.name).get("state")
        if op == "run" and running in ("starting", "loading", "ready"):
            return  # the canary's, or of a command that was interrupted
        self.leases.take(gpu, self.release.name, op)
        self._event("release_engine_asked", outcome, gpu=gpu, op=op)

    def _until_ready(self, gpus: list[int], outcome: Outcome) -> None:
        where = f"GPU {', '.join(map(str, gpus))}"
        self.fleet.stage(f"starting {self.release.name} on {where}", self.release.model_bytes)
        self.fleet.wait_ready(
            gpus, self.release.name, lambda gpu: self._event("release_engine_ready", outcome, gpu=gpu)
        )

    def _commit(self, outcome: Outcome) -> None:
        self.leases.retire(outcome.previous)
        self.leases.retired(self.release.name)
        outcome.renamed = self._renamed(outcome.previous)
        set_slot(self.fleet.paths, self.slot, self.release.name)
        outcome.changed = True
        outcome.warnings += [outcome.renamed] if outcome.renamed else []
        self._event("release_use_committed", outcome, warning=outcome.renamed)

    def _renamed(self, previous: str | None) -> str | None:
        """Where clients call it otherwise than the release that it replaces."""
        if previous is None or self.slot != "stable":
            return None
        try:
            former = self.store.get(previous).model_name
        except ApplianceError:
            return None  # what cannot be read is no reason not to replace it
        if former == (name := self.release.model_name):
            return None
        return (
            f"MODEL NAME CHANGED: {self.release.name} is called {name!r}, {previous} was {former!r}:"
            f" clients that ask for {former!r} get 404 from now on"
            f" (`appliance release add NAME --model MODEL --model-name {former}` keeps the name)"
        )

    def _undo(self, error: BaseException, outcome: Outcome, resync: Iterable[int] = ()) -> None:
        """Stops what was started; a replaced engine comes back by op sync, since the pointer still names it."""
        if pointer(self.fleet.paths, self.slot) == self.release.name:
            return  # the pointer was swapped, and what failed was noting it: the next command finishes
        self.fleet.stage("undoing")
        problems = self.leases.drop_all()
        for gpu in resync:
            try:
                self.fleet.call(gpu, "sync", wait=False, timeout=30.0)
            except ApplianceError as failed:
                problems.append(f"GPU {gpu}: {failed.message}")
        self._event("release_use_undone", outcome, error=str(error) or type(error).__name__, problems=problems or None)
        if isinstance(error, ApplianceError):
            kept = f"{self.slot} is still {outcome.previous}" if outcome.previous else f"{self.slot} serves nothing yet"
            tail = f"; could not undo: {'; '.join(problems)}" if problems else ""
            error.message = f"{error.message} (undone: {kept}{tail})"

    # -- after the commit point ------------------------------------------------------------------------------------

    def _finish(self, gpus: list[int], outcome: Outcome) -> None:
        """The launchers follow the pointer: the old engines drain and stop."""
        fleet, patience = self.fleet, self.fleet.config.engine.drain_timeout + _STOP_SECONDS
        old = [release for release in self.leases.retiring() if not slots_of(fleet.paths, release)]
        fleet.stage(f"draining {', '.join(old)}" if old else "telling the launchers")
        try:
            for gpu in gpus:
                fleet.call(gpu, "sync", wait=False, timeout=30.0)
            for release in old:
                for gpu in gpus:
                    if engine_of(fleet.state(gpu), release):  # it may have been a lease before it was in a slot
                        fleet.call(gpu, "stop", release=release, wait=False, timeout=30.0)
                if self.wait:
                    fleet.wait_gone(gpus, release, patience)
        except ApplianceError as error:
            raise self._unfinished(error, outcome) from error
        for release in self.leases.retiring() if self.wait else ():
            self.leases.retired(release)
        self._event("release_use_finished", outcome)

    def _follow(self, states: dict[int, dict[str, Any]], outcome: Outcome) -> Outcome:
        """The pointer names it already: nothing to do, or an interrupted change to finish, one GPU after another."""
        name = self.release.name
        self.leases.settle(name)
        old = {release for release in self.leases.retiring() if not slots_of(self.fleet.paths, release)}
        behind = [gpu for gpu, state in sorted(states.items()) if self._is_behind(state, old)]
        outcome.changed = bool(behind)
        for release in self.leases.retiring():
            if release == name or not behind:
                self.leases.retired(release)
        try:
            for gpu in behind:
                self.fleet.call(gpu, "sync", wait=False, timeout=30.0)
                if engine_of(self.fleet.state(gpu), name).get("state") in ("failed", "backoff"):
                    self.fleet.call(gpu, "restart", release=name, wait=False, timeout=30.0)
                self._until_ready([gpu], outcome)
                self._check_golden(gpu, outcome)
        except ApplianceError as error:
            raise self._unfinished(error, outcome) from error
        if behind:
            self._finish(behind, outcome)
        outcome.gpus = sorted(states)
        return outcome

    def _is_behind(self, state: dict[str, Any], old: set[str]) -> bool:
        return engine_of(state, self.release.name).get("state") != "ready" or bool(old & set(releases_of(state)))

    def _unfinished(self, error: ApplianceError, outcome: Outcome) -> Unfinished:
        self._event("release_use_unfinished", outcome, error=error.message)
        failed = Unfinished(
            f"{self.slot} is {self.release.name} now, but not everywhere: {error.message}"
            + (f"; {outcome.renamed}" if outcome.renamed else ""),
            hint=f"see `appliance status`; `appliance release use {self.release.name}` again finishes it",
        )
        failed.exit_code = error.exit_code
        return failed

    def _event(self, event: str, outcome: Outcome, **fields: Any) -> None:
        append_event(
            self.fleet.paths.events,
            event,
            release=outcome.release,
            slot=outcome.slot,
            previous=outcome.previous,
            **fields,
        )

"""Engines and slot pointers of a run: what the jobs of the controller do through the launchers.

Shared: the release's engines run beside stable's on every GPU. Exclusive: whole GPUs go over, one at a time; stable
keeps at least one. Everything here may be killed anywhere and called again. Changes are made under the lock of the
releases (ReleaseStore.changing); who finds it taken says "not yet". Nothing here touches the rules.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from appliance.admin_http import AdminError, NotRunning, get_json
from appliance.control import ControlClient
from appliance.fleet import Connect, Fleet, FleetTimeout, engine_of
from appliance.golden import GoldenDiffers, Verdict, compare
from appliance.hostconfig import HostConfig, load_config
from appliance.leases import Leases
from appliance.log import ApplianceError, BusyError, ExitCode
from appliance.paths import Paths
from appliance.releases import ReleaseStore
from appliance.slots import pointer, set_slot
from canary.outcome import Result, fail, ok, wait
from canary.run import Run
from canary.worker import Cancelled

_POLL_SECONDS = 0.1
_GATEWAY_SECONDS = 30.0  # for a gateway to follow a pointer that it looks at every 0.1 s
_STOP_SECONDS = 60.0  # beyond what an engine gets to drain


@dataclass(slots=True)
class _CancellableFleet(Fleet):
    """The first call to a launcher after the job was cancelled fails, which ends every wait; those after it go through,
    so that what was begun can be undone."""

    cancelled: threading.Event | None = None
    _told: bool = False

    def call(self, gpu: int, op: str, **args: Any) -> dict[str, Any]:
        if self.cancelled is not None and self.cancelled.is_set() and not self._told:
            self._told = True
            raise _Ended("the run was ended")
        return Fleet.call(self, gpu, op, **args)


class _Ended(ApplianceError):
    exit_code = ExitCode.BUSY


@dataclass(slots=True)
class Placement:
    paths: Paths
    load: Callable[[], HostConfig] | None = None
    connect: Connect = ControlClient

    def fleet(self, cancelled: threading.Event | None = None) -> Fleet:
        config = self.load() if self.load is not None else load_config(self.paths.config)
        fleet = _CancellableFleet(self.paths, config, connect=self.connect)
        fleet.cancelled = cancelled
        return fleet

    # -- before the commit point -----------------------------------------------------------------------------------

    def start(self, run: Run, cancelled: threading.Event) -> Result:
        """Engines of the release, ready and with their golden answers; then the canary slot points at it."""
        from appliance.rollout import Rollout  # numpy comes with it: only in a run

        fleet = self.fleet(cancelled)
        store, leases = ReleaseStore(self.paths), Leases(fleet)
        try:
            with store.changing():
                leases.recover(keep=run.release)
                if run.placement == "exclusive":
                    return self._start_exclusive(run, fleet, leases)
                rollout = Rollout(store, fleet, leases, store.get(run.release), slot="canary", wait=False)
                outcome = rollout.run()
        except ApplianceError as error:
            return _failed(error, run, cancelled)
        return ok("; ".join([*outcome.warnings, *(f"GPU {gpu}: {why}" for gpu, why in outcome.away.items())]))

    def _start_exclusive(self, run: Run, fleet: Fleet, leases: Leases) -> Result:
        states, _ = fleet.survey()
        if len(states) < 2:
            return fail(f"placement is exclusive and {len(states)} GPU takes engines: stable would have none")
        gpu = _order(states, run.release)[0]
        self._replace(run, fleet, leases, gpu)
        set_slot(self.paths, "canary", run.release)
        leases.settle(run.release)
        return ok(f"GPU {gpu}")

    def move(self, run: Run, cancelled: threading.Event) -> Result:
        """Exclusive: until the canary's share of the GPUs is at least the weight of the step."""
        fleet = self.fleet(cancelled)
        store, leases = ReleaseStore(self.paths), Leases(fleet)
        try:
            with store.changing():
                states, _ = fleet.survey()
                wanted = math.ceil(len(states) * run.target / 100)
                if wanted >= len(states):
                    return wait(f"{len(states)} GPUs take engines now; {run.target:g} % would leave stable none")
                for gpu in _order(states, run.release)[:wanted]:
                    if cancelled.is_set():
                        raise Cancelled
                    if engine_of(states[gpu], run.release).get("state") != "ready":
                        self._replace(run, fleet, leases, gpu)
                leases.settle(run.release)
        except ApplianceError as error:
            return _failed(error, run, cancelled)
        return ok(f"{wanted} of {len(states)} GPUs")

    def _replace(self, run: Run, fleet: Fleet, leases: Leases, gpu: int) -> None:
        """FleetError where the engine does not come up or gives other answers than it should."""
        leases.take(gpu, run.release, "replace")
        fleet.wait_ready([gpu], run.release)
        found = compare(self.paths, run.release, self.paths.engine_socket(gpu, run.release))
        if found.verdict is Verdict.DIFFERENT:
            raise GoldenDiffers(run.release, gpu, found)

    def gateway(self, slot: str, release: str, cancelled: threading.Event) -> Result:
        """Until the gateway of `slot` serves `release`."""
        deadline, why = time.monotonic() + _GATEWAY_SECONDS, "?"
        while time.monotonic() < deadline and not cancelled.is_set():
            try:
                state = get_json(self.paths.gateway_socket(slot), "/state")
                get_json(self.paths.gateway_socket(slot), "/readyz")
                if state.get("release") == release and state.get("serving") == release:
                    return ok()
                why = f"the gateway {slot} serves {state.get('serving')}"
            except AdminError as error:
                why = f"the gateway {slot} is not ready: {error.message}"
            time.sleep(_POLL_SECONDS)
        return wait(why)

    def verify(self, run: Run, cancelled: threading.Event) -> Result:
        """Golden answers of every engine of the release, and that the engines are where they should be. An engine that
        does not answer is unknown, and waited for; one that answers otherwise fails the run."""
        fleet, seen, unknown = self.fleet(cancelled), 0, []
        states, _ = fleet.survey()
        for gpu, state in sorted(states.items()):
            engine = engine_of(state, run.release)
            if not engine and run.placement == "exclusive":
                continue
            if engine.get("state") == "failed":
                return fail(f"GPU {gpu}: the engine of {run.release} gave up: {engine.get('last_exit')}")
            if engine.get("state") != "ready":
                unknown.append(f"GPU {gpu}: the engine of {run.release} is {engine.get('state') or 'not there'}")
                continue
            found = compare(self.paths, run.release, self.paths.engine_socket(gpu, run.release))
            if found.verdict is Verdict.DIFFERENT:
                return _failed(GoldenDiffers(run.release, gpu, found), run, cancelled)
            if found.verdict is Verdict.INCONCLUSIVE and found.recorded:
                unknown.append(f"GPU {gpu}: {found.reason}")
            seen += 1
        if unknown or not seen:
            return wait("; ".join(unknown) or f"no GPU runs {run.release}")
        if run.placement == "exclusive" and run.weight > 100 * seen / len(states):
            return wait(f"{seen} of {len(states)} GPUs run {run.release}, and its weight is {run.weight:g} %")
        return self.gateway("canary", run.release, cancelled)

    def golden(self, run: Run, cancelled: threading.Event) -> bool | None:
        """Do all engines of the release that are ready give their golden answers? None: could not be compared."""
        verdicts = set()
        for gpu, state in self.fleet(cancelled).survey()[0].items():
            if engine_of(state, run.release).get("state") == "ready":
                found = compare(self.paths, run.release, self.paths.engine_socket(gpu, run.release))
                verdicts.add(found.verdict)
        if Verdict.DIFFERENT in verdicts:
            return False
        return True if verdicts == {Verdict.SAME} else None

    def commit(self, run: Run) -> Result:
        """The commit point: the stable pointer names the release on return of `ok`. Called in the controller's loop,
        under the lock that aborts take; takes milliseconds."""
        fleet, store = self.fleet(), ReleaseStore(self.paths)
        with store.changing():
            if (now := pointer(self.paths, "stable")) != run.stable:
                return ok() if now == run.release else fail(f"the slot stable was changed to {now} by somebody else")
            leases = Leases(fleet)
            leases.retire(run.stable)  # so that whoever finishes this knows what to stop
            leases.retired(run.release)
            set_slot(self.paths, "stable", run.release)
        return ok()

    # -- after it --------------------------------------------------------------------------------------------------

    def follow(self, run: Run, cancelled: threading.Event) -> Result:
        """The launchers follow the stable pointer, the old engines drain and stop; the canary slot is empty again."""
        from appliance.rollout import Rollout

        fleet = self.fleet(cancelled)
        store, leases = ReleaseStore(self.paths), Leases(fleet)
        try:
            with store.changing():
                if pointer(self.paths, "stable") != run.release:
                    return ok(f"stable is {pointer(self.paths, 'stable')} by now: left as it is")
                if pointer(self.paths, "canary") == run.release:
                    set_slot(self.paths, "canary", None)
                Rollout(store, fleet, leases, store.get(run.release)).run()
        except ApplianceError as error:
            return wait(error.message)
        return ok()

    # -- back ------------------------------------------------------------------------------------------------------

    def redirect(self, run: Run) -> bool:
        """The canary gateway serves the stable release from now on (it looks at its pointer every 0.1 s): connections
        that still lead to it get good answers, however long they live. True if it was changed."""
        if run.release == run.stable or pointer(self.paths, "canary") != run.release:
            return False
        set_slot(self.paths, "canary", run.stable)
        return True

    def in_work(self, run: Run) -> int | None:
        """Requests that the gateways have with engines of the release, once they send no more there; None: unknown, or
        they still do. The stable gateway has some only where the release was promoted and taken back."""
        return self._in_flight(run, unless_serving=True)

    def in_flight(self, run: Run) -> int | None:
        """The same, also while more are sent there."""
        return self._in_flight(run, unless_serving=False)

    def _in_flight(self, run: Run, *, unless_serving: bool) -> int | None:
        found = [self._of_slot("canary", run, unless_serving)]
        if run.reverted:
            found.append(self._of_slot("stable", run, unless_serving))
        known = [count for count in found if count is not None]
        return sum(known) if len(known) == len(found) else None

    def _of_slot(self, slot: str, run: Run, unless_serving: bool) -> int | None:
        """A gateway that is not running has none."""
        try:
            state = get_json(self.paths.gateway_socket(slot), "/state")
            if unless_serving and state.get("serving") == run.release:
                return None
            engines = [engine for gpu in state.get("gpus", []) for engine in gpu.get("engines", [])]
            return sum(int(engine["in_flight"]) for engine in engines if engine.get("release") == run.release)
        except NotRunning:
            return 0
        except (AdminError, KeyError, TypeError, ValueError):
            return None

    def withdraw(self, run: Run, cancelled: threading.Event) -> Result:
        """No slot names the release, its engines drain and stop, stable has all GPUs again."""
        fleet = self.fleet(cancelled)
        store, leases = ReleaseStore(self.paths), Leases(fleet)
        try:
            with store.changing():
                if pointer(self.paths, "canary") in (run.release, run.stable):
                    set_slot(self.paths, "canary", None)
                if pointer(self.paths, "stable") == run.release:
                    return ok(f"stable is {run.release} by now: its engines stay")
                for gpu, release in leases.all():
                    if release == run.release:
                        with suppress(ApplianceError):  # said below, where it still runs
                            leases.drop(gpu, release)
                states, _ = fleet.survey()
                self._stop(run, fleet, states)
                leases.settle(run.release)  # launchers that are gone took their engines with them
                if run.placement == "exclusive":
                    fleet.wait_ready(states, run.stable)
        except ApplianceError as error:
            return wait(error.message)
        return ok()

    def _stop(self, run: Run, fleet: Fleet, gpus: Iterable[int]) -> None:
        for gpu in gpus:
            fleet.call(gpu, "sync", wait=False, timeout=30.0)
            if engine_of(fleet.state(gpu), run.release):
                fleet.call(gpu, "stop", release=run.release, wait=False, timeout=30.0)
        fleet.wait_gone(list(gpus), run.release, fleet.config.engine.drain_timeout + _STOP_SECONDS)


def _order(states: Iterable[int], release: str) -> list[int]:
    """Which GPUs go over first: those that are already there, then the last ones."""
    if isinstance(states, dict):
        return sorted(states, key=lambda gpu: (not engine_of(states[gpu], release), -gpu))
    return sorted(states, reverse=True)


def _failed(error: ApplianceError, run: Run, cancelled: threading.Event) -> Result:
    """A lock that somebody has is not the release's fault; what a cancelled job says counts for nothing anyway. What to
    do about other answers stands before them: the hashes are long, and a terminal cuts them off."""
    if isinstance(error, BusyError | _Ended) or (isinstance(error, FleetTimeout) and cancelled.is_set()):
        return wait(error.message)
    first = f"first `appliance release verify {run.release}`: " if isinstance(error, GoldenDiffers) else ""
    return fail(first + error.message)

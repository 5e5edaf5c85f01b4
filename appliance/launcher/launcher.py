"""The launcher of one GPU slot: which engines should be there, and making it so. One thread, one loop (loop.py).

desired() says what should run; reconcile() compares and starts or stops; every change ends in _publish(): state.json,
STATUS for systemd, and the answers of those who wait.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from appliance.events import append_event
from appliance.gpu_facts import gpu_facts
from appliance.hostconfig import HostConfig, load_config
from appliance.launcher import operations
from appliance.launcher.control_server import Client, ControlServer, failure
from appliance.launcher.engine_process import EngineProcess, Surroundings
from appliance.launcher.holds import Holds
from appliance.launcher.lifecycle import State
from appliance.launcher.loop import Loop, Timer
from appliance.launcher.scopes import Scopes
from appliance.launcher.spec import EngineSpec, plan_engine, pointed_releases
from appliance.launcher.state import StateFile, say, status_text
from appliance.log import ApplianceError, ExitCode
from appliance.notify import Notifier
from appliance.paths import Paths

_TICK = 5.0
_EXTEND_SECONDS = 30
_WRITE_AGAIN = 1.0
_CLEAN_GRACE = 30.0  # beyond the stop timeout of the scopes that are found


@dataclass(slots=True)
class Waiter:
    outcome: operations.Outcome
    client: Client
    timer: Timer


@dataclass(frozen=True, slots=True)
class User:
    """Whom engines run as, and who may ask for the status."""

    uid: int
    gid: int
    admins: frozenset[int] = frozenset({0})  # who may ask for everything


class Launcher:
    def __init__(
        self,
        paths: Paths,
        gpu: int,
        uuid: str,
        config: HostConfig,
        user: User,
        loop: Loop,
        scopes: Scopes,
        notifier: Notifier,
    ) -> None:
        """StateError if the holds of this slot cannot be understood."""
        self.paths, self.gpu, self.uuid, self.config = paths, gpu, uuid, config
        self.loop, self._scopes, self._notifier, self._user = loop, scopes, notifier, user
        self.holds = Holds(paths.holds(gpu))
        self.engines: dict[str, EngineProcess] = {}
        self.pointers: dict[str, str] = {}
        self.leases: set[str] = set()  # asked for by "run", beside what the slots name
        self.only: str | None = None  # after "replace", until the next sync
        self.since = time.time()
        self.notified_ready = False
        self._clean = False  # nothing of an earlier launcher is left
        self._stopping = False
        self._abort = False
        self._waiters: list[Waiter] = []
        self._scheduled: Timer | None = None
        self._again = Timer(0, self.changed)
        self._file = StateFile(paths.launcher_state(gpu))
        self._status, self._status_heard = "", ""
        self._server: ControlServer | None = None
        self.around = Surroundings(
            loop, scopes, gpu, user.uid, user.gid, config, self._plan, self.changed, self.event, self._gpu_facts
        )

    # -- start and end
    def start(self) -> None:
        """Opens the control socket and stops what an earlier launcher left; engines start after that."""
        self._server = ControlServer(
            self.loop,
            self.paths.control_socket(self.gpu),
            lambda request, client: operations.handle(self, request, client),
            admins=self._user.admins,
            public_uid=self._user.uid,
            group=self._user.gid,
        )
        self._read_pointers()
        self.event("launcher_started", uuid=self.uuid, holds=self.holds.text() or None)
        self._tick()
        self._clean_slice()
        self._publish()

    def _clean_slice(self) -> None:
        seconds = self.config.engine.drain_timeout + _CLEAN_GRACE
        self._scopes.clean(self.gpu, kill=False, seconds=seconds, done=self._cleaned)

    def _cleaned(self, answer: dict[str, Any]) -> None:
        if not answer["ok"]:
            self.event("clean_failed", error=answer["error"])
            self.loop.later(_TICK, self._clean_slice)
            return
        if answer.get("stopped"):
            self.event("leftovers_stopped", scopes=answer["stopped"])
        self._clean = True
        self.reconcile()

    def terminate(self) -> None:
        """SIGTERM: drain, stop the scopes, end. A second one shortens the drain."""
        if self._stopping:
            for engine in self.engines.values():
                engine.hurry()
            return
        self._stopping = True
        self._notifier.send(STOPPING=1, STATUS="stopping: requests in flight finish")
        self.event("launcher_stopping")
        self.reconcile()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._file.remove()

    # -- what should run
    def desired(self) -> list[str]:
        """Releases that should have an engine here now, the most important first."""
        return [] if self._stopping or self.holds.stopped else self.wanted()

    def wanted(self) -> list[str]:
        """The same, whatever is held."""
        if self.only is not None:
            return [self.only]
        names = list(dict.fromkeys([*self.pointers.values(), *sorted(self.leases)]))
        return names[:1] if self.config.engine.placement == "exclusive" else names

    def reconcile(self) -> None:
        """Starts what is missing, stops what is too much. Idempotent."""
        desired = self.desired()
        for name, engine in list(self.engines.items()):
            if name not in desired:
                engine.stop(abort=self._abort)
            if engine.state is State.GONE and name not in desired:
                del self.engines[name]
        exclusive = self.config.engine.placement == "exclusive"
        for name in desired if self._clean else ():
            others = any(engine.live for other, engine in self.engines.items() if other != name)
            if name not in self.engines:
                self.engines[name] = EngineProcess(self.around, name)
            engine = self.engines[name]
            if engine.state is State.GONE and not (exclusive and others):
                engine.start()
        if self._stopping and not self.engines:
            self.loop.stop()
        self.changed()

    def want_again(self, release: str) -> None:
        """`release` was asked for by name: one that gave up or backs off is started now."""
        engine = self.engines.get(release)
        if engine is not None and engine.state in (State.FAILED, State.BACKOFF):
            engine.start()
        self.reconcile()

    def sync(self) -> None:
        """Reads configuration and slot pointers again. The configuration counts for engines started from now on; those
        that gave up or back off are started now, since what they lacked may be there again (gpu_nodes.py)."""
        try:
            self.around.config = self.config = load_config(self.paths.config)
        except ApplianceError as error:
            self.event("config_not_reloaded", error=error.message)
        self._read_pointers()
        self.only = None
        self.event("sync", slots=self.pointers, leases=sorted(self.leases) or None)
        for name in self.desired():
            if name in self.engines and self.engines[name].state in (State.FAILED, State.BACKOFF):
                self.engines[name].start()
        self.reconcile()

    def _read_pointers(self) -> None:
        self.pointers, problems = pointed_releases(self.paths, self.pointers)
        for problem in problems:
            self.event("slot_not_read", error=problem)
        self.leases.difference_update(self.pointers.values())  # a slot names it now; it needs no lease to stay

    def apply_holds(self, *, abort: bool = False, back: bool = False) -> None:
        """After a change of the holds. `abort`: engines that have to go are killed. `back`: the GPU comes back, and
        serves what the slots name now: a change of releases leaves out a GPU that is held."""
        if back:
            self._read_pointers()
        self._abort = abort
        self.reconcile()
        self._abort = False

    def _plan(self, release: str) -> EngineSpec:
        return plan_engine(self.paths, self.config, self.gpu, self.uuid, release)

    def _gpu_facts(self) -> dict[str, Any]:
        if self.config.gpus.backend != "cuda":
            return {}
        facts = gpu_facts(self.uuid)
        return {"gpu_state": facts.state, "pci": facts.pci}

    # -- those who wait
    def wait_for(self, outcome: operations.Outcome, client: Client, seconds: float) -> None:
        """Replies to `client` when `outcome` is there, or after `seconds` (exit code 3)."""

        def late() -> None:
            text = f"not reached within {seconds:g} s: {self._status}"
            client.reply(failure(text, hint="it goes on; see `appliance status`", code=ExitCode.INCONCLUSIVE))

        waiter = Waiter(outcome, client, self.loop.later(seconds, late))
        client.on_close = lambda: self._forget(waiter)
        self._waiters.append(waiter)

    def _forget(self, waiter: Waiter) -> None:
        waiter.timer.cancel()
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    # -- what others see
    def changed(self) -> None:
        """Something that state() shows may have changed: looked at once, after the callbacks of now."""
        if self._scheduled is None:
            self._scheduled = self.loop.later(0, self.settle)

    def settle(self) -> None:
        """Brings everything that others see up to date."""
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        gone = [name for name, engine in self.engines.items() if engine.state is State.GONE]
        if gone:
            self.reconcile()
        self._publish()

    def _publish(self) -> None:
        self._status = status_text(self)
        self._again.cancel()
        written = self._file.write(self.state())
        if not (self._stopping or self._notify()) or not written:
            self._again = self.loop.later(_WRITE_AGAIN, self.changed)
        for waiter in list(self._waiters):
            reply = waiter.outcome()
            if reply is not None:
                waiter.client.reply(reply)

    def _notify(self) -> bool:
        """False if something is still to be said: systemd, busy with itself, did not take it."""
        ready = not self.notified_ready and self._ready()
        if self._status == self._status_heard and not ready:
            return True
        fields: dict[str, str | int] = {"READY": 1} if ready else {}
        heard = self._notifier.send(**fields, STATUS=self._status) or not self._notifier.present
        if heard:
            self._status_heard = self._status
        if ready and heard:
            self.notified_ready = True
            self.event("launcher_ready", status=self._status)
        return heard

    def _ready(self) -> bool:
        """For systemd: everything that will happen by itself has happened. A release that gave up is in STATUS, events
        and alerts; the launcher stays there to be told what to do."""
        if not self._clean:
            return False
        desired = self.desired()
        if self.holds or not desired:
            return True
        first = self.engines.get(desired[0])
        return first is not None and (first.serving or first.state is State.FAILED)

    def state(self) -> dict[str, Any]:
        """What state.json holds."""
        admitted = not self.holds and not self._stopping
        return {
            "gpu": self.gpu,
            "uuid": self.uuid,
            "backend": self.config.gpus.backend,
            "pid": os.getpid(),
            "since": round(self.since, 3),
            "status": self._status,
            "holds": self.holds.as_dict(),
            "admitted": admitted,
            "share": self.holds.share,
            "slots": self.pointers,
            "wanted": self.wanted(),
            "engines": [engine.as_dict(gpu_admitted=admitted) for engine in self.engines.values()],
        }

    def event(self, name: str, **fields: Any) -> None:
        """To the event log and the journal; a full disk does not stop us."""
        shown = " ".join(f"{key}={value}" for key, value in fields.items() if value is not None)
        say(f"{name} {shown}")
        try:
            append_event(self.paths.events, name, gpu=self.gpu, **fields)
        except OSError as error:
            say(f"<3>{self.paths.events}: {error.strerror}: {name} is only in the journal")

    # -- time
    def _tick(self) -> None:
        watchdog = self._notifier.watchdog_seconds
        if watchdog is not None:
            self._notifier.send(WATCHDOG=1)
        if self._stopping or (not self.notified_ready and self._making_progress()):
            self._notifier.send(EXTEND_TIMEOUT_USEC=int(_EXTEND_SECONDS * 1e6))
        if not self.holds.saved:
            try:
                self.holds.save()
                self.event("holds_saved")
                self.changed()
            except OSError:
                pass  # said when it was asked for; STATUS says it as long as it lasts
        self.loop.later(min(_TICK, watchdog / 3 if watchdog is not None else _TICK), self._tick)

    def _making_progress(self) -> bool:
        """A load that stands still for start_timeout gets no more time from systemd either."""
        limit = self.config.engine.start_timeout + _EXTEND_SECONDS
        loading = [engine for engine in self.engines.values() if engine.state is State.LOADING]
        return all(self.loop.time() - engine.progress_at < limit for engine in loading)

    def handle_signals(self) -> None:
        """Only in the main thread."""
        handlers: list[tuple[signal.Signals, Callable[[], None]]] = [
            (signal.SIGTERM, self.terminate),
            (signal.SIGINT, self.terminate),
            (signal.SIGHUP, self.sync),
        ]
        for number, handler in handlers:
            self.loop.on_signal(number, handler)

"""The watchdog's loop: signals and answers go into the state machine, its commands come out and are carried out.

One thread. post(event) -> machine.step -> the ledger on disk -> commands (actions.py, probes) -> answers as events.
What is on disk is enough to go on after a kill at any moment: start() gives the commands of each GPU's state.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.events import append_event
from appliance.launcher.loop import Loop, Timer
from appliance.launcher.state import StateFile, say
from appliance.log import ApplianceError, printable
from appliance.notify import Notifier
from appliance.paths import Paths
from healthcheck.actions import Actions
from healthcheck.engine_probe import EngineProbe
from healthcheck.engines import Launchers
from healthcheck.errands import Errands
from healthcheck.keeper import Keeper, why_not_written
from healthcheck.leftovers import found_holds
from healthcheck.limits import read_limits
from healthcheck.machine import start, step
from healthcheck.machine_types import (
    OUT,
    Alert,
    Command,
    Event,
    Hold,
    HostState,
    MaintenanceOn,
    Rechecked,
    Record,
    Reread,
    ResetDone,
    SignalSeen,
    State,
    Tick,
    Verified,
)
from healthcheck.metrics import Counters
from healthcheck.news import News
from healthcheck.policy import Policy
from healthcheck.probes import Probes
from healthcheck.publish import Publisher
from healthcheck.reset_result import Results
from healthcheck.resetter import Resetter
from healthcheck.types import Action, Signal
from healthcheck.verification import Found

_TICK = 1.0  # s: launchers' files, deadlines of the machine
_AFTER = 0.005  # s: a deadline is over then, also by a clock that was rounded
_PING = 5.0  # s at most between two WATCHDOG=1
_MAX_EVENTS = 10_000  # in one go: more is a machine that talks to itself
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Seconds between two looks; None: the policy's [limits]."""

    probe: float | None = None
    heartbeat: float | None = None
    golden: float | None = None


class Service:
    def __init__(
        self,
        paths: Paths,
        loop: Loop,
        policy: Policy,
        keeper: Keeper,
        notifier: Notifier,
        make_probes: Callable[[Service], Probes],
        *,
        backend: str,
        schedule: Schedule,
        stall_timeout: float,
        test: bool = False,
        boot_id: str | None = None,
    ) -> None:
        """test: faults may be injected. StateError where the ledger cannot be understood."""
        self.paths, self.loop, self.policy, self.backend, self.test = paths, loop, policy, backend, test
        self.limits = read_limits(policy.limits)
        self.schedule, self._notifier, self._keeper = schedule, notifier, keeper
        self.boot_id = boot_id or _BOOT_ID.read_text().strip()
        self.host: HostState = keeper.load()
        self.counters = Counters()
        self.alerts: deque[dict[str, Any]] = deque(maxlen=20)
        self.launchers = Launchers(paths)
        self.errands = Errands(loop)
        self.probes = make_probes(self)
        self.resetter = Resetter(loop, paths, self.errands, self.probes.gate)
        self.actions = Actions(
            loop, paths, self.errands, self.launchers, self.resetter, self.post,
            out_of_service=self._out_of_service, levels=self._levels,
        )  # fmt: skip
        self.engines: dict[int, EngineProbe] = {}
        self.stall_timeout = stall_timeout
        self.publisher = Publisher(self, StateFile(paths.watchdog_state))
        self._events: deque[Event] = deque()
        self._waiting: list[Command] = []  # for the ledger
        self._results = Results(paths)
        self._handling = False
        self._publish: Timer | None = None
        self._deadline = Timer(0, self.changed)  # the next of the machine's, if it is near
        self.unsaved: str | None = None  # why the ledger could not be written
        self._ready = False
        self._shown = self.host
        self._news = News(self.probe_interval)
        self._said = ""  # to systemd
        self._adopting = ""  # why further slots could not be read

    # -- start and end
    def start(self) -> None:
        self._bound()
        self._look()
        self.event("watchdog_started", boot_id=self.boot_id, nvml=self.probes.kind, test=self.test or None)
        held = list(found_holds(self.paths, self.host.gpus))
        self.host, commands = start(self.host, time.time(), self.boot_id, self.policy, held)
        for slot, gpu in self.host.gpus.items():
            if gpu.state is not State.RESETTING and slot != self.host.resetting:
                self._results.noted(gpu.uuid)
        self._perform(commands)
        self.probes.start(self._first_look)
        self._tick()
        self._beat()
        self._probe()
        self._ping()

    def _bound(self) -> None:
        """The slots of the ledger, each with its probe."""
        self.probes.bound({gpu.uuid: slot for slot, gpu in self.host.gpus.items()})
        for slot in self.host.gpus:
            if slot not in self.engines:
                self._engine_probe(slot)

    def _engine_probe(self, slot: int) -> None:
        golden = self.schedule.golden or self.limits.golden_interval
        self.engines[slot] = EngineProbe(
            self.loop, self.errands, str(self.paths.etc.parents[1]), slot, self.host.gpus[slot].uuid,
            stall_timeout=self.stall_timeout, golden_interval=golden, on_signal=self.signal,
            on_compared=lambda verdict: self.counters.golden.inc(str(slot), verdict),
        )  # fmt: skip

    def _first_look(self) -> None:
        """NVML has answered once, or has been given up for now."""
        if not self._ready:
            self._ready = True
            self._notifier.send(READY=1)
            self.changed()

    def terminate(self) -> None:
        """SIGTERM. Holds stay, a reset goes on; the ledger says where to go on."""
        self._notifier.send(STOPPING=1, STATUS="stopping; what it holds stays held")
        self.event("watchdog_stopped")
        self.loop.stop()

    def close(self) -> None:
        self.actions.close()
        self.probes.close()
        self.publisher.now()

    # -- events
    def post(self, event: Event) -> None:
        """Into the machine; now, or after what is being handled."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            for _ in range(_MAX_EVENTS):
                if not self._events:
                    break
                self._handle(self._events.popleft())
            else:
                raise RuntimeError(f"the machine does not come to rest: {self._events[0]}")
        finally:
            self._handling = False
        self._arm()
        if self._shown is not self.host:
            self._shown = self.host
            self.changed()

    def _arm(self) -> None:
        """A tick at the next deadline of the machine, where that is sooner than the usual one."""
        self._deadline.cancel()
        now = time.time()
        waiting = [gpu.deadline - now for gpu in self.host.gpus.values() if gpu.deadline is not None]
        soon = min((seconds for seconds in waiting if 0 < seconds < _TICK), default=None)
        if soon is not None:
            self._deadline = self.loop.later(soon + _AFTER, lambda: self.post(Tick(*self._load())))

    def _handle(self, event: Event) -> None:
        self._count(event)
        self.host, commands = step(self.host, event, time.time(), self.policy)
        self._perform(commands)

    def _count(self, event: Event) -> None:
        if isinstance(event, ResetDone):
            self.counters.resets.inc(str(event.gpu), "ok" if event.ok else "failed")
            self._results.noted(self.host.gpus[event.gpu].uuid)
            self.event("watchdog_reset", gpu=event.gpu, ok=event.ok, detail=event.detail, needs=event.needs)
        elif isinstance(event, Verified):
            result = {True: "ok", False: "failed", None: "inconclusive"}[event.ok]
            self.counters.verifications.inc(str(event.gpu), result)
            self.event("watchdog_verified", gpu=event.gpu, result=result, detail=event.detail, key=event.key)

    def signal(self, signal: Signal) -> None:
        """From a probe."""
        gpu = self.slot(signal.uuid)
        self.counters.signal("" if gpu is None else str(gpu), signal.key)
        if (again := self._news.tell(signal)) is not None:
            self.event(
                "watchdog_signal", gpu=gpu, key=signal.key, source=signal.source, detail=signal.detail,
                again=again or None,
            )  # fmt: skip
        self.post(SignalSeen(signal))

    def slot(self, uuid: str | None) -> int | None:
        return next((slot for slot, gpu in self.host.gpus.items() if gpu.uuid == uuid), None)

    # -- commands
    def _perform(self, commands: list[Command]) -> None:
        """The ledger first. Where that cannot be written (disk full), a GPU is still taken out of service, and nothing
        is repaired: attempts that nobody counts would have no limit."""
        self._waiting += commands
        for command in commands:
            if isinstance(command, Record) and command.after is State.RESETTING:
                self._results.begins(command.uuid)
        self._save()
        kept, self._waiting = self._waiting, []
        for command in kept:
            if self.saved or isinstance(command, Hold | Alert | Record | Reread):
                self._one(command)
            else:
                self._waiting.append(command)

    def _save(self) -> None:
        try:
            self._results.before_save()
            self._keeper.save(self.host)
        except (OSError, ApplianceError) as error:
            if self.saved:
                self.counters.ledger.inc()
                say(f"<2>{self.paths.gpus}: {error}: nothing is repaired until it can be written")
            self.unsaved = why_not_written(error)
            return
        self._results.after_save()
        if not self.saved:
            say(f"<5>{self.paths.gpus}: written again")
        self.unsaved = None

    def _one(self, command: Command) -> None:
        match command:
            case Reread():
                uuid = command.uuid
                self.probes.reread(uuid, lambda action: self.post(Rechecked(uuid, action)))
            case Alert():
                self._alert(command)
            case Record():
                self._record(command)
            case _:
                self.actions.perform(command)

    def _alert(self, alert: Alert) -> None:
        gpu = "" if alert.gpu is None else str(alert.gpu)
        self.counters.alerts.inc(gpu)
        self.alerts.append({"at": round(time.time(), 3), "gpu": alert.gpu, "key": alert.key, "text": alert.text})
        self.event("watchdog_alert", gpu=alert.gpu, key=alert.key, text=alert.text)

    def _record(self, record: Record) -> None:
        self.counters.transitions.inc(str(record.gpu), str(record.before), str(record.after))
        self.publisher.phases(record)
        if record.after is State.PROBATION:
            self._news.forget(record.uuid)
        self.event(
            "watchdog_transition", gpu=record.gpu, uuid=record.uuid, before=str(record.before),
            after=str(record.after), reason=record.reason, cause=record.cause, seconds=record.seconds,
            needs=str(record.needs) if record.needs else None,
            phases={name: round(seconds, 3) for name, seconds in record.phases} or None,
        )  # fmt: skip

    def event(self, name: str, **fields: Any) -> None:
        """To the event log and the journal."""
        shown = " ".join(f"{key}={printable(str(value))}" for key, value in fields.items() if value is not None)
        say(f"{name} {shown}")
        append_event(self.paths.events, name, **fields)

    def _out_of_service(self, gpu: int) -> bool:
        entry = self.host.gpus.get(gpu)
        return entry is not None and entry.state in OUT and entry.state is not State.DRAINING

    def _levels(self, gpu: int, done: Callable[[Found], None]) -> None:
        """Whether what NVML says of this GPU now allows it to serve: no level that the policy would act on."""
        uuid, since = self.host.gpus[gpu].uuid, time.time()

        def look(_: int | None) -> None:
            bad = [signal for signal in self.probes.levels(uuid) if self._acts(signal)]
            if bad:
                done(Found(False, f"{bad[0].key}: {bad[0].detail}", bad[0].key))
            else:
                done(self.probes.verdict(uuid, since))

        self.probes.reread(uuid, look)

    def _acts(self, signal: Signal) -> bool:
        return self.policy.rule(signal.key).action > Action.ALERT

    # -- time
    def _tick(self) -> None:
        self._adopt()
        self._look()
        self.post(Tick(*self._load()))
        if not self.saved:
            self._perform([])
        self.loop.later(_TICK, self._tick)

    def _adopt(self) -> None:
        try:
            host = self._keeper.adopt(self.host)
        except (OSError, ApplianceError) as error:  # somebody else's file is not ours to judge every second
            if str(error) != self._adopting:
                say(f"<4>{self.paths.gpus}: {error}")
            self._adopting = str(error)
            return
        self._adopting = ""
        if host is not self.host:
            new = host.gpus.keys() - self.host.gpus.keys()
            self.host = host
            self.event("watchdog_adopted", slots=sorted(host.gpus))
            self._bound()
            for held in found_holds(self.paths, sorted(new)):
                self.post(held)
            if host.maintenance is not None:
                self.post(MaintenanceOn(host.maintenance))  # it is for the new ones, too

    def _look(self) -> None:
        slots, before = list(self.host.gpus), set(self.launchers.views)
        self.launchers.look(slots)
        if before != set(self.launchers.views):
            self.changed()
        for slot, probe in self.engines.items():
            probe.look(self.launchers.views.get(slot))

    def _load(self) -> tuple[frozenset[int] | None, dict[int, int] | None]:
        """Which slots serve, and how many requests each has in work; None where that is not known."""
        admitted = frozenset(slot for slot, view in self.launchers.views.items() if view.serves)
        flights = {slot: probe.in_flight for slot, probe in self.engines.items()}
        known = {slot: number for slot, number in flights.items() if number is not None}
        return (admitted if self.launchers.views else None), (known or None)

    def _beat(self) -> None:
        for probe in self.engines.values():
            probe.beat()
        self.loop.later(self.schedule.heartbeat or self.limits.heartbeat_interval, self._beat)

    def _probe(self) -> None:
        self.probes.look()
        self.loop.later(self.probe_interval, self._probe)

    def _ping(self) -> None:
        """From the loop itself: it has come round."""
        seconds = self._notifier.watchdog_seconds
        self._notifier.send(WATCHDOG=1)
        self.loop.later(_PING if seconds is None else min(_PING, seconds / 3), self._ping)

    # -- what others see
    def changed(self) -> None:
        """What is shown may have changed: written a little later, once."""
        if self._publish is None:
            self._publish = self.loop.later(0.05, self._publish_now)

    def _publish_now(self) -> None:
        self._publish = None
        status = self.publisher.now()
        if status != self._said and (self._notifier.send(STATUS=status) or not self._notifier.present):
            self._said = status

    @property
    def saved(self) -> bool:
        """The ledger on disk says what this process knows."""
        return self.unsaved is None

    @property
    def probe_interval(self) -> float:
        return self.schedule.probe or self.limits.probe_interval

"""A host with GPUs, launchers and a reset unit, driven by the real state machine, with random faults and crashes.

The world keeps its own books: who really serves, which resets really run, what every GPU is really like. The rules of
the issue are checked against those, not against what the machine thinks.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from healthcheck.ledger import read_ledger, worth_writing, write_ledger
from healthcheck.machine import start, step
from healthcheck.machine_types import (
    OUT,
    Alert,
    Command,
    Drained,
    EngineReady,
    Event,
    FoundHeld,
    GpuState,
    Hold,
    HostState,
    Incident,
    MaintenanceOff,
    MaintenanceOn,
    Rechecked,
    Record,
    Reread,
    ResetDone,
    ResetGpu,
    RestartEngine,
    SetHealthy,
    SetShare,
    SignalSeen,
    State,
    Stopped,
    Tick,
    Unhold,
    Verified,
    Verify,
    WarmedUp,
    Warmup,
    WatchReset,
)
from healthcheck.policy import Policy
from healthcheck.types import Signal

DAY = 86400.0
BEGIN = 1_790_000_000.0
# What NVIDIA says does not hurt work on the GPU (nvml.h on remapping, "drain and reset"), so that it can wait.
CAN_WAIT = {"remap:pending", "xid:63", "recovery_action:4", "remap:failure", "sram:threshold", "xid:48+xid:63"}
SERVING = (State.HEALTHY, State.SUSPECT, State.PROBATION)


class Violation(AssertionError):
    pass


@dataclass
class Fault:
    """Something that is wrong with one GPU."""

    kind: str
    events: tuple[str, ...] = ()  # said once, when it begins
    levels: tuple[str, ...] = ()  # said by every probe while it lasts
    recovery: int | None = None  # what NVML's recovery action is while it lasts
    answers: str | None = None  # golden:mismatch or checksum:mismatch while it lasts
    cure: str = "reset"  # restart, reset, reboot or never
    engine_dies: bool = False
    unstoppable: bool = False  # the engine hangs in the kernel
    reset: str = "ok"  # ok, fails, silent (never ends) or late (ends after the machine's deadline)
    no_start: bool = False  # the engine does not come up
    needs_telling: bool = True
    began: float = 0.0


def faults() -> dict[str, Fault]:
    """One of each kind."""
    kinds = [
        Fault("illegal address", ("xid:31",), cure="restart", engine_dies=True, needs_telling=False),
        Fault("contained", ("xid:94", "xid:63"), ("remap:pending",), 4, engine_dies=True),
        Fault("uncontained", ("xid:95",), ("recovery_action:1",), 1, engine_dies=True),
        Fault("double bit", ("xid:48",), engine_dies=True, cure="restart"),
        Fault("double bit, remapped", ("xid:48", "xid:63"), ("remap:pending",), 4, engine_dies=True),
        Fault("row pending", (), ("remap:pending",)),
        Fault("row pending for ever", (), ("remap:pending",), cure="never"),
        Fault("row failure", (), ("remap:failure",), cure="never"),
        Fault("off the bus", ("xid:79",), ("gpu:missing",), cure="reboot", engine_dies=True, no_start=True),
        Fault("silently missing", (), ("gpu:missing",), cure="reboot", engine_dies=True, no_start=True),
        Fault("gsp", ("xid:119",), ("recovery_action:1",), 1, engine_dies=True),
        Fault("gsp for ever", ("xid:119",), ("recovery_action:1",), 1, engine_dies=True, cure="never"),
        Fault("gsp, reset fails", ("xid:119",), ("recovery_action:1",), 1, reset="fails", cure="never"),
        Fault("gsp, reset silent", ("xid:120",), ("recovery_action:1",), 1, reset="silent", cure="never"),
        Fault("gsp, reset late", ("xid:119",), ("recovery_action:1",), 1, reset="late"),
        Fault("gsp, unstoppable", ("xid:119",), ("recovery_action:1",), 1, unstoppable=True, cure="reboot"),
        Fault("no start", ("xid:62",), (), no_start=True, cure="never"),
        Fault("flipped bit", answers="checksum:mismatch", cure="restart"),
        Fault("wrong adder", answers="golden:mismatch", cure="never"),
        Fault("wrong after heat", answers="golden:mismatch", cure="reset"),
        Fault("uncorrected, recovered", ("ecc:uncorrected",), recovery=0, cure="restart"),
        Fault("engine error", ("engine:error",), cure="restart", engine_dies=True, needs_telling=False),
        Fault("corrected storm", ("ecc:corrected_rate", "xid:92"), ("ecc:corrected_rate",), cure="never"),
        Fault("new xid", ("xid:7777",), recovery=0, cure="restart"),
        Fault("hot", (), ("clocks:thermal",), cure="never"),
    ]
    return {fault.kind: fault for fault in kinds}


BENIGN = ("corrected storm", "new xid", "hot", "uncorrected, recovered")


@dataclass
class Gpu:
    """One GPU with its launcher and its reset unit."""

    number: int
    uuid: str
    fault: Fault | None = None
    hold: str | None = None
    held_since: float = 0.0  # by the clock of then
    forgotten: bool = False  # held, and the ledger that knew why is lost
    share: float = 1.0
    ready_at: float | None = 0.0  # of the engine; None: there is none
    started: float = 0.0  # by the clock of then
    stops_at: float | None = None
    in_flight: int = 1
    reset_ends: float | None = None
    reset_result: bool | None = None
    resets: list[float] = field(default_factory=list)
    wants: str = ""  # what the service has to report: drained, stopped, ready, warm, verified
    awaited: bool = False  # the end of its reset is reported

    def engine(self, now: float) -> bool:
        return self.ready_at is not None and self.ready_at <= now

    def admitted(self, now: float) -> bool:
        return self.engine(now) and self.hold is None and not (self.fault and self.fault.no_start)


class World:
    def __init__(self, policy: Policy, gpus: int, seed: int, *, recovery_supported: bool = True) -> None:
        self.policy, self.random = policy, random.Random(seed)
        self.now = self.offset = 0.0
        self.gpus = {n: Gpu(n, f"GPU-{n:08x}-0000-4000-8000-000000000000") for n in range(gpus)}
        self.boot = 1
        self.recovery_supported = recovery_supported
        self.hung_until = -1.0
        self.release_fault = False
        self.ledger = self.host = HostState(
            gpus={n: GpuState(n, gpu.uuid, since=self.clock()) for n, gpu in self.gpus.items()}
        )
        self.crash_rate = 0.0
        self.crash_at: tuple[int, int] | None = None  # (step, how many of its commands are carried out)
        self.steps = 0
        self.busy_steps: dict[int, int] = {}  # step -> how many commands it gave
        self.alerts: list[tuple[float, Alert]] = []
        self.records: list[Record] = []
        self.seen_admitted: frozenset[int] = frozenset()
        self.pending: list[Event] = []
        self.next_probe = 0.0
        memory = Path("/dev/shm")  # thousands of crashes, each reads the file: no need to wear a disk
        self.directory = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.file = Path(self.directory.name) / "gpus.json"
        self.restart()

    def clock(self) -> float:
        """The clock of the host; it may be set back."""
        return BEGIN + self.now + self.offset

    # ------------------------------------------------------------------------------------------ the watchdog's process
    def restart(self) -> None:
        """The watchdog begins: from the ledger, which it reads from the disk."""
        write_ledger(self.file, self.ledger)
        found = [FoundHeld(n, "simulated", gpu.held_since) for n, gpu in self.gpus.items() if gpu.hold]
        self.host, commands = start(read_ledger(self.file), self.clock(), f"boot-{self.boot}", self.policy, found)
        self.ledger = self.host
        self.pending = []
        for gpu in self.gpus.values():
            gpu.wants, gpu.awaited = "", False
            if self.host.gpus[gpu.number].state is not State.RESETTING and self.host.resetting != gpu.number:
                gpu.reset_result = None  # its result was taken note of
        for command in commands:
            self.execute(command)

    def crash(self, seconds: float = 2.0) -> None:
        self.advance(seconds)
        self.restart()

    def lose_ledger(self, before: HostState | None = None) -> None:
        """The slots are bound anew; with `before` a backup of then comes back. Nobody knows of attempts any more."""
        for gpu in self.gpus.values():
            gpu.forgotten = gpu.hold is not None
            gpu.resets.clear()
        since = self.clock()
        self.ledger = before or HostState(gpus={n: GpuState(n, gpu.uuid, since=since) for n, gpu in self.gpus.items()})
        self.file.unlink(missing_ok=True)
        self.crash()

    def feed(self, event: Event) -> None:
        """One step; perhaps the watchdog dies in it."""
        self.steps += 1
        if isinstance(event, Verified) and event.ok and self.host.gpus[event.gpu].state is State.VERIFY:
            self.gpus[event.gpu].forgotten = False
        before = self.host
        after, commands = step(before, event, self.clock(), self.policy)
        if commands:
            self.busy_steps[self.steps] = len(commands)
        self.check_step(before, after, commands)
        survive = len(commands) + 1
        if self.crash_at is not None and self.crash_at[0] == self.steps:
            survive = self.crash_at[1]
        elif self.random.random() < self.crash_rate:
            survive = self.random.randint(-1, len(commands))
        if survive < 0:  # before the ledger was written: the event is lost
            return self.crash()
        self.host = after
        if worth_writing(before, after) or survive <= len(commands):
            self.ledger = after
        for command in commands[:survive]:
            self.execute(command)
        if isinstance(event, ResetDone) and survive > len(commands):
            self.gpus[event.gpu].reset_result = None
        if survive <= len(commands):
            self.crash()

    # ------------------------------------------------------------------------------------------------------ the effects
    def execute(self, command: Command) -> None:
        match command:
            case Alert():
                self.alerts.append((self.now, command))
            case Record():
                self.records.append(command)
            case Hold(gpu, level, _, _):
                self._hold(self.gpus[gpu], level)
            case Unhold(gpu):
                self.require(not self.gpus[gpu].forgotten, f"GPU {gpu} was held, and serves again unverified")
                self.gpus[gpu].hold = None
                self.gpus[gpu].wants = ""
                self._start(self.gpus[gpu])
            case RestartEngine(gpu, _, requested):
                if self.gpus[gpu].started < requested:
                    self._kill(self.gpus[gpu])
                    self._start(self.gpus[gpu])
                self.gpus[gpu].wants = "ready"
            case ResetGpu(gpu, uuid, _, _):
                self._reset(self.gpus[gpu], uuid)
            case WatchReset(gpu):
                self.gpus[gpu].awaited = True
            case Warmup(gpu):
                self.gpus[gpu].wants = "warm"
            case Verify(gpu):
                self.pending.append(self._verify(self.gpus[gpu]))
            case SetShare(gpu, share):
                self.gpus[gpu].share = share
            case Reread(uuid):
                gpu = next(g for g in self.gpus.values() if g.uuid == uuid)
                self.pending += self._probe(gpu, answer=True)

    def _hold(self, gpu: Gpu, level: str) -> None:
        gpu.held_since = gpu.held_since if gpu.hold else self.clock()
        gpu.hold = level
        if level == "stop":
            gpu.wants = "stopped"
            if gpu.ready_at is not None and not (gpu.fault and gpu.fault.unstoppable):
                gpu.stops_at = self.now + self.random.uniform(0.2, 4)
        else:
            self._start(gpu)
            gpu.wants = "ready" if self.host.gpus[gpu.number].state is State.WARMUP else "drained"
            gpu.in_flight = self.random.choice((0, 1, 1, 50))

    def _kill(self, gpu: Gpu) -> None:
        gpu.ready_at = gpu.stops_at = None

    def _start(self, gpu: Gpu) -> None:
        gpu.stops_at = None
        if gpu.ready_at is None and gpu.hold != "stop":
            self.require(gpu.reset_ends is None, f"GPU {gpu.number}: an engine is started while its reset runs")
            slow = gpu.fault is not None and gpu.fault.no_start
            gpu.started, gpu.ready_at = self.clock(), self.now + (1e9 if slow else self.random.uniform(3, 20))
            self._cured(gpu, "restart")

    def _cured(self, gpu: Gpu, by: str) -> None:
        order = ("restart", "reset", "reboot")
        if gpu.fault and gpu.fault.cure != "never" and order.index(by) >= order.index(gpu.fault.cure):
            gpu.fault = None

    def _reset(self, gpu: Gpu, uuid: str) -> None:
        gpu.awaited = True
        if gpu.reset_ends is not None or gpu.reset_result is not None:
            return  # it runs, or its result is there
        self.require(uuid == gpu.uuid, "a reset of another GPU")
        running = [other.number for other in self.gpus.values() if other.reset_ends is not None]
        self.require(not running, f"two resets at once: {running} and {gpu.number}")
        self.require(gpu.ready_at is None, f"GPU {gpu.number} is reset under a running engine")
        self.require(self.host.halt is None, "a reset begins after automation was stopped")
        recent = [at for at in gpu.resets if self.now - at < self.policy.attempts.window]
        week = [at for at in gpu.resets if self.now - at < 7 * DAY]
        self.require(len(recent) < self.policy.attempts.resets, f"a reset loop: GPU {gpu.number} after {recent}")
        self.require(len(week) < self.policy.attempts.resets_per_week, f"a slow reset loop of GPU {gpu.number}")
        gpu.resets.append(self.now)
        how = gpu.fault.reset if gpu.fault else "ok"
        late = self.policy.timeouts.reset + self.random.uniform(60, 600)
        gpu.reset_ends = self.now + {"silent": 1e9, "late": late}.get(how, self.random.uniform(4, 40))

    def _verify(self, gpu: Gpu) -> Event:
        wrong = "golden:mismatch" if self.release_fault else gpu.fault.answers if gpu.fault else None
        if wrong:
            return Verified(gpu.number, False, wrong, wrong)
        if self.now < self.hung_until:
            return Verified(gpu.number, None, "NVML does not answer")
        levels = [key for key in gpu.fault.levels if not key.startswith(("ecc:c", "clocks"))] if gpu.fault else []
        if levels and self.host.gpus[gpu.number].state is State.VERIFY:
            return Verified(gpu.number, False, f"still {levels[0]}", levels[0])
        return Verified(gpu.number, True)

    def _probe(self, gpu: Gpu, *, answer: bool = False) -> list[Event]:
        """One reading: the levels, and the recovery action where it was asked for."""
        if self.now < self.hung_until:
            return []
        fault = gpu.fault
        keys = fault.levels if fault else ()
        if not self.recovery_supported:
            keys = tuple(key for key in keys if not key.startswith("recovery_action"))
        found: list[Event] = [SignalSeen(self.signal(gpu, key)) for key in keys]
        if answer:
            action = (fault.recovery or 0) if fault else 0
            found.append(Rechecked(gpu.uuid, action if self.recovery_supported else None))
        return found

    def _noise(self, gpu: Gpu) -> list[Event]:
        """What our own stops and resets bring about."""
        state = self.host.gpus[gpu.number].state
        keys = []
        if state in (State.STOPPING, State.WARMUP) and not gpu.engine(self.now):
            keys += ["xid:45", "engine:unreachable"]
        if gpu.reset_ends is not None and state is State.RESETTING:
            keys += ["gpu:missing", "nvml:gpu_is_lost", "xid:45"]
        return [SignalSeen(self.signal(gpu, key)) for key in keys]

    def signal(self, gpu: Gpu, key: str) -> Signal:
        return Signal(key, gpu.uuid, f"simulated {key}", self.clock(), "test")

    # --------------------------------------------------------------------------------------------------------- the time
    def advance(self, seconds: float) -> None:
        self.now += seconds
        for gpu in self.gpus.values():
            if gpu.stops_at is not None and gpu.stops_at <= self.now:
                self._kill(gpu)
            if gpu.reset_ends is not None and gpu.reset_ends <= self.now:
                fails = gpu.fault is not None and gpu.fault.reset == "fails"
                gpu.reset_ends, gpu.reset_result = None, not fails
                if not fails:
                    self._cured(gpu, "reset")

    def answers(self) -> list[Event]:
        """What the service finds when it looks after what it was told to do."""
        found: list[Event] = self.pending
        self.pending = []
        for gpu in self.gpus.values():
            if gpu.awaited and gpu.reset_ends is None:
                gpu.awaited = False
                found.append(ResetDone(gpu.number, bool(gpu.reset_result), "simulated"))
            event = self._answer(gpu)
            if event is not None:
                gpu.wants = ""
                found.append(event)
        return found

    def _answer(self, gpu: Gpu) -> Event | None:
        match gpu.wants:
            case "drained":
                gpu.in_flight -= gpu.in_flight > 0 and self.random.random() < 0.3
                return Drained(gpu.number) if gpu.in_flight == 0 or gpu.ready_at is None else None
            case "stopped":
                return Stopped(gpu.number) if gpu.ready_at is None else None
            case "ready":
                return EngineReady(gpu.number) if gpu.engine(self.now) else None
            case "warm":
                return WarmedUp(gpu.number)
        return None

    def run(self, seconds: float) -> None:
        """Lets time pass, as the service would: answers first, probes every 30 s, a tick in every round."""
        end = self.now + seconds
        while self.now < end:
            self.advance(min(self.pace(), end - self.now))
            for event in self.answers():
                self.feed(event)
            if self.now >= self.next_probe:
                self.next_probe = self.now + 30
                self._probe_all()
            self.seen_admitted = frozenset(n for n, gpu in self.gpus.items() if gpu.admitted(self.now))
            idle = {n: self.random.choice((0, 0, 3)) if self.host.gpus[n].owed is None else 0 for n in self.gpus}
            self.feed(Tick(self.seen_admitted, idle))

    def pace(self) -> float:
        """Seconds until the next look: short where something moves."""
        states = {gpu.state for gpu in self.host.gpus.values()}
        asking = any(gpu.state is State.SUSPECT and gpu.stage == "asking" for gpu in self.host.gpus.values())
        if self.pending or asking or states & {State.STOPPING, State.VERIFY}:
            return self.random.uniform(0.5, 4)
        if states & {State.DRAINING, State.RESETTING, State.WARMUP}:
            return self.random.uniform(1, 15)
        return 30.0

    def settle(self) -> None:
        """Until nothing has moved for longer than any window."""
        for _ in range(12):
            moved = len(self.records)
            self.run(900)
            if len(self.records) == moved and all(
                g.state not in OUT - {State.QUARANTINED} for g in self.host.gpus.values()
            ):
                return
        self.require(False, "it never comes to rest")

    def _probe_all(self) -> None:
        for gpu in self.gpus.values():
            for event in self._probe(gpu) + self._noise(gpu):
                self.feed(event)
            wrong = "golden:mismatch" if self.release_fault else gpu.fault.answers if gpu.fault else None
            if wrong and gpu.admitted(self.now):
                self.feed(SignalSeen(self.signal(gpu, wrong)))

    # -------------------------------------------------------------------------------------------------------- the rules
    def require(self, condition: bool, what: str) -> None:
        if not condition:
            states = {n: (g.state.value, g.reason) for n, g in self.host.gpus.items()}
            raise Violation(f"at {self.now:.0f} s, step {self.steps}: {what}\n{states}")

    def check_step(self, before: HostState, after: HostState, commands: list[Command]) -> None:
        out = {number for number, gpu in before.gpus.items() if gpu.state in OUT}
        for command in commands:
            if not isinstance(command, Record):
                continue
            if command.after in OUT:
                out.add(command.gpu)
            else:
                out.discard(command.gpu)
            human = command.reason.startswith("set healthy")
            if command.before in SERVING and command.after in OUT and not human:
                self._check_taken_out(before, after, command, len(out))
        resetting = [n for n, gpu in after.gpus.items() if gpu.state is State.RESETTING]
        self.require(len(resetting) <= 1, f"two GPUs in RESETTING: {resetting}")

    def _check_taken_out(self, before: HostState, after: HostState, record: Record, out: int) -> None:
        gpu = record.gpu
        others = [n for n in self.seen_admitted if n != gpu and before.gpus[n].state in SERVING]
        incident = after.gpus[gpu].incident
        if incident is not None and incident.cause in CAN_WAIT:
            self.require(bool(others), f"the last serving GPU {gpu} was taken out for {incident.cause}")
        serves = gpu in self.seen_admitted or before.gpus[gpu].held
        limit = self.policy.breaker.limit(len(self.gpus))
        self.require(not serves or out <= limit, f"the breaker: {out} GPUs out, {limit} may be")

    def check_end(self) -> None:
        """When nothing moves any more."""
        waits_for = self.host.resetting
        ended = waits_for is not None and self.gpus[waits_for].reset_ends is None
        self.require(not ended, f"the reset of GPU {waits_for} has ended and is waited for all the same")
        told = {alert.gpu for _, alert in self.alerts}
        for number, gpu in self.gpus.items():
            state = self.host.gpus[number]
            settled = (State.HEALTHY, State.SUSPECT, State.QUARANTINED)
            self.require(state.state in settled, f"GPU {number} is left in {state.state} ({state.stage})")
            if state.state is State.HEALTHY:
                self.require(gpu.hold is None, f"GPU {number} is healthy and left held")
                self.require(gpu.share == 1.0, f"GPU {number} is healthy and left at a share of {gpu.share}")
                self.require(gpu.ready_at is not None, f"GPU {number} is healthy and its engine was left stopped")
            else:
                self.require(number in told or None in told, f"GPU {number} is {state.state} and nobody was told")
            if state.state is State.QUARANTINED:
                self.require(gpu.hold == "stop", f"GPU {number} is quarantined and not held")
                self.require(state.needs is not None, f"GPU {number} is quarantined and nobody is asked for")
            if state.state is State.SUSPECT:
                self.require(state.stage == "waiting", f"GPU {number} is left {state.stage} in SUSPECT")
            if gpu.fault is not None and gpu.fault.needs_telling:
                self.require(self._known(gpu, gpu.fault), f"GPU {number} has {gpu.fault.kind!r} and nobody was told")

    def _known(self, gpu: Gpu, fault: Fault) -> bool:
        """Whether people know of a fault, if it can be seen at all."""
        state = self.host.gpus[gpu.number]
        after = {alert.gpu for at, alert in self.alerts if at >= fault.began - 1}
        if gpu.number in after or None in after or state.state is State.QUARANTINED or state.owed is not None:
            return True
        if any(key in alert for alert in self.host.alerts for key in (*fault.levels, ":mismatch")):
            return True  # told before, and still the same alert
        waits = {item.key for item in state.incident.seen} if state.incident and state.stage == "waiting" else set()
        if fault.answers:  # the golden probe sees it, where the engine is admitted
            return not gpu.admitted(self.now) or bool(waits & {fault.answers, "golden:mismatch"})
        return not self._probe(gpu) or waits.issuperset(fault.levels)

    # ------------------------------------------------------------------------------------------------------- what comes
    def strike(self, number: int, fault: Fault) -> None:
        gpu = self.gpus[number]
        fault.began = self.now
        gpu.fault = fault
        if fault.engine_dies and gpu.ready_at is not None:
            self._kill(gpu)
            self._start(gpu)
            gpu.fault = fault  # the launcher's restart alone does not cure what has not been looked at
        for key in fault.events:
            self.feed(SignalSeen(self.signal(gpu, key)))

    def reboot(self) -> None:
        self.advance(60)
        self.boot += 1
        for gpu in self.gpus.values():
            gpu.reset_ends = gpu.reset_result = None
            self._kill(gpu)
            self._cured(gpu, "reboot")
            self._start(gpu)
        self.restart()

    def incident(self, number: int) -> Incident | None:
        return self.host.gpus[number].incident

    def counts(self) -> Counter[str]:
        return Counter(record.after.value for record in self.records)


def random_schedule(policy: Policy, seed: int) -> World:
    """Faults, people, crashes, a clock that is set back; then time to settle, and the end is checked."""
    rng = random.Random(seed)
    world = World(policy, rng.choice((1, 2, 2, 3, 4, 8)), seed, recovery_supported=rng.random() < 0.8)
    world.run(40)
    world.crash_rate = rng.choice((0.0, 0.02, 0.1, 0.3))
    for _ in range(rng.randint(1, 6)):
        _something(world, rng)
        world.run(rng.choice((0.5, 5, 30, 200, 1500)))
    world.crash_rate = 0.0
    if world.host.maintenance is not None:
        world.feed(MaintenanceOff("the end"))
    world.settle()
    world.check_end()
    world.directory.cleanup()
    return world


def _something(world: World, rng: random.Random) -> None:
    number = rng.randrange(len(world.gpus))
    roll = rng.random()
    if roll < 0.68:
        world.strike(number, rng.choice(list(faults().values())))
    elif roll < 0.76:  # the driver: several GPUs at once
        for gpu in rng.sample(sorted(world.gpus), min(len(world.gpus), 2 + rng.randrange(2))):
            world.strike(gpu, faults()["gsp"])
    elif roll < 0.80:
        world.release_fault = not world.release_fault
    elif roll < 0.84:
        world.hung_until = world.now + rng.uniform(5, 300)
    elif roll < 0.88:
        world.feed(MaintenanceOn("upgrade") if world.host.maintenance is None else MaintenanceOff("done"))
    elif roll < 0.93:
        _human(world, number, rng)
    elif roll < 0.97:
        world.reboot()
    elif roll < 0.985:
        if all(gpu.reset_ends is None for gpu in world.gpus.values()):  # else reset.py and requests.py ask systemd
            world.lose_ledger()
    else:
        world.offset -= rng.choice((10, 3600))  # NTP


def _human(world: World, number: int, rng: random.Random) -> None:
    """Takes the responsibility; perhaps stops a reset that hangs before."""
    gpu = world.gpus[number]
    if gpu.reset_ends is not None and rng.random() < 0.5:
        gpu.reset_ends, gpu.reset_result = None, False
        world.run(rng.choice((1, 20)))
    if world.host.gpus[number].state in (*SERVING, State.QUARANTINED) and world.host.resetting != number:
        gpu.resets.clear()
    world.feed(SetHealthy(number, "looked at it"))

"""The state machine of the GPUs of one host: step(state, event, now, policy) -> (state, commands). Pure.

What a GPU goes through is in machine_repair.py, how signals become a decision in machine_triage.py. The service
(service.py) writes the new state to the ledger first and then carries the commands out, so that a crash at any point
repeats commands, which may all be given twice, and forgets none.
"""

from __future__ import annotations

from collections.abc import Iterable

from healthcheck import machine_repair as repair
from healthcheck import machine_triage as triage
from healthcheck.machine_turn import Turn
from healthcheck.machine_types import (
    OUT,
    SERVING,
    Alert,
    Command,
    Drained,
    EngineFailed,
    EngineReady,
    Event,
    FoundHeld,
    GpuState,
    HostState,
    Incident,
    MaintenanceOff,
    MaintenanceOn,
    Needs,
    Rebooted,
    Rechecked,
    Record,
    Reread,
    ResetDone,
    SetHealthy,
    SetShare,
    SignalSeen,
    State,
    Stopped,
    Tick,
    Verified,
    WarmedUp,
)
from healthcheck.policy_types import Policy
from healthcheck.types import Action, Signal

_REPEATED = (State.DRAINING, State.STOPPING, State.WARMUP, State.VERIFY)


def step(host: HostState, event: Event, now: float, policy: Policy) -> tuple[HostState, list[Command]]:
    """The state after `event` at `now` (UTC seconds), and what is to be done, in order. ValueError for a GPU that has
    no slot."""
    turn = Turn(host, now, policy)
    _handle(turn, event)
    return turn.result(), turn.commands


def start(
    host: HostState, now: float, boot_id: str, policy: Policy, found: Iterable[FoundHeld] = ()
) -> tuple[HostState, list[Command]]:
    """What the service begins with: after a crash the commands of the states that the GPUs are in, or Rebooted.
    `found`: the holds of ours that are in force. What the ledger does not explain is not let go."""
    records: list[Command] = []
    for held in found:
        host, commands = step(host, held, now, policy)
        records += [command for command in commands if isinstance(command, Record)]  # all others follow anyway
    if host.boot_id and host.boot_id != boot_id:
        host, commands = step(host, Rebooted(boot_id), now, policy)
        return host, records + commands
    turn = Turn(host, now, policy)
    turn.boot_id = boot_id
    turn.alerts.clear()  # one may have been lost in the crash: rather twice than never
    turn.commands += records + resume(host, now, policy)
    return turn.result(), turn.commands


def resume(host: HostState, now: float, policy: Policy) -> list[Command]:
    """The commands of the states that the GPUs are in, after a crash within one boot; people are told again of what
    waits for them. All levels are read again: what happened meanwhile left no event."""
    turn = Turn(host, now, policy)
    commands: list[Command] = []
    if host.halt is not None:
        commands.append(Alert(None, f"automation is stopped: {host.halt.reason}", "halted"))
    for gpu in turn.gpus.values():
        commands += repair.alerts_of(gpu) + repair.commands_of(turn, gpu)
        if gpu.state is not State.RESETTING:
            commands.append(Reread(gpu.uuid))
    return commands


def _handle(turn: Turn, event: Event) -> None:
    match event:
        case SignalSeen(signal):
            triage.signal(turn, signal)
        case Rechecked(uuid, recovery_action):
            _rechecked(turn, uuid, recovery_action)
        case Tick():
            _tick(turn, event)
        case MaintenanceOn(reason):
            _maintenance_on(turn, reason)
        case MaintenanceOff(reason):
            _maintenance_off(turn, reason)
        case Rebooted(boot_id):
            _rebooted(turn, boot_id)
        case _:
            if event.gpu not in turn.gpus:
                raise ValueError(f"no slot {event.gpu}: bound are {sorted(turn.gpus)}")
            _handle_gpu(turn, event)


def _handle_gpu(
    turn: Turn,
    event: Drained | Stopped | ResetDone | EngineReady | EngineFailed | WarmedUp | Verified | FoundHeld | SetHealthy,
) -> None:
    match event:
        case Drained(gpu):
            repair.drained(turn, gpu)
        case Stopped(gpu):
            repair.stopped(turn, gpu)
        case ResetDone(gpu, ok, detail, needs):
            repair.reset_done(turn, gpu, ok, detail, needs)
        case EngineReady(gpu):
            repair.engine_ready(turn, gpu)
        case WarmedUp(gpu):
            repair.warmed_up(turn, gpu)
        case EngineFailed(gpu, detail):
            _engine_failed(turn, gpu, detail)
        case Verified():
            _verified(turn, event)
        case FoundHeld():
            found_held(turn, event)
        case SetHealthy(gpu, reason):
            _set_healthy(turn, gpu, reason)


# ------------------------------------------------------------------------------------------------------------- answers
def _rechecked(turn: Turn, uuid: str, recovery_action: int | None) -> None:
    state = turn.by_uuid(uuid)
    if state is None or state.incident is None or state.state is not State.SUSPECT:
        return
    turn.amend(state.gpu, rechecked=True, recovery_action=recovery_action)
    if state.stage == "asking":
        triage.triage(turn, state.gpu)


def _verified(turn: Turn, event: Verified) -> None:
    state = turn.gpus[event.gpu]
    if state.state is State.VERIFY:
        if event.ok:
            repair.admit(turn, event.gpu)
        elif event.ok is False:  # None: asked again until the deadline
            _not_verified(turn, event)
        return
    if event.ok is False and event.key is not None:
        triage.signal(turn, Signal(event.key, state.uuid, event.detail, turn.now, "verify"))
    _answered(turn, event.gpu)


def _not_verified(turn: Turn, event: Verified) -> None:
    why = f"verification failed: {event.detail}"
    if event.key is not None and turn.policy.rule(event.key).peers:
        turn.failures.append((turn.now, event.gpu, event.key))
        if others := triage.same_elsewhere(turn, event.gpu, event.key):
            names = ", ".join(map(str, sorted(others)))
            why = f"{why}; {event.key} on GPU {names} too: the release or the driver, no reset"
            return repair.quarantine(turn, event.gpu, Needs.HUMAN, why)
    repair.failed(turn, event.gpu, why)


def _answered(turn: Turn, gpu: int) -> None:
    """A second opinion has come for whoever asked `gpu`."""
    for other in list(turn.gpus.values()):
        if gpu in other.asked:
            turn.update(other.gpu, asked=tuple(peer for peer in other.asked if peer != gpu))
            if turn.gpus[other.gpu].state is State.SUSPECT and turn.gpus[other.gpu].stage == "asking":
                triage.triage(turn, other.gpu)


def _engine_failed(turn: Turn, gpu: int, detail: str) -> None:
    state = turn.gpus[gpu]
    if state.state in (State.WARMUP, State.VERIFY):
        repair.failed(turn, gpu, f"the engine failed: {detail}", last=Needs.HUMAN)
    elif state.state is State.PROBATION:
        signal = Signal("engine:error", state.uuid, detail, turn.now, "launcher")
        triage.signal(turn, signal)
    elif state.state in (State.HEALTHY, State.SUSPECT):
        turn.alert(gpu, "engine:failed", f"GPU {gpu}: its launcher gave the engine up: {detail}")


def found_held(turn: Turn, event: FoundHeld) -> None:
    """A hold that the ledger does not explain: it was lost, or it is one from before. The hold knows more than it does.

    It explains a GPU that it knows to be held, and one that has come back since the hold was placed: there a crash came
    between the ledger and the launcher. `issued` is when this GPU last changed its state, 0 where it never did."""
    state = turn.gpus[event.gpu]
    came_back = event.since is not None and event.since <= state.issued
    if state.held or state.state in OUT or (came_back and state.issued > 0):
        return
    why = f"found held by the watchdog: {event.reason}; the ledger does not know why"
    turn.update(event.gpu, incident=Incident("ledger:incomplete", why, Action.QUARANTINE, turn.now))
    repair.quarantine(turn, event.gpu, Needs.HUMAN, f"{why}; `healthcheck set-healthy {event.gpu}` verifies it")


# ---------------------------------------------------------------------------------------------------------------- time
def _tick(turn: Turn, tick: Tick) -> None:
    turn.admitted = tick.admitted
    for gpu in list(turn.gpus):
        _note_idle(turn, gpu, tick)
        deadline = turn.gpus[gpu].deadline
        if deadline is not None and turn.now >= deadline:
            _deadline(turn, turn.gpus[gpu])
        state = turn.gpus[gpu]
        if state.state is State.SUSPECT and state.stage == "waiting" and turn.halt is None:
            triage.decide(turn, gpu)
        elif state.state is State.HEALTHY and state.owed is not None and _good_time(turn, state):
            repair.take_out(turn, gpu, state.owed)
        elif state.state in _REPEATED and turn.now - state.issued >= turn.policy.timeouts.reissue:
            turn.update(gpu, issued=turn.now)
            turn.commands += repair.commands_of(turn, state)
    repair.next_reset(turn)


def _note_idle(turn: Turn, gpu: int, tick: Tick) -> None:
    idle = tick.in_flight is not None and tick.in_flight.get(gpu) == 0
    before = turn.gpus[gpu].idle_since
    since = (turn.now if before is None else min(before, turn.now)) if idle else None
    if since != before:
        turn.update(gpu, idle_since=since)


def _good_time(turn: Turn, state: GpuState) -> bool:
    """For a repair that can wait: automation works, nobody else is being repaired, others serve; and nobody would
    notice, or it has waited long enough."""
    owed = state.owed
    if owed is None or turn.halt is not None or turn.resetting is not None or not turn.others_serve(state.gpu):
        return False
    repaired = (State.DRAINING, State.STOPPING, State.RESETTING, State.WARMUP, State.VERIFY, State.PROBATION)
    if turn.breaker_open(state.gpu) or any(other.state in repaired for other in turn.gpus.values()):
        return False
    if not turn.serves(state):
        return False  # somebody else has it: an operator
    quiet = state.idle_since is not None and turn.now - state.idle_since >= turn.policy.deferred.quiet
    return owed.action != Action.DEFERRED_RESET or quiet or turn.now - owed.began >= turn.policy.deferred.max_wait


def _deadline(turn: Turn, state: GpuState) -> None:
    gpu, seconds = state.gpu, f"{turn.now - state.since:.0f} s"
    match state.state, state.stage:
        case State.SUSPECT, "asking":
            turn.update(gpu, asked=(), deadline=None)
            triage.triage(turn, gpu)
        case State.DRAINING, _:
            repair.stop(turn, gpu)  # requests in flight are replayed elsewhere
        case State.STOPPING, "stopped":
            why = f"GPU {turn.resetting}'s reset did not end" if turn.resetting is not None else "no turn"
            repair.quarantine(turn, gpu, Needs.REBOOT, f"waited {seconds} for a reset: {why}")
        case State.STOPPING, _:
            repair.quarantine(turn, gpu, Needs.REBOOT, f"the engine is still there after {seconds}")
        case State.RESETTING, _:  # it may still run: turn.resetting stays, nobody else is reset
            turn.end_attempt(gpu, "no result")
            repair.quarantine(turn, gpu, Needs.REBOOT, f"no result of the reset after {seconds}")
        case State.WARMUP, stage:
            what = "the engine is not ready" if stage == "engine" else "the warm-up has not ended"
            repair.failed(turn, gpu, f"{what} after {seconds}", last=Needs.HUMAN)
        case State.VERIFY, _:  # unknown passes nothing, and resets nothing either
            repair.quarantine(turn, gpu, Needs.HUMAN, f"verification inconclusive for {seconds}")
        case State.PROBATION, _:
            turn.move(gpu, State.HEALTHY, "probation passed")
            turn.commands.append(SetShare(gpu, 1.0))


# -------------------------------------------------------------------------------------------------------------- people
def _set_healthy(turn: Turn, gpu: int, reason: str) -> None:
    state = turn.gpus[gpu]
    if state.state not in (*SERVING, State.QUARANTINED) or turn.resetting == gpu:  # requests.py has refused it before
        return turn.alert(gpu, "busy", f"GPU {gpu} is {state.state}: set-healthy changes nothing now")
    turn.halt = None
    if state.state is State.QUARANTINED:
        turn.update(gpu, attempts=(), repaired=turn.now)
        repair.warm_up(turn, gpu, f"set healthy: {reason}")
    elif state.state is State.SUSPECT and state.held:  # it gave wrong answers: not on trust
        turn.update(gpu, attempts=(), repaired=turn.now, owed=None, paused=None)
        repair.warm_up(turn, gpu, f"set healthy: {reason}")
    elif state.state is State.SUSPECT:
        turn.update(gpu, repaired=turn.now, owed=None)
        repair.close(turn, gpu, f"set healthy: {reason}")
    else:
        turn.update(gpu, owed=None, attempts=())


def _maintenance_on(turn: Turn, reason: str) -> None:
    """Hands off: what is held stays held; a reset that runs ends first."""
    turn.maintenance = reason
    for state in list(turn.gpus.values()):
        if state.state is State.MAINTENANCE:
            turn.update(state.gpu, reason=reason)  # a new reason for the same
        if state.state in (State.RESETTING, State.QUARANTINED, State.MAINTENANCE):
            continue
        turn.update(state.gpu, paused=state.state)
        turn.move(state.gpu, State.MAINTENANCE, reason)


def _maintenance_off(turn: Turn, reason: str) -> None:
    turn.maintenance = None
    turn.halt = None
    for state in [gpu for gpu in turn.gpus.values() if gpu.state is State.MAINTENANCE]:
        _go_on(turn, state, f"maintenance is over: {reason}")
        turn.commands.append(Reread(state.uuid))
    repair.next_reset(turn)


def _go_on(turn: Turn, state: GpuState, reason: str) -> None:
    gpu, before = state.gpu, state.paused
    turn.update(gpu, paused=None)
    if before in (State.DRAINING, State.STOPPING):
        repair.stop(turn, gpu)
    elif before in (State.WARMUP, State.VERIFY):
        repair.warm_up(turn, gpu, reason)
    elif before is State.PROBATION:
        turn.move(gpu, State.PROBATION, reason, timeout=turn.policy.timeouts.probation)
    elif before is State.SUSPECT:
        turn.move(gpu, State.SUSPECT, state.incident.cause if state.incident else reason, stage="waiting")
    else:
        turn.move(gpu, State.HEALTHY, reason)
        turn.commands.append(SetShare(gpu, 1.0))


def _rebooted(turn: Turn, boot_id: str) -> None:
    """All GPUs were reset by it. Whatever was in work, or needed just this, is verified."""
    turn.boot_id, turn.resetting, turn.halt = boot_id, None, None
    turn.alerts, turn.failures, turn.admitted = {}, [], None
    in_work = (State.DRAINING, State.STOPPING, State.RESETTING, State.WARMUP, State.VERIFY)
    for state in list(turn.gpus.values()):
        gpu = state.gpu
        turn.update(gpu, repaired=turn.now, owed=None)
        needs_it = state.state is State.QUARANTINED and state.needs is Needs.REBOOT
        if state.state in in_work or needs_it or (state.state is State.SUSPECT and state.held):
            turn.end_attempt(gpu, "rebooted")
            repair.warm_up(turn, gpu, f"rebooted; was {state.reason}")
        else:
            if state.state is State.SUSPECT:
                repair.close(turn, gpu, "rebooted")
            elif state.state is State.MAINTENANCE and state.paused in (*in_work, State.SUSPECT):
                turn.update(gpu, paused=State.WARMUP if state.held else State.HEALTHY)
            turn.commands += repair.alerts_of(turn.gpus[gpu]) + repair.commands_of(turn, turn.gpus[gpu])
        turn.commands.append(Reread(state.uuid))

"""The ladder of one GPU: taken out, stopped, reset, warmed up, verified, on probation; or quarantined. Pure."""

from __future__ import annotations

from typing import Literal

from healthcheck.machine_turn import RESETS, Turn
from healthcheck.machine_types import (
    Alert,
    Attempt,
    Command,
    GpuState,
    Hold,
    Incident,
    Needs,
    Reread,
    ResetGpu,
    RestartEngine,
    SetShare,
    State,
    Unhold,
    Verify,
    Warmup,
    WatchReset,
)
from healthcheck.types import Action


# -------------------------------------------------------------------------------------------------------- taking it out
def take_out(turn: Turn, gpu: int, incident: Incident) -> None:
    """Begins what `incident` asks for, or says why not yet. `gpu` serves, or is held in SUSPECT."""
    turn.update(gpu, incident=incident)
    if incident.action == Action.RESTART_ENGINE and turn.restarts_used_up(gpu):
        detail = f"{turn.policy.attempts.restarts} restarts did not cure it; {incident.detail}"
        incident = turn.amend(gpu, action=Action.ABORT_RESET, detail=detail)
    if turn.halt is not None:
        return _wait(turn, gpu, "halted", f"automation is stopped: {turn.halt.reason}", Needs.HUMAN)
    if incident.deferrable and not turn.others_serve(gpu):
        return owe(turn, gpu, incident, "no other GPU serves")
    if blocked := turn.breaker_open(gpu):
        return _wait(turn, gpu, "breaker", blocked, None)
    if incident.action in RESETS and (used_up := turn.resets_used_up(gpu, incident)):
        detail = f"{used_up} did not cure it; {incident.detail}"
        incident = turn.amend(gpu, action=Action.QUARANTINE, detail=detail)
    turn.update(gpu, held=True, owed=None, paused=None)
    if incident.action == Action.RESTART_ENGINE:
        _restart(turn, gpu, incident)
    elif incident.action == Action.ABORT_RESET or (not incident.deferrable and incident.action == Action.QUARANTINE):
        stop(turn, gpu)
    else:
        turn.move(gpu, State.DRAINING, text(incident), timeout=turn.policy.timeouts.drain)
        turn.commands.append(hold(turn.gpus[gpu]))


def _wait(turn: Turn, gpu: int, key: str, why: str, needs: Needs | None) -> None:
    """In SUSPECT until it may be taken out; somebody is told."""
    state, incident = turn.gpus[gpu], turn.incident(gpu)
    if state.state is not State.SUSPECT:
        turn.update(gpu, paused=state.state)
        turn.move(gpu, State.SUSPECT, text(incident))
    turn.update(gpu, stage="waiting", deadline=None, needs=needs, reason=f"{text(incident)}; not taken out: {why}")
    turn.alert(gpu, key, f"GPU {gpu}: {text(incident)}; not taken out: {why}")


def owe(turn: Turn, gpu: int, incident: Incident, why: str) -> None:
    """It can wait: the GPU serves on, and Tick looks for a good time."""
    was = turn.gpus[gpu].owed
    if was is None or was.action < incident.action:
        turn.update(gpu, owed=incident)
        turn.alert(gpu, "owed", f"GPU {gpu} stays in service for now ({why}); {text(incident)}")
    close(turn, gpu, f"serves on, a repair is owed: {incident.cause}")


def close(turn: Turn, gpu: int, reason: str) -> None:
    """Ends an incident that needs no repair: back to what was before."""
    state = turn.gpus[gpu]
    if state.held:
        turn.update(gpu, held=False)
        turn.commands.append(Unhold(gpu))
    if state.state is not State.SUSPECT:
        turn.update(gpu, incident=None if state.state is State.HEALTHY else state.incident)
    elif state.paused is State.PROBATION:
        turn.update(gpu, paused=None)
        turn.move(gpu, State.PROBATION, reason, timeout=turn.policy.timeouts.probation)
    else:
        turn.update(gpu, paused=None)
        turn.move(gpu, State.HEALTHY, reason)
        turn.commands.append(SetShare(gpu, 1.0))  # it may have come here from probation, by way of a maintenance


def call_back(turn: Turn, gpu: int, reason: str) -> None:
    """Undoes a drain or stop that has not come to a reset. One that gave wrong answers stays held."""
    incident = turn.incident(gpu)
    turn.move(gpu, State.SUSPECT, f"{text(incident)}; {reason}", stage="waiting", needs=Needs.HUMAN)
    if turn.policy.rule(incident.cause).peers:
        turn.commands.append(hold(turn.gpus[gpu]))
    else:
        turn.update(gpu, held=False)
        turn.commands.append(Unhold(gpu))


# ----------------------------------------------------------------------------------------------------------- the ladder
def _restart(turn: Turn, gpu: int, incident: Incident) -> None:
    turn.amend(gpu, requested=turn.now)
    turn.count_attempt(gpu, Attempt(turn.now, "restart", incident.cause))
    turn.move(gpu, State.WARMUP, text(incident), stage="engine", timeout=turn.policy.timeouts.start)
    turn.commands += commands_of(turn, turn.gpus[gpu])


def stop(turn: Turn, gpu: int) -> None:
    """No engine on this GPU; requests in flight are replayed elsewhere at once."""
    turn.update(gpu, held=True)
    turn.move(gpu, State.STOPPING, text(turn.incident(gpu)), timeout=turn.policy.timeouts.stop)
    turn.commands.append(hold(turn.gpus[gpu]))


def drained(turn: Turn, gpu: int) -> None:
    if turn.gpus[gpu].state is State.DRAINING:
        stop(turn, gpu)


def stopped(turn: Turn, gpu: int) -> None:
    state = turn.gpus[gpu]
    if state.state is not State.STOPPING or state.stage == "stopped":
        return
    incident = turn.incident(gpu)
    if incident.action == Action.QUARANTINE:
        return quarantine(turn, gpu, incident.needs, text(incident))
    turn.update(gpu, stage="stopped", deadline=turn.now + turn.policy.timeouts.turn)
    next_reset(turn)


def next_reset(turn: Turn) -> None:
    """Gives the turn to the GPU that waits longest: one reset at a time per host."""
    waiting = [g for g in turn.gpus.values() if g.state is State.STOPPING and g.stage == "stopped"]
    for state in sorted(waiting, key=lambda gpu: (gpu.since, gpu.gpu)):
        incident = turn.incident(state.gpu)
        if turn.resetting is None and turn.halt is None and turn.now >= incident.not_before:
            _reset(turn, state.gpu, incident)


def _reset(turn: Turn, gpu: int, incident: Incident) -> None:
    turn.resetting = gpu
    turn.amend(gpu, requested=turn.now, resets=incident.resets + 1)
    turn.count_attempt(gpu, Attempt(turn.now, "reset", incident.cause))
    turn.move(gpu, State.RESETTING, text(incident), timeout=turn.policy.timeouts.reset)
    turn.commands += commands_of(turn, turn.gpus[gpu])


def reset_done(turn: Turn, gpu: int, ok: bool, detail: str, needs: Needs | None) -> None:
    if turn.resetting == gpu:
        turn.resetting = None
    state, incident = turn.gpus[gpu], turn.gpus[gpu].incident
    if state.state is State.RESETTING and incident is not None:
        if not ok:
            failed(turn, gpu, f"reset failed: {detail}", needs, last=Needs.REBOOT)
        elif incident.action == Action.QUARANTINE:  # a stronger signal came meanwhile
            turn.end_attempt(gpu, "ok")
            quarantine(turn, gpu, incident.needs, text(incident))
        else:
            turn.update(gpu, repaired=turn.now, owed=None)
            turn.amend(gpu, then=Action.NONE)  # what a restart would have left to do is done
            warm_up(turn, gpu, f"reset done; {text(incident)}")
    next_reset(turn)


def warm_up(turn: Turn, gpu: int, reason: str) -> None:
    """The engine starts, not admitted."""
    if turn.maintenance is not None:
        turn.update(gpu, paused=State.WARMUP)
        return turn.move(gpu, State.MAINTENANCE, turn.maintenance)
    turn.update(gpu, held=True)
    turn.move(gpu, State.WARMUP, reason, stage="engine", timeout=turn.policy.timeouts.start)
    turn.commands.append(hold(turn.gpus[gpu]))


def engine_ready(turn: Turn, gpu: int) -> None:
    state = turn.gpus[gpu]
    if state.state is State.WARMUP and state.stage == "engine":
        deadline = turn.now + turn.policy.timeouts.warmup
        turn.update(gpu, stage="warming", deadline=deadline, issued=turn.now)
        if turn.incident(gpu).action == Action.RESTART_ENGINE:
            turn.update(gpu, repaired=turn.now)
        turn.commands.append(Warmup(gpu))


def warmed_up(turn: Turn, gpu: int) -> None:
    state = turn.gpus[gpu]
    if state.state is State.WARMUP and state.stage == "warming":
        turn.move(gpu, State.VERIFY, state.reason, timeout=turn.policy.timeouts.verify)
        turn.commands.append(Verify(gpu))


def admit(turn: Turn, gpu: int) -> None:
    """Verified: back in service at a reduced share. The levels are read again: what came meanwhile is not lost."""
    incident = turn.incident(gpu)
    turn.end_attempt(gpu, "ok")
    if incident.then == Action.DEFERRED_RESET and turn.gpus[gpu].owed is None:
        rule = turn.policy.rule(incident.cause)
        owed = Incident(incident.cause, incident.detail, incident.then, turn.now, rule.needs, deferrable=True)
        turn.update(gpu, owed=owed)
    turn.update(gpu, held=False)
    turn.move(gpu, State.PROBATION, f"verified; was {text(incident)}", timeout=turn.policy.timeouts.probation)
    turn.commands += [*commands_of(turn, turn.gpus[gpu]), Reread(turn.gpus[gpu].uuid)]


def failed(turn: Turn, gpu: int, why: str, needs: Needs | None = None, *, last: Needs | None = None) -> None:
    """This attempt did not cure it: the next one, or quarantine. `needs`: trying again makes no sense; `last`: who is
    asked for when no attempt is left, instead of the one that the rule names."""
    turn.end_attempt(gpu, why)
    incident = turn.incident(gpu)
    restart_failed = incident.action == Action.RESTART_ENGINE
    if restart_failed:
        incident = turn.amend(gpu, action=Action.ABORT_RESET)
    used_up = turn.resets_used_up(gpu, incident)
    if needs is not None or incident.action not in RESETS or used_up or turn.halt is not None:
        tail = f" ({used_up})" if used_up else ""
        return quarantine(turn, gpu, needs or last or incident.needs, f"{why}{tail}; {text(incident)}")
    delay = 0.0 if restart_failed else turn.policy.attempts.retry_delay
    turn.amend(gpu, detail=why, not_before=turn.now + delay)
    if turn.maintenance is not None:
        turn.update(gpu, paused=State.STOPPING)
        return turn.move(gpu, State.MAINTENANCE, turn.maintenance)
    stop(turn, gpu)


def quarantine(turn: Turn, gpu: int, needs: Needs, why: str) -> None:
    """Terminal without a human, a new board or a reboot."""
    turn.update(gpu, held=True, owed=None, paused=None)
    turn.move(gpu, State.QUARANTINED, why, needs=needs)
    turn.commands += commands_of(turn, turn.gpus[gpu])
    turn.commands += alerts_of(turn.gpus[gpu])  # never taken for a duplicate


# --------------------------------------------------------------------------------------------- what a state is about
def alerts_of(state: GpuState) -> list[Command]:
    """What people have to know of a GPU that waits for them, or for a better time."""
    gpu = state.gpu
    if state.state is State.QUARANTINED:
        return [
            Alert(gpu, f"GPU {gpu} ({state.uuid}) is quarantined, needs {state.needs}: {state.reason}", "quarantined")
        ]
    if state.state is State.SUSPECT and state.stage == "waiting":
        return [Alert(gpu, f"GPU {gpu}: {state.reason}", "waiting")]
    if state.owed is not None:
        return [Alert(gpu, f"GPU {gpu} serves on, a repair is owed: {text(state.owed)}", "owed")]
    return []


def text(incident: Incident) -> str:
    return f"{incident.cause}: {incident.detail}" if incident.detail else incident.cause


def hold(state: GpuState) -> Hold:
    """The hold of a state in which the GPU is held."""
    restart = state.incident is not None and state.incident.action == Action.RESTART_ENGINE
    gentle = state.state is State.WARMUP or (state.state is State.DRAINING and state.stage == "")
    without_engine = state.state in (State.STOPPING, State.RESETTING, State.QUARANTINED)
    mode: Literal["graceful", "abort"] = "graceful" if gentle and not restart else "abort"
    return Hold(state.gpu, "stop" if without_engine else "drain", mode, state.reason)


def commands_of(turn: Turn, state: GpuState) -> list[Command]:
    """What the state is about: given after a crash, and again where no answer came. All of it may be given twice."""
    gpu, incident = state.gpu, state.incident
    share = turn.policy.probation.share
    match state.state:
        case State.HEALTHY:
            return [Unhold(gpu), SetShare(gpu, 1.0)]
        case State.PROBATION:
            return [SetShare(gpu, share), Unhold(gpu)]
        case State.SUSPECT:
            return _commands_of_suspect(state, share)
        case State.MAINTENANCE:
            return []
        case State.DRAINING | State.STOPPING:
            return [hold(state)]
        case State.QUARANTINED if turn.resetting == gpu:  # its reset has had its time, and may still run
            return [hold(state), WatchReset(gpu, state.uuid, turn.incident(gpu).requested or state.since)]
        case State.QUARANTINED:
            return [hold(state)]
        case State.VERIFY:
            return [hold(state), Verify(gpu)]
        case State.RESETTING:
            resets = [a for a in state.attempts if a.kind == "reset" and turn.now - a.at < turn.policy.attempts.window]
            requested = turn.incident(gpu).requested or state.since
            return [hold(state), ResetGpu(gpu, state.uuid, max(1, len(resets)), requested)]
        case State.WARMUP:
            if state.stage == "warming":
                return [hold(state), Warmup(gpu)]
            if incident is not None and incident.action == Action.RESTART_ENGINE:
                return [hold(state), RestartEngine(gpu, state.reason, incident.requested or state.since)]
            return [hold(state)]


def _commands_of_suspect(state: GpuState, share: float) -> list[Command]:
    share = share if state.paused is State.PROBATION else 1.0
    first: list[Command] = [hold(state)] if state.held else [Unhold(state.gpu), SetShare(state.gpu, share)]
    incident = state.incident
    if state.stage == "asking" and incident is not None and incident.reread is not None and not incident.rechecked:
        first.append(Reread(state.uuid))
    return first + [Verify(peer) for peer in state.asked]

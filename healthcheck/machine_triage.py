"""From signals to a decision: duplicates, mutes, what has to be asked first, causes that several GPUs share. Pure."""

from __future__ import annotations

from dataclasses import replace

from healthcheck import machine_repair as repair
from healthcheck.machine_turn import Turn
from healthcheck.machine_types import (
    OUT,
    GpuState,
    Incident,
    Reread,
    Seen,
    State,
    Verify,
)
from healthcheck.policy_types import Decision, Rule
from healthcheck.types import Action, Signal

_MAX_SEEN = 32  # kinds of signals of one incident


def signal(turn: Turn, seen: Signal) -> None:
    rule = turn.policy.rule(seen.key)
    state = turn.by_uuid(seen.uuid)
    if state is None:
        if turn.maintenance is None and rule.action >= Action.ALERT:
            turn.alert(None, f"{seen.key} {seen.uuid or ''}".strip(), f"{rule.title}: {seen.detail}")
        return
    if state.state is State.MAINTENANCE or _muted(turn, state, rule, seen):
        return
    if state.state in OUT:
        return _during_repair(turn, state, rule, seen)
    if rule.action <= Action.ALERT and not rule.recheck and state.state is not State.SUSPECT:
        if rule.action == Action.ALERT:
            turn.alert(state.gpu, seen.key, f"GPU {state.gpu}: {rule.title}: {seen.detail}")
        return
    owed = state.owed is not None and rule.deferrable and rule.action <= state.owed.action
    if owed and not turn.policy.waits(seen.key):
        return  # the same level, read again
    if (rule.shared or rule.peers) and max(rule.action, rule.fallback or Action.NONE) >= Action.RESTART_ENGINE:
        turn.failures.append((turn.now, state.gpu, seen.key))
    new = _note(turn, state.gpu, seen)
    if new and state.state is State.SUSPECT and state.stage == "waiting":  # else the decision tells
        turn.alert(state.gpu, seen.key, f"GPU {state.gpu}, which waits for a human or its turn: {rule.title}")
    triage(turn, state.gpu)


def _muted(turn: Turn, state: GpuState, rule: Rule, seen: Signal) -> bool:
    """What our own stop or reset brings about, and what is older than the last repair."""
    if seen.at <= state.repaired:
        return True
    if state.state is State.RESETTING and rule.muted:
        return True
    if rule.muted == "reset":
        return seen.at <= state.repaired + turn.policy.timeouts.mute_after_reset
    starting = state.state is State.WARMUP and state.stage == "engine"
    return rule.muted == "stop" and (state.state in (State.DRAINING, State.STOPPING) or starting)


def _note(turn: Turn, gpu: int, seen: Signal) -> bool:
    """Keeps it with the incident, which it opens if there is none; False for a duplicate."""
    state = turn.gpus[gpu]
    if state.state in (State.HEALTHY, State.PROBATION):
        turn.update(gpu, incident=Incident(seen.key, seen.detail[:500], Action.NONE, turn.now))
    incident = turn.incident(gpu)
    known = {item.key: item for item in incident.seen}
    item = known.get(seen.key)
    duplicate = item is not None and turn.now - item.at <= turn.policy.deciding.duplicate_window
    if item is not None:
        known[seen.key] = replace(item, at=max(item.at, seen.at), count=item.count + 1)
    elif len(known) < _MAX_SEEN:
        known[seen.key] = Seen(seen.key, seen.at, turn.now, seen.detail[:500])
    turn.amend(gpu, seen=tuple(known.values()))
    return not duplicate


# ------------------------------------------------------------------------------------------------------ what to do
def triage(turn: Turn, gpu: int) -> None:
    """Asks what has to be asked; decides as soon as nothing more can change the answer."""
    _ask(turn, gpu)
    until = _until(turn, gpu)
    if until is None or until <= turn.now:
        return decide(turn, gpu)
    state, incident = turn.gpus[gpu], turn.incident(gpu)
    if state.state is not State.SUSPECT:
        asked = state.asked
        turn.update(gpu, paused=state.state)
        turn.move(gpu, State.SUSPECT, repair.text(incident))
        turn.update(gpu, asked=asked)
    turn.update(gpu, stage="asking", deadline=until)


def _ask(turn: Turn, gpu: int) -> None:
    state, incident = turn.gpus[gpu], turn.incident(gpu)
    rules = {item.key: turn.policy.rule(item.key) for item in incident.seen}
    # After an event the levels may be stronger; a level was read together with all others just now.
    worth = any(rule.action >= Action.RESTART_ENGINE and key.startswith("xid:") for key, rule in rules.items())
    if incident.reread is None and (worth or any(rule.recheck for rule in rules.values())):
        incident = turn.amend(gpu, reread=turn.now)
        turn.commands.append(Reread(state.uuid))
    doubtful = [key for key, rule in rules.items() if rule.peers]
    if incident.peers is None and doubtful and not any(same_elsewhere(turn, gpu, key) for key in doubtful):
        turn.amend(gpu, peers=turn.now)
        others = tuple(other.gpu for other in turn.gpus.values() if other.gpu != gpu and turn.serves(other))
        turn.update(gpu, asked=others, held=True)
        turn.commands.append(repair.hold(replace(state, state=State.SUSPECT, reason=repair.text(incident))))
        turn.commands += [Verify(other) for other in others]


def _until(turn: Turn, gpu: int) -> float | None:
    """When to decide at the latest; None: now."""
    state, incident, limits = turn.gpus[gpu], turn.incident(gpu), turn.policy.deciding
    keys = {item.key for item in incident.seen}
    waits = []
    if incident.reread is not None and not incident.rechecked and any(turn.policy.rule(k).recheck for k in keys):
        waits.append(incident.reread + limits.recheck_timeout)
    if state.asked and incident.peers is not None:
        waits.append(incident.peers + limits.peers_timeout)
    for item in incident.seen:
        if turn.policy.waits(item.key) and not any(item.key in p.keys and p.keys <= keys for p in turn.policy.together):
            waits.append(item.first + limits.partner_wait)
    waits = [until for until in waits if until > turn.now]
    if not waits or any(_settled(turn, item.key) for item in incident.seen):
        return None
    return max(waits)


def _settled(turn: Turn, key: str) -> bool:
    """Nothing that may still be answered would make this one weaker."""
    rule = turn.policy.rule(key)
    strong = rule.action == Action.ABORT_RESET or (rule.action == Action.QUARANTINE and not rule.deferrable)
    return strong and not (rule.recheck or rule.peers or turn.policy.waits(key))


def decide(turn: Turn, gpu: int) -> None:
    """Acts on all that was seen of `gpu` so far."""
    incident = turn.incident(gpu)
    uuid = turn.gpus[gpu].uuid
    signals = [Signal(item.key, uuid, item.detail, item.at, "") for item in incident.seen]
    if not signals:
        return repair.close(turn, gpu, "nothing was seen")
    decision = turn.policy.decide(
        signals, recovery_action=incident.recovery_action, rechecked=incident.reread is not None
    )
    if _common(turn, gpu, decision):
        return
    _act(turn, gpu, decision)


def _act(turn: Turn, gpu: int, decision: Decision) -> None:
    rule = decision.rule
    incident = turn.amend(
        gpu,
        cause=decision.cause,
        detail=decision.detail,
        action=decision.action,
        needs=rule.needs,
        then=decision.then,
        max_resets=rule.max_resets,
        # "ecc:uncorrected" and its like: the fallback is no reason to spare a GPU that may compute wrongly
        deferrable=rule.deferrable and decision.action not in (Action.RESTART_ENGINE, Action.ABORT_RESET),
    )
    if decision.action == Action.DEFERRED_RESET:
        repair.owe(turn, gpu, replace(incident, deferrable=True), "until a quiet time")
    elif decision.action >= Action.RESTART_ENGINE:
        repair.take_out(turn, gpu, incident)
    else:
        if decision.action == Action.ALERT:
            turn.alert(gpu, decision.cause, f"GPU {gpu}: {rule.title}: {decision.detail}")
        repair.close(turn, gpu, f"no action: {decision.cause}")


# -------------------------------------------------------------------------------------------------- shared causes
def _common(turn: Turn, gpu: int, decision: Decision) -> bool:
    """True where the cause is not this GPU: nothing is reset, somebody is told."""
    if decision.rule.peers:
        return _same_mismatch(turn, gpu, decision)
    if not decision.rule.shared or decision.action < Action.RESTART_ENGINE:
        return False
    hard = decision.action >= Action.DEFERRED_RESET
    window, count = turn.policy.deciding.common_window, turn.policy.deciding.common_gpus
    failing = {
        other
        for at, other, key in turn.failures
        if turn.now - at <= window and (turn.policy.rule(key).action >= Action.DEFERRED_RESET) == hard
        if not turn.policy.rule(key).peers
    } | {gpu}
    if len(failing) < count:
        return False
    names = ", ".join(map(str, sorted(failing)))
    if not hard:
        turn.alert(
            None, decision.cause, f"engines of GPUs {names} failed within {window:g} s: a request or the release"
        )
        repair.close(turn, gpu, f"not of this GPU: engines of GPUs {names} failed together")
        return True
    turn.stop_automation(f"GPUs {names} failed within {window:g} s ({decision.cause}): driver, fabric or power")
    for other in turn.gpus.values():
        if other.state in (State.DRAINING, State.STOPPING):
            repair.call_back(turn, other.gpu, "called back: automation stopped")
    return False  # _act finds automation stopped, and waits


def same_elsewhere(turn: Turn, gpu: int, key: str) -> set[int]:
    """The other GPUs that showed the same mismatch."""
    window = turn.policy.deciding.peers_window
    return {other for at, other, seen in turn.failures if seen == key and turn.now - at <= window} - {gpu}


def _same_mismatch(turn: Turn, gpu: int, decision: Decision) -> bool:
    same = same_elsewhere(turn, gpu, decision.cause) | {gpu}
    if len(same) < 2:
        return False
    names = ", ".join(map(str, sorted(same)))
    turn.alert(None, decision.cause, f"{decision.cause} on GPUs {names}: the release or the driver, nothing is reset")
    reason = f"not of this GPU: {decision.cause} on GPUs {names}"
    for other in sorted(same - {gpu}):
        state = turn.gpus.get(other)
        if state is None or state.incident is None or state.incident.cause != decision.cause:
            continue
        if state.state in (State.DRAINING, State.STOPPING):
            turn.move(other, State.SUSPECT, reason)
        if turn.gpus[other].state is State.SUSPECT:
            repair.close(turn, other, reason)
    rest = tuple(item for item in turn.incident(gpu).seen if item.key != decision.cause)
    turn.amend(gpu, seen=rest)
    if rest:
        decide(turn, gpu)  # what else it showed is its own
    else:
        repair.close(turn, gpu, reason)
    return True


# ------------------------------------------------------------------------------------------------ while it is repaired
def _during_repair(turn: Turn, state: GpuState, rule: Rule, seen: Signal) -> None:
    gpu, incident = state.gpu, turn.incident(state.gpu)
    new = _note(turn, gpu, seen)
    if state.state is State.QUARANTINED:
        return
    if state.state in (State.WARMUP, State.VERIFY) and incident.action != Action.RESTART_ENGINE:
        strongest = max(rule.action, rule.fallback or Action.NONE)
        loading = state.state is State.WARMUP and state.stage == "engine" and strongest == Action.RESTART_ENGINE
        if rule.peers:
            return  # Verify tells
        if strongest >= Action.RESTART_ENGINE and strongest != Action.DEFERRED_RESET and not loading:
            if rule.action == Action.QUARANTINE and not rule.deferrable:
                return repair.quarantine(turn, gpu, rule.needs, f"{seen.key} after the reset: {seen.detail}")
            repair.failed(turn, gpu, f"{seen.key} after the reset: {seen.detail}")
        return
    if rule.action == Action.DEFERRED_RESET and incident.action == Action.RESTART_ENGINE:
        turn.amend(gpu, then=Action.DEFERRED_RESET)
    if rule.recheck and new:
        turn.commands.append(Reread(state.uuid))
    stronger = rule.action > incident.action and rule.action >= Action.DRAIN_RESET
    if stronger and not (rule.recheck or rule.peers):  # what has to be asked first is asked again by Verify
        _upgrade(turn, gpu, rule, seen)


def _upgrade(turn: Turn, gpu: int, rule: Rule, seen: Signal) -> None:
    """A stronger signal while the GPU is on its way out, or while only its engine is restarted."""
    state = turn.gpus[gpu].state
    incident = turn.amend(
        gpu,
        action=rule.action,
        cause=seen.key,
        detail=seen.detail[:500],
        needs=rule.needs,
        max_resets=rule.max_resets,
        deferrable=False,
    )
    if state is State.RESETTING or (state is State.STOPPING and incident.action != Action.QUARANTINE):
        return  # after the reset, or on the way already
    if incident.action == Action.QUARANTINE:
        if state is State.STOPPING and turn.gpus[gpu].stage == "":
            return  # it has to be stopped first
        return repair.quarantine(turn, gpu, incident.needs, repair.text(incident))
    if used_up := turn.resets_used_up(gpu, incident):
        return repair.quarantine(turn, gpu, incident.needs, f"{used_up}; {repair.text(incident)}")
    repair.stop(turn, gpu)

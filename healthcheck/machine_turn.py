"""One step of the state machine in progress: the state as it changes, the commands so far, and the rules that every
transition asks (breaker, caps, who serves). No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from healthcheck.machine_types import (
    OUT,
    SERVING,
    Alert,
    Attempt,
    Command,
    GpuState,
    Halt,
    HostState,
    Incident,
    Needs,
    Record,
    State,
)
from healthcheck.policy_types import Policy
from healthcheck.types import Action

WEEK = 7 * 86400.0
RESETS = (Action.DEFERRED_RESET, Action.DRAIN_RESET, Action.ABORT_RESET)
_MAX_PHASES = 64  # of one incident; it is kept in the ledger
_MAX_REASON = 500  # characters


class Turn:
    def __init__(self, host: HostState, now: float, policy: Policy) -> None:
        self.now = now
        self.policy = policy
        self.commands: list[Command] = []
        self.gpus = {number: _rebased(gpu, now) for number, gpu in host.gpus.items()}
        self._host = host
        self.halt = host.halt
        self.maintenance = host.maintenance
        self.resetting = host.resetting
        self.admitted = host.admitted
        self.boot_id = host.boot_id
        self.alerts = dict(host.alerts)
        self.failures = [(min(at, now), gpu, key) for at, gpu, key in host.failures]

    def result(self) -> HostState:
        keep = max(self.policy.deciding.peers_window, self.policy.deciding.common_window)
        window = self.policy.deciding.duplicate_window
        return replace(
            self._host,
            gpus=self.gpus,
            boot_id=self.boot_id,
            maintenance=self.maintenance,
            halt=self.halt,
            resetting=self.resetting,
            admitted=self.admitted,
            alerts={key: at for key, at in self.alerts.items() if self.now - window <= at <= self.now},
            failures=tuple(failure for failure in self.failures if self.now - failure[0] <= keep),
        )

    # -- changes
    def update(self, gpu: int, **changes: Any) -> GpuState:
        self.gpus[gpu] = replace(self.gpus[gpu], **changes)
        return self.gpus[gpu]

    def amend(self, gpu: int, **changes: Any) -> Incident:
        """Changes the incident of `gpu`."""
        incident = replace(self.incident(gpu), **changes)
        self.update(gpu, incident=incident)
        return incident

    def incident(self, gpu: int) -> Incident:
        incident = self.gpus[gpu].incident
        if incident is None:  # a state of repair without its reason: a bug here or a ledger that somebody edited
            incident = Incident("ledger:incomplete", "the ledger does not say why", Action.QUARANTINE, self.now)
            self.update(gpu, incident=incident)
        return incident

    def move(
        self,
        gpu: int,
        state: State,
        reason: str,
        *,
        stage: str = "",
        timeout: float | None = None,
        needs: Needs | None = None,
    ) -> None:
        """A transition: recorded, with the time that the state took, where the ledger knows since when it was (a slot
        that was bound, and that nothing happened to so far, has no `since`). The caller commands what it needs."""
        before, reason = self.gpus[gpu], reason[:_MAX_REASON]
        seconds = round(max(0.0, self.now - before.since), 3) if before.since > 0 else None
        incident = before.incident
        if incident is not None and before.state is not State.HEALTHY and seconds is not None:
            incident = replace(incident, phases=(*incident.phases, (before.state.value, seconds))[-_MAX_PHASES:])
        phases = incident.phases if incident else ()
        self.update(
            gpu,
            state=state,
            reason=reason,
            since=self.now,
            needs=needs,
            stage=stage,
            deadline=None if timeout is None else self.now + timeout,
            issued=self.now,
            asked=(),
            incident=None if state is State.HEALTHY else incident,
            idle_since=None,
        )
        cause = incident.cause if incident else None
        self.commands.append(Record(gpu, before.uuid, before.state, state, reason, cause, needs, seconds, phases))

    def alert(self, gpu: int | None, key: str, text: str) -> None:
        """Once; what is wanted again within the window of duplicates is the same alert."""
        name = f"{'host' if gpu is None else gpu} {key}"
        last = self.alerts.get(name)
        self.alerts[name] = self.now
        if last is None or self.now - last > self.policy.deciding.duplicate_window:
            self.commands.append(Alert(gpu, text, key))

    def stop_automation(self, reason: str) -> None:
        if self.halt is None:
            self.halt = Halt(reason, self.now)
            text = f"automation stopped: {reason}. A human looks, then `healthcheck set-healthy`"
            self.commands.append(Alert(None, text, "halted"))  # never taken for a duplicate

    # -- questions
    def by_uuid(self, uuid: str | None) -> GpuState | None:
        return next((gpu for gpu in self.gpus.values() if gpu.uuid == uuid), None)

    def serves(self, gpu: GpuState) -> bool:
        """As far as is known: it is not if nobody said that its engine takes requests."""
        return gpu.state in SERVING and not gpu.held and self.admitted is not None and gpu.gpu in self.admitted

    def others_serve(self, gpu: int) -> bool:
        return any(self.serves(other) for other in self.gpus.values() if other.gpu != gpu)

    def breaker_open(self, gpu: int) -> str | None:
        """Why `gpu` may not be taken out now. One that serves nobody anyway takes no capacity away."""
        this = self.gpus[gpu]
        if this.state in OUT:
            return None
        if not this.held and self.admitted is not None and gpu not in self.admitted:
            return None
        out = [other.gpu for other in self.gpus.values() if other.gpu != gpu and other.state in OUT]
        limit = self.policy.breaker.limit(len(self.gpus))
        if len(out) + 1 <= limit:
            return None
        return f"GPU {', '.join(map(str, sorted(out))) or '(none)'} out of {limit} that may be out: the breaker is open"

    def resets_used_up(self, gpu: int, incident: Incident) -> str | None:
        """Why `gpu` may not be reset once more; None if it may."""
        policy = self.policy.attempts
        resets = [attempt for attempt in self.gpus[gpu].attempts if attempt.kind == "reset"]
        recent = [attempt for attempt in resets if self.now - attempt.at < policy.window]
        hours = f"{policy.window / 3600:g} h"
        if len(recent) >= policy.resets:
            return f"{len(recent)} resets in {hours}"
        same = sum(attempt.cause == incident.cause for attempt in recent)
        if incident.max_resets is not None and same >= incident.max_resets:
            return f"{same} resets for {incident.cause} in {hours}"
        week = sum(self.now - attempt.at < WEEK for attempt in resets)
        return f"{week} resets in 7 days" if week >= policy.resets_per_week else None

    def restarts_used_up(self, gpu: int) -> bool:
        policy = self.policy.attempts
        restarts = [a for a in self.gpus[gpu].attempts if a.kind == "restart" and self.now - a.at < policy.window]
        return len(restarts) >= policy.restarts

    # -- attempts
    def count_attempt(self, gpu: int, attempt: Attempt) -> int:
        """Adds one; returns its number among its kind in the window."""
        horizon = self.now - max(WEEK, self.policy.attempts.window)
        kept = tuple(old for old in self.gpus[gpu].attempts if old.at > horizon)
        self.update(gpu, attempts=(*kept, attempt))
        window = self.policy.attempts.window
        return sum(a.kind == attempt.kind and self.now - a.at < window for a in self.gpus[gpu].attempts)

    def end_attempt(self, gpu: int, result: str) -> None:
        attempts = self.gpus[gpu].attempts
        if attempts and not attempts[-1].result:
            self.update(gpu, attempts=(*attempts[:-1], replace(attempts[-1], result=result)))


def _rebased(gpu: GpuState, now: float) -> GpuState:
    """After the clock was set back nothing lies in the future, so that nothing waits for that to come."""
    shift = max(0.0, gpu.since - now)
    if shift == 0.0 and gpu.repaired <= now and all(attempt.at <= now for attempt in gpu.attempts):
        return gpu
    return replace(
        gpu,
        since=gpu.since - shift,
        deadline=None if gpu.deadline is None else gpu.deadline - shift,
        issued=min(gpu.issued, now),
        repaired=min(gpu.repaired, now),
        attempts=tuple(replace(attempt, at=min(attempt.at, now)) for attempt in gpu.attempts),
        incident=_past(gpu.incident, now),
        owed=_past(gpu.owed, now),
    )


def _past(incident: Incident | None, now: float) -> Incident | None:
    if incident is None:
        return None
    seen = tuple(replace(item, at=min(item.at, now), first=min(item.first, now)) for item in incident.seen)
    reread = None if incident.reread is None else min(incident.reread, now)
    peers = None if incident.peers is None else min(incident.peers, now)
    return replace(
        incident,
        began=min(incident.began, now),
        not_before=min(incident.not_before, now),
        reread=reread,
        peers=peers,
        seen=seen,
    )

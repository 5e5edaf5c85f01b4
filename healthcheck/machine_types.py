"""What goes into the state machine (events), what comes out (commands) and what it keeps (HostState, in the ledger).

Times are UTC seconds, durations seconds. `gpu` is the slot number, `uuid` the GPU bound to it.

Commands are idempotent: they are given again after a crash, and where no answer came. Whoever carries them out writes
the HostState to the ledger first (healthcheck/ledger.py), then acts: a crash in between repeats, and forgets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from healthcheck.types import Action, Signal


class State(StrEnum):
    """Of one GPU. It serves in HEALTHY, SUSPECT (unless held there) and PROBATION."""

    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"  # something was seen: what to do is being found out, or may not be done yet
    DRAINING = "DRAINING"  # no new requests; those in flight end
    STOPPING = "STOPPING"  # the engine goes; then the GPU waits for its turn to be reset
    RESETTING = "RESETTING"  # one at a time per host
    WARMUP = "WARMUP"  # the engine starts, then three inferences; not admitted
    VERIFY = "VERIFY"  # golden answers, checksum, levels; not admitted
    PROBATION = "PROBATION"  # admitted at a reduced share
    QUARANTINED = "QUARANTINED"  # until a human, a board or a reboot (`needs`)
    MAINTENANCE = "MAINTENANCE"  # the watchdog keeps its hands off


class Needs(StrEnum):
    HUMAN = "human"
    RMA = "rma"
    REBOOT = "reboot"


OUT = frozenset((State.DRAINING, State.STOPPING, State.RESETTING, State.WARMUP, State.VERIFY, State.QUARANTINED))
"""States in which automation has taken the GPU out of service: what the breaker counts."""
SERVING = frozenset((State.HEALTHY, State.SUSPECT, State.PROBATION))

STAGES = {
    State.SUSPECT: ("asking", "waiting"),  # for answers; until it may be taken out (breaker, stopped automation)
    State.DRAINING: ("", "abort"),  # the deadline has passed
    State.STOPPING: ("", "stopped"),  # waits for its turn
    State.WARMUP: ("engine", "warming"),  # until it is ready; the inferences
}

# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class SignalSeen:
    signal: Signal


@dataclass(frozen=True, slots=True)
class Rechecked:
    """The answer to Reread: all levels of this GPU were read anew (and went in as signals before this)."""

    uuid: str
    recovery_action: int | None  # NVML field 230; None: not supported, or NVML gave no answer


@dataclass(frozen=True, slots=True)
class Drained:
    """Under Hold(level drain): no request is in flight."""

    gpu: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """Under Hold(level stop): no engine, its scope is empty."""

    gpu: int


@dataclass(frozen=True, slots=True)
class ResetDone:
    """The result of ResetGpu; `ok` False also where the unit failed, timed out or left no result."""

    gpu: int
    ok: bool
    detail: str = ""
    needs: Needs | None = None  # where trying again makes no sense, for example reboot: it fell off the bus


@dataclass(frozen=True, slots=True)
class EngineReady:
    """An engine that was started after the command that asked for it is ready."""

    gpu: int


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The launcher gave up, or the warm-up failed."""

    gpu: int
    detail: str


@dataclass(frozen=True, slots=True)
class WarmedUp:
    gpu: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The answer to Verify. `ok` None: inconclusive, which passes nothing. `key` names what failed, for example
    "golden:mismatch" or "recovery_action:1"."""

    gpu: int
    ok: bool | None
    detail: str = ""
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """At least every few seconds. None: not known, so nothing that can wait is done."""

    admitted: frozenset[int] | None = None  # slots whose engine takes requests now (the launchers' state files)
    in_flight: Mapping[int, int] | None = None  # requests, by slot (the gateways)


@dataclass(frozen=True, slots=True)
class FoundHeld:
    """The launcher holds this GPU for us: at the start, or when its slot is bound."""

    gpu: int
    reason: str  # of the hold
    since: float | None  # when it was placed; None: not known


@dataclass(frozen=True, slots=True)
class SetHealthy:
    """A human says so: the GPU is verified and comes back; its attempts are forgotten; stopped automation goes on."""

    gpu: int
    reason: str


@dataclass(frozen=True, slots=True)
class MaintenanceOn:
    reason: str


@dataclass(frozen=True, slots=True)
class MaintenanceOff:
    reason: str


@dataclass(frozen=True, slots=True)
class Rebooted:
    boot_id: str


Event: TypeAlias = (
    SignalSeen
    | Rechecked
    | Drained
    | Stopped
    | ResetDone
    | EngineReady
    | EngineFailed
    | WarmedUp
    | Verified
    | FoundHeld
    | Tick
    | SetHealthy
    | MaintenanceOn
    | MaintenanceOff
    | Rebooted
)

# ----------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Hold:
    """Launcher: op hold, owner "watchdog". It replaces the watchdog's hold of the other level: from stop to drain
    the engine starts, unadmitted."""

    gpu: int
    level: Literal["drain", "stop"]
    mode: Literal["graceful", "abort"]
    reason: str


@dataclass(frozen=True, slots=True)
class Unhold:
    gpu: int


@dataclass(frozen=True, slots=True)
class RestartEngine:
    """Restart it (it need not answer), unless an engine was started after `requested` already."""

    gpu: int
    reason: str
    requested: float


@dataclass(frozen=True, slots=True)
class ResetGpu:
    """Start appliance-gpu-reset@UUID, unless it runs or its result is there. Which result is new is not a question of
    clocks: an old one is removed before the ledger says RESETTING, and one that is taken note of after that."""

    gpu: int
    uuid: str
    attempt: int  # 1, 2 ...: of this GPU within the window
    requested: float


@dataclass(frozen=True, slots=True)
class WatchReset:
    """That reset has had its time and its GPU was given up: ResetDone once its unit has ended, however. Starts nothing.
    Until then no other GPU is reset."""

    gpu: int
    uuid: str
    requested: float


@dataclass(frozen=True, slots=True)
class Warmup:
    gpu: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Golden answers, checksum, levels -> Verified. Also asked of a GPU that serves, for a second opinion."""

    gpu: int


@dataclass(frozen=True, slots=True)
class SetShare:
    gpu: int
    share: float  # 0 < share <= 1, of the requests that it would get otherwise


@dataclass(frozen=True, slots=True)
class Reread:
    """Probe this GPU at once: its signals, then Rechecked."""

    uuid: str


@dataclass(frozen=True, slots=True)
class Alert:
    gpu: int | None  # None: of the host
    text: str
    key: str  # for metrics: the signal, or "breaker", "halted", "quarantined", ...


@dataclass(frozen=True, slots=True)
class Record:
    """One transition, for events.jsonl and metrics."""

    gpu: int
    uuid: str
    before: State
    after: State
    reason: str
    cause: str | None  # key of the signal
    needs: Needs | None
    seconds: float | None  # in `before`; None: it is not known since when
    phases: tuple[tuple[str, float], ...] = ()  # of the whole incident so far: (state, seconds) in order


Command: TypeAlias = (
    Hold | Unhold | RestartEngine | ResetGpu | WatchReset | Warmup | Verify | SetShare | Reread | Alert | Record
)

# -------------------------------------------------------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class Seen:
    """A signal as it is kept with an incident."""

    key: str
    at: float  # of the last one
    first: float  # when the first one was handed to us
    detail: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Incident:
    """Why a GPU is not HEALTHY, and how far its repair is."""

    cause: str  # key that decided (until then: the first)
    detail: str
    action: Action
    began: float
    needs: Needs = Needs.HUMAN  # who is asked for when nothing is left to try
    deferrable: bool = False
    then: Action = Action.NONE
    max_resets: int | None = None
    resets: int = 0  # of this incident
    requested: float | None = None  # the reset or restart that runs or ran last
    not_before: float = 0.0  # of the next reset
    reread: float | None = None  # when the recovery action was asked for
    rechecked: bool = False
    recovery_action: int | None = None  # the answer; None: not known
    peers: float | None = None  # when the other GPUs were asked
    seen: tuple[Seen, ...] = ()
    phases: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A reset (or restart of the engine by us) of one GPU: what the caps count."""

    at: float
    kind: Literal["reset", "restart"]
    cause: str
    result: str = ""  # "", "ok" or why it failed


@dataclass(frozen=True, slots=True)
class GpuState:
    gpu: int
    uuid: str
    state: State = State.HEALTHY
    reason: str = ""
    since: float = 0.0
    needs: Needs | None = None
    attempts: tuple[Attempt, ...] = ()
    incident: Incident | None = None
    owed: Incident | None = None  # a reset or quarantine that waits for a quiet time or for another GPU to serve
    stage: str = ""  # within the state, see STAGES
    held: bool = False  # by the watchdog
    repaired: float = 0.0  # what was seen before it is history
    deadline: float | None = None  # of the state
    issued: float = 0.0  # when its commands were given last
    paused: State | None = None  # SUSPECT, MAINTENANCE: the state that it goes back to
    asked: tuple[int, ...] = ()  # SUSPECT: other GPUs that have not answered yet
    idle_since: float | None = None  # no request in flight; not in the ledger
    extra: Mapping[str, Any] = field(default_factory=dict)  # keys of other versions, kept


@dataclass(frozen=True, slots=True)
class Halt:
    """Automation is stopped: two GPUs failed by what looks like one cause. A human ends it (SetHealthy, MaintenanceOff)
    or a reboot."""

    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class HostState:
    gpus: Mapping[int, GpuState] = field(default_factory=dict)
    boot_id: str = ""
    maintenance: str | None = None
    halt: Halt | None = None
    resetting: int | None = None  # slot whose reset runs, or may still run; cleared by ResetDone or a reboot only
    failures: tuple[tuple[float, int, str], ...] = ()  # (at, gpu, key): for common causes
    alerts: Mapping[str, float] = field(default_factory=dict)  # when each was last wanted: duplicates are one
    admitted: frozenset[int] | None = None  # last Tick's; not in the ledger
    extra: Mapping[str, Any] = field(default_factory=dict)

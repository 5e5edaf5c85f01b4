"""What may happen to a run; machine.py says what follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from appliance.log import ApplianceError, ExitCode
from canary.types import Verdict


class Now(NamedTuple):
    boot: float  # CLOCK_BOOTTIME
    utc: float


class Refused(ApplianceError):
    """The run is not where this command makes sense."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True, slots=True)
class JobDone:
    key: str  # Run.job_key when it began
    outcome: Literal["ok", "wait", "fail"]  # wait: not yet, ask again
    text: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    verdict: Verdict
    final: bool  # at the end of the step's time
    evidence: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Trip:
    """Something that no statistics are needed for: the canary does not answer, a pointer was changed by others."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


@dataclass(frozen=True, slots=True)
class Drained:
    """No request of the canary is left."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The stable pointer names the release."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The controller has started. `committed`: the stable pointer names the release."""

    boot_id: str
    committed: bool


@dataclass(frozen=True, slots=True)
class Abort:
    reason: str
    by: str
    drain: float  # seconds that requests in flight get


@dataclass(frozen=True, slots=True)
class Pause:
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class Resume:
    by: str


@dataclass(frozen=True, slots=True)
class Promote:
    by: str
    full: bool = False


@dataclass(frozen=True, slots=True)
class SetWeight:
    by: str
    weight: float


Command = Abort | Pause | Resume | Promote | SetWeight
Event = Command | JobDone | Judged | Trip | Tick | Drained | Committed | Resumed

"""A run of the canary as it is kept on disk: who, where it stands, and why it ended.

Phases are what people see; a phase goes through stages, each of which is one thing to wait for (machine.py). Times
named `..._at` are UTC, all others are seconds of CLOCK_BOOTTIME and mean something only in the boot `boot_id`.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.log import ApplianceError, UsageError
from canary.types import Policy, Verdict

SCHEMA = 1
MAX_REASON_CHARS = 500


class Phase(StrEnum):
    STARTING = "starting"
    WARMING = "warming"
    STEP = "step"
    PROMOTING = "promoting"
    SETTLING = "settling"  # the stable pointer names the release; `kept` says whether the old engines still run
    SETTLED = "settled"
    ROLLING_BACK = "rolling_back"
    ABORTED = "aborted"  # somebody, or a reboot, ended it
    FAILED = "failed"  # the release, or the host, was not good enough


class Stage(StrEnum):
    HOOK = "hook"
    ENGINES = "engines"  # of the release are started
    GATEWAY = "gateway"  # of the canary serves it
    MOVE = "move"  # exclusive placement: GPUs go over to it
    OBSERVE = "observe"
    VERIFY = "verify"  # golden answers, engines there
    HELD = "held"  # waits for `canary promote`
    COMMIT = "commit"  # the stable pointer; when rolling back: it goes back to the former release
    SERVING = "serving"  # the stable gateway follows its pointer
    BAKE = "bake"  # weight 0, the old engines are still there
    FOLLOW = "follow"  # the old engines stop
    DRAIN = "drain"
    WITHDRAW = "withdraw"  # the release's engines stop
    POST = "post"
    OVER = "over"


ENDED = frozenset({Phase.SETTLED, Phase.ABORTED, Phase.FAILED})
COMMITTED = frozenset({Phase.SETTLING, Phase.SETTLED})
Ending = Literal["aborted", "failed"]
HookPoint = Literal["pre", "step", "promote", "rollback", "post"]


class Hook(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One command or URL of /etc/appliance/canary.toml. Exactly one of `exec` and `url`."""

    when: HookPoint
    exec: list[str] = []
    url: str | None = None
    timeout: Annotated[float, Meta(ge=0.1, le=3600)] = 30.0


class StepResult(msgspec.Struct, kw_only=True, frozen=True):
    step: int
    weight: float
    outcome: str  # pass, fail, inconclusive, skipped
    seconds: float
    reason: str = ""


class Run(msgspec.Struct, kw_only=True, frozen=True):
    """Replaced as a whole at every transition (machine.step), written before anything is done about it."""

    id: str
    release: str
    stable: str  # what served before it
    policy: Policy
    boot_id: str
    created_at: float
    by: str = "root"
    placement: Literal["shared", "exclusive"] = "shared"
    manual: bool = False  # every step waits for `canary promote`
    dry_run: bool = False  # judged only: weights stay, verdicts are shown and not acted on
    skip_analysis: bool = False  # `canary undo`: readiness and golden answers only
    hooks: list[Hook] = []

    phase: Phase = Phase.STARTING
    stage: Stage = Stage.HOOK
    step: int = 0
    attempt: int = 0  # of the stage; a result of an earlier attempt counts for nothing
    seq: int = 0  # of transitions; each is one event
    weight: float = 0.0  # percent of new connections that it should get now
    overridden: bool = False  # by `canary weight N`
    extended: bool = False  # its time was over without a decision
    granted: bool = False  # `canary promote` was given for this step
    entered: float = 0.0
    entered_at: float = 0.0
    step_began: float = 0.0
    step_ends: float = 0.0
    progress: float = 0.0  # the deadline counts from here
    retry: float = 0.0  # the job of this stage waits until then
    until: float = 0.0  # end of draining or baking
    reverted: bool = False  # it was promoted, and is taken back in the bake
    drain: float = 0.0  # seconds that requests in work get once it is
    paused: str | None = None
    paused_since: float = 0.0
    held: str | None = None
    ending: Ending | None = None
    reason: str | None = None
    problem: str | None = None  # what it waits for now
    verdict: Verdict | None = None  # the newest
    decided: Verdict | None = None  # that this step has passed by; later ones are of the time after it
    results: list[StepResult] = []
    last_event: dict[str, Any] = {}
    ended_at: float | None = None
    evidence: dict[str, Any] | None = None  # the judge's, so that a restart does not begin from nothing

    @property
    def over(self) -> bool:
        return self.phase in ENDED

    @property
    def committed(self) -> bool:
        return self.phase in COMMITTED

    @property
    def kept(self) -> bool:
        """Promoted, and the old engines still run: it can be taken back."""
        return self.phase is Phase.SETTLING and self.stage in (Stage.SERVING, Stage.BAKE)

    @property
    def abortable(self) -> bool:
        """Does `canary rollback` still mean this run?"""
        return not self.over and (not self.committed or self.kept)

    @property
    def job_key(self) -> str:
        """Names one attempt at one stage."""
        return f"{self.id}/{self.phase}/{self.step}/{self.stage}/{self.attempt}"

    @property
    def target(self) -> float:
        """Weight of the present step."""
        return self.policy.steps[min(self.step, len(self.policy.steps) - 1)]


class RunError(ApplianceError):
    """A file of a run that cannot be understood."""


def to_state(run: Run) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.to_builtins(run)
    return value


def from_state(value: dict[str, Any], where: str) -> Run:
    """RunError names the field."""
    try:
        return msgspec.convert(value, Run)
    except msgspec.ValidationError as error:
        raise RunError(f"{where}: {error}", hint="another version wrote it; see `canary cleanup --help`") from None


def check_policy(policy: Policy, placement: str) -> Policy:
    """The policy with the steps that this placement can do. UsageError for one that makes no sense."""
    steps = list(policy.steps)
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise UsageError(f"steps {steps} do not rise", hint="for example 5,10,25,50,100")
    if steps[0] <= 0:
        raise UsageError("a step of weight 0 judges nothing", hint="for example 5,10,25,50,100")
    if placement == "exclusive":
        # Stable keeps at least as much as the canary has; what is above is the rolling replacement of the promotion.
        steps = [weight for weight in steps if weight <= 50] or [50.0]
    return msgspec.structs.replace(policy, steps=steps)

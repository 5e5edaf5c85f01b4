"""A run of the canary as it is kept on disk: who, where it stands, and why it ended.

Phases are what people see; a phase goes through stages, each of which is one thing to wait for (machine.py). Times
named `..._at` are UTC, all others are seconds of CLOCK_BOOTTIME and mean something only in the boot `boot_id`.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.log import ApplianceError, UsageError
from appliance.paths import RELEASE_NAME
from canary.types import Policy, Verdict, Weight

SCHEMA = 1
MAX_REASON_CHARS = 500
RUN_ID = re.compile(r"[0-9]{1,9}")
"""A run's number as text (use fullmatch): it becomes part of a file name and of a rule's comment."""
Count = Annotated[int, Meta(ge=0, le=1 << 53)]


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
    other_model_name: bool = False  # clients may call it otherwise than stable
    hooks: list[Hook] = []

    phase: Phase = Phase.STARTING
    stage: Stage = Stage.HOOK
    step: Count = 0
    attempt: Count = 0  # of the stage; a result of an earlier attempt counts for nothing
    seq: Count = 0  # of transitions; each is one event
    weight: Weight = 0.0  # percent of new connections that it should get now
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
    """RunError names what is wrong. What it gives can be gone on with: numbers are finite, names are names."""
    try:
        run = msgspec.convert(value, Run)
        problem = _problem(run) or ("" if _finite(value) else "a number is not finite")
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        problem = str(error)
    if problem:
        raise RunError(f"{where}: {problem}", hint="damaged, or another version wrote it")
    return run


def _problem(run: Run) -> str | None:
    """What the types do not say."""
    if not RUN_ID.fullmatch(run.id):
        return f"{run.id[:40]!r} is no number of a run"
    for name in (run.release, run.stable):
        if not RELEASE_NAME.fullmatch(name):
            return f"{name[:80]!r} is no name of a release"
    if run.step >= len(run.policy.steps):
        return f"there is no step {run.step} of {len(run.policy.steps)}"
    told = run.last_event
    if told and (not isinstance(told.get("event"), str) or told.keys() & {"run", "release", "stable", "path"}):
        return "last_event is no event of a run"
    return None


def _finite(value: Any) -> bool:
    """No infinity (1e999 in a file) and no NaN anywhere: clocks that never come, weights that are none."""
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


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

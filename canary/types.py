"""What the parts of the canary hand each other: the policy of a run, counts of both sides, the verdict."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Weight = Annotated[float, Meta(ge=0, le=100)]  # percent of new connections
Share = Annotated[float, Meta(gt=0, lt=1)]
Seconds = Annotated[float, Meta(ge=0.05, le=7 * 86400)]


class Limit(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """At most `share` of the observations may be `seconds` or longer: p99 < 80 ms is (0.080, 0.01)."""

    metric: Literal["itl", "ttft", "request"]
    seconds: Annotated[float, Meta(gt=0, le=86400)]
    share: Share = 0.01


class Policy(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Of one run; every limit names its metric."""

    steps: Annotated[list[Weight], Meta(min_length=1, max_length=50)] = msgspec.field(
        default_factory=lambda: [5, 10, 25, 50, 100]
    )
    step_seconds: Seconds = 300.0
    interval: Seconds = 10.0
    warmup_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0  # left out of latency, not of errors
    error_rate: Share = 0.001
    limits: list[Limit] = msgspec.field(default_factory=lambda: [Limit(metric="itl", seconds=0.080)])
    ttft_not_worse: bool = True  # than stable's in the same window
    alpha: Share = 0.05
    min_requests: Annotated[int, Meta(ge=1, le=10**8)] = 300
    min_connections: Annotated[int, Meta(ge=1, le=10**8)] = 20
    on_inconclusive: Literal["extend", "hold", "rollback"] = "extend"
    progress_deadline: Seconds = 3600.0
    cooldown: Annotated[float, Meta(ge=0, le=7 * 86400)] = 600.0
    settle_seconds: Seconds = 60.0
    liveness_seconds: Seconds = 2.0


class SideCounts(msgspec.Struct, kw_only=True, frozen=True):
    """Of one side, cumulative since its gateway started (`epoch` changes with it)."""

    epoch: str
    at: float  # monotonic seconds of the reading
    requests: int = 0  # ended, without 4xx and without clients that left
    errors: dict[str, int] = {}  # class -> count: http_5xx, stream_cut, deadline, golden, ...
    rejected: int = 0  # 429, compared separately
    connections: int = 0  # accepted
    clients: int = 0  # distinct addresses
    observations: dict[str, int] = {}  # metric -> number of observations
    slow: dict[str, int] = {}  # "itl:0.08" -> how many were that long or longer
    alive: bool = True


class Window(msgspec.Struct, kw_only=True, frozen=True):
    """Differences of both sides over the same time."""

    seconds: float
    canary: SideCounts
    stable: SideCounts | None  # None at 100 %
    kernel_connections: int | None = None  # to the canary, counted by the rule; None: unknown
    golden_ok: bool | None = None
    invalid: str | None = None  # why these numbers must not be judged: stale, counter reset, NaN


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """One metric's part of a verdict."""

    metric: str
    outcome: Outcome
    text: str  # one line with the numbers
    numbers: dict[str, float] = {}


class Verdict(msgspec.Struct, kw_only=True, frozen=True):
    outcome: Outcome
    findings: list[Finding]
    reason: str

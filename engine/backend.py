"""A model on a device as the step loop sees it: plans go in, sampled tokens come out, possibly one plan later.

`launch` queues a plan and returns; `collect` waits for it. A backend with `plans_in_flight` = 2 is given plan n+1 while
plan n runs, so that the device never waits for the host. Results never depend on that, nor on what shares a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine.messages import LoadPhase

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from engine.core_config import CoreConfig
    from engine.jobs import Job
    from engine.plan import StepPlan
    from engine.sampler import SampleState
    from engine.types import DeviceId, Float32Array, SampleResult, StepBatch, TokenLogprob


LoadProgress = Callable[[LoadPhase, int, int], None]
"""(phase, done, total) of a load, called in the loading thread; see messages.Loading."""


@dataclass(slots=True, frozen=True)
class Scoring:
    """Echo: logprobs of prompt tokens. The logits of position `first` + i judge the token `targets[i]` after it."""

    first: int
    targets: list[int]
    num_top: int


@dataclass(slots=True)
class StepWork:
    """A plan and what the sampler has to know. `states[i]` belongs to plan.items[i]; at the time of launch it does not
    count a pending token yet (`item.start + item.count - num_prompt_tokens` is the number generated before)."""

    plan: StepPlan
    states: list[SampleState]
    scoring: dict[int, Scoring] = field(default_factory=dict)  # by sequence id


@dataclass(slots=True, frozen=True)
class Failure:
    """Why a sequence cannot go on. `where`: {"layer", "op", "position" ...} if the device said so, else None."""

    text: str
    where: dict[str, Any] | None = None


@dataclass(slots=True)
class StepResult:
    """By sequence id. A sequence that is in `failures` may be missing elsewhere."""

    samples: dict[int, SampleResult] = field(default_factory=dict)  # every item with `samples`
    scores: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # as many as were asked for, unless it failed
    failures: dict[int, Failure] = field(default_factory=dict)


class Pending(Protocol):
    """A step in flight; only its backend knows more."""

    work: StepWork


class Backend(Protocol):
    """Owner of weights, KV pool and everything else on the device. One thread.

    Errors: EngineError, ValueError or IndexError from `launch` or `collect` fail that plan alone; DeviceLost (a sticky
    CUDA error) from any call means that nothing on the device can be trusted or waited for any more.
    """

    name: str
    device_id: DeviceId
    num_pages: int
    max_batch_tokens: int
    max_model_len: int
    plans_in_flight: int  # most that may be launched and not collected
    weights_bytes: int
    weights_checksum: str

    def check(self, state: SampleState) -> None:
        """ValueError for sampling parameters that this backend cannot serve, in words for the client."""
        ...

    def launch(self, work: StepWork) -> Pending:
        """Queue a plan; everything that may change later (block tables, token ids) is copied now. A row with
        `token_pending` takes the token that the plan launched before this one samples for its sequence."""
        ...

    def collect(self, pending: Pending) -> StepResult:
        """Wait for a step; in the order in which they were launched."""
        ...

    def forward(self, batch: StepBatch) -> Float32Array:
        """Beside the traffic, after whatever is in flight: logits (num_logits, vocab) of a batch on borrowed pages."""
        ...

    def find_nonfinite(self, batch: StepBatch) -> tuple[int | None, str, int] | None:
        """Run a batch as forward() does and name the first (layer or None, op, row) that gave NaN or Inf, or None."""
        ...

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Whatever makes the first steps as fast as the others (graphs, page faults). Once, before any launch.
        progress(done, total): batch sizes."""
        ...

    def checksum(self) -> Job:
        """Hash the weights on the device again: {"expected", "actual", "ok"}."""
        ...

    def tensor_offsets(self) -> Mapping[str, int]:
        """Where each tensor begins in the weight arena, in bytes."""
        ...

    def flip_bit(self, offset: int, bit: int) -> tuple[int, int]:
        """Turn one bit of the weight arena over (fault injection): that byte before and after. Steps launched before
        this see the old one."""
        ...

    def close(self) -> None:
        """Give everything back; unusable afterwards. Steps in flight are waited for."""
        ...


def phase_progress(progress: LoadProgress | None, phase: LoadPhase) -> Callable[[int, int], None] | None:
    """`progress` for one phase."""
    return None if progress is None else lambda done, total: progress(phase, done, total)


def create_backend(config: CoreConfig, model: ModelConfig, progress: LoadProgress | None = None) -> Backend:
    """Load the weights of `config.model_dir` onto the backend it names. Never another one than asked for: a promised
    GPU that is not there is an error. EngineError (mostly ConfigError, CheckpointError) says what to do."""
    if config.backend == "cuda":
        from engine.cuda.backend import load_cuda  # needs the driver, which the CPU backend does without

        return load_cuda(config, model, progress)
    from engine.cpu_backend import CpuBackend

    return CpuBackend.load(config, model, progress)

"""The CPU backend: ModelRunner and the numpy sampler behind the step loop's interface.

Nothing runs beside the host here, so a step is computed when it is collected. With two plans in flight that is the
order of events a GPU gives (launch n+1 sees nothing of step n), which is how the overlap is tested without one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.backend import Failure, LoadProgress, Pending, StepResult, StepWork, phase_progress
from engine.batch import build_batch
from engine.core_config import CoreConfig, context_length, plan_kv_pages, usable_cpus
from engine.errors import ConfigError, EngineError, NumericError
from engine.host_memory import available_bytes
from engine.loader import load_weights
from engine.log import log_event
from engine.probe import arena_checksum_job
from engine.runner import MAX_THREADS, ModelRunner, kv_bytes_per_page
from engine.sampler import sample, token_logprobs
from engine.types import PAGE_TOKENS, DeviceId

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import ModelConfig
    from engine.jobs import Job
    from engine.plan import ScheduledSeq
    from engine.sampler import SampleState
    from engine.types import Float32Array, StepBatch, Weights

log = logging.getLogger("appliance.engine")


@dataclass(slots=True)
class _Step:
    work: StepWork
    batch: StepBatch
    first_row: dict[int, int]  # sequence id -> its first logits row
    pending_rows: list[tuple[int, ScheduledSeq]]  # token rows whose input the step before samples


class CpuBackend:
    """`Backend` on the CPU; arguments as ModelRunner's."""

    name = "cpu"
    device_id = DeviceId("cpu", "CPU", "cpu")

    def __init__(
        self,
        model: ModelConfig,
        weights: Weights,
        *,
        num_pages: int,
        num_threads: int,
        max_batch_tokens: int,
        max_model_len: int,
        plans_in_flight: int = 1,
    ) -> None:
        self.num_pages, self.max_batch_tokens, self.max_model_len = num_pages, max_batch_tokens, max_model_len
        self.plans_in_flight = plans_in_flight
        self.weights_bytes, self.weights_checksum = weights.arena_bytes, weights.checksum
        self._weights = weights
        self.runner = ModelRunner(
            model,
            weights,
            num_pages=num_pages,
            num_threads=num_threads,
            max_batch_tokens=max_batch_tokens,
            max_model_len=max_model_len,
        )

    @classmethod
    def load(cls, config: CoreConfig, model: ModelConfig, progress: LoadProgress | None = None) -> CpuBackend:
        """`config` with its defaults filled in. ConfigError when the pool does not fit into the memory that is free."""
        assert config.max_batch_tokens is not None and config.plans_in_flight is not None
        weights = load_weights(
            Path(config.model_dir),
            model,
            dtype=config.dtype,
            progress=phase_progress(progress, "weights"),
            checksum_progress=phase_progress(progress, "checksum"),
        )
        for note in weights.notes:
            log_event(log, logging.WARNING, "checkpoint_note", note)
        asked = context_length(config, model.max_position)
        num_pages = plan_kv_pages(
            config, max_model_len=asked, bytes_per_page=kv_bytes_per_page(model), free_bytes=available_bytes()
        )
        try:
            return cls(
                model,
                weights,
                num_pages=num_pages,
                num_threads=config.num_threads or min(usable_cpus(), MAX_THREADS),
                max_batch_tokens=config.max_batch_tokens,
                # One request can never have more than the whole pool.
                max_model_len=min(asked, num_pages * PAGE_TOKENS),
                plans_in_flight=config.plans_in_flight,
            )
        except MemoryError as error:
            raise ConfigError(f"not enough memory: {error}", hint="lower --kv-tokens or --max-batch-tokens") from error

    def check(self, state: SampleState) -> None:
        """All are fine."""

    def launch(self, work: StepWork) -> _Step:
        def num_logits(item: ScheduledSeq) -> int:
            """Echo: every position of the chunk. Else the last one when it samples."""
            return item.count if item.seq.seq_id in work.scoring else int(item.samples)

        batch, first_row = build_batch(work.plan, num_logits)
        pending = [
            (row, item) for row, item in enumerate(work.plan.items[: work.plan.num_decodes]) if item.token_pending
        ]
        return _Step(work, batch, first_row, pending)

    def collect(self, pending: Pending) -> StepResult:
        assert isinstance(pending, _Step)
        step, work, result = pending, pending.work, StepResult()
        for row, item in step.pending_rows:
            # A sequence that has ended since has no such token; its row is computed for nothing.
            known = item.start < len(item.seq.token_ids)
            step.batch.token_ids[row] = item.seq.token_ids[item.start] if known else 0
        logits = self.runner.forward(step.batch)
        self._score(step, logits, result)
        items = [(i, item) for i, item in enumerate(work.plan.items) if item.samples and not item.seq.finished]
        rows = []
        for _, item in items:
            more = item.count - 1 if item.seq.seq_id in work.scoring else 0
            rows.append(step.first_row[item.seq.seq_id] + more)
        if rows != list(range(len(logits))):
            logits = logits[rows]
        for (_, item), sampled in zip(items, sample(logits, [work.states[i] for i, _ in items]), strict=True):
            result.samples[item.seq.seq_id] = sampled
            if sampled.error is not None:
                result.failures.setdefault(item.seq.seq_id, Failure(sampled.error))
        return result

    def _score(self, step: _Step, logits: Float32Array, result: StepResult) -> None:
        """Logprobs of the prompt's own tokens; the first row without usable logits fails its sequence."""
        for item in step.work.plan.items:
            seq_id = item.seq.seq_id
            if (scoring := step.work.scoring.get(seq_id)) is None:
                continue
            scores = result.scores[seq_id] = []
            first = step.first_row[seq_id] + scoring.first - item.start
            try:
                for row, target in enumerate(scoring.targets, first):
                    scores.append(token_logprobs(logits[row], target, scoring.num_top))
            except NumericError as error:
                result.failures[seq_id] = Failure(error.message)

    def forward(self, batch: StepBatch) -> Float32Array:
        return self.runner.forward(batch)

    def find_nonfinite(self, batch: StepBatch) -> tuple[int | None, str, int] | None:
        return self.runner.find_nonfinite(batch)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing: the engine's first look at the model (Engine.warm_up) touches all there is."""

    def checksum(self) -> Job:
        return arena_checksum_job(self._weights)

    def tensor_offsets(self) -> dict[str, int]:
        arena = self._arena()
        base = np.frombuffer(arena, np.uint8).ctypes.data
        return {name: tensor.ctypes.data - base for name, tensor in self._weights.tensors.items()}

    def flip_bit(self, offset: int, bit: int) -> tuple[int, int]:
        arena = self._arena()
        before = arena[offset]
        arena[offset] = after = before ^ 1 << bit  # the views of the runner are read-only; the arena below them is not
        return before, after

    def _arena(self) -> memoryview:
        if self._weights.arena is None:
            raise EngineError("these weights have no arena to write into")
        return self._weights.arena

    def close(self) -> None:
        self.runner.close()

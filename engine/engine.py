"""The engine without processes: requests in, one `step()` at a time, messages out. engine/core.py wraps it.

A step reads in call order: expire deadlines -> schedule -> build the batch -> forward -> sample -> commit -> finish.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.core_config import CoreConfig, plan_kv_pages, usable_cpus
from engine.errors import AdmissionError, ConfigError, EngineError, NumericError
from engine.host_memory import available_bytes
from engine.kv_cache import KVCache, OutOfPages
from engine.loader import arena_checksum, load_weights
from engine.log import log_event
from engine.messages import CoreMessage, Generate, Ready, Stats, Tokens
from engine.runner import ModelRunner, kv_bytes_per_page
from engine.sampler import SampleState, sample, token_logprobs
from engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from engine.sequence import Sequence
from engine.types import PAGE_TOKENS, FinishReason, Float32Array, SampleResult, StepBatch, TokenLogprob, Weights

log = logging.getLogger("appliance.engine")

IDLE_STATS_SECONDS = 0.5
LOCATE_SECONDS = 1.0
"""Least time between two searches for the layer where NaN began."""


@dataclass(slots=True)
class Choice:
    """One of the n answers to a request: its sequence in the scheduler and its sampler state."""

    message: Generate
    sequence: Sequence
    sampling: SampleState
    prompt_logprobs: list[TokenLogprob | None] | None = None
    reported: bool = False  # the first message (with cached_tokens) was sent
    stop_ids: frozenset[int] = field(default_factory=frozenset)


class Engine:
    """Owner of runner, scheduler and KV cache of one model. Not thread-safe: one caller, engine-core's loop."""

    def __init__(
        self, config: CoreConfig, model: ModelConfig, weights: Weights, *, free_bytes: int, load_seconds: float
    ) -> None:
        self.config, self.model, self.weights = config, model, weights
        self.max_model_len = min(config.max_model_len or model.max_position, model.max_position)
        if self.max_model_len < 1:
            raise ConfigError(f"max_model_len = {self.max_model_len} must be at least 1")
        num_pages = plan_kv_pages(
            config,
            max_model_len=self.max_model_len,
            bytes_per_page=kv_bytes_per_page(model),
            free_bytes=free_bytes,
        )
        self.kv_cache = KVCache(num_pages)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=self.max_model_len,
                max_batch_tokens=config.max_batch_tokens,
                max_batch_seqs=config.max_batch_seqs,
                prefill_chunk=config.prefill_chunk,
                prefix_cache=config.prefix_cache,
                max_plans_in_flight=1,
            ),
            self.kv_cache,
        )
        self.runner = ModelRunner(
            model,
            weights,
            num_pages=num_pages,
            num_threads=config.num_threads or usable_cpus(),
            max_batch_tokens=config.max_batch_tokens,
            max_model_len=self.max_model_len,
        )
        self.ready = Ready(
            kv_pages=num_pages,
            max_model_len=self.max_model_len,
            vocab_size=model.vocab_size,
            weights_bytes=weights.arena_bytes,
            weights_checksum=weights.checksum,
            load_seconds=load_seconds,
            backend=config.backend,
        )
        self._choices: dict[int, Choice] = {}  # by sequence id
        self._by_request: dict[str, dict[int, int]] = {}  # request id -> choice index -> sequence id
        self._next_seq_id = 1
        self._steps = 0
        self._last_step_seconds = 0.0
        self._stats_at = 0.0
        self._located_at = -LOCATE_SECONDS

    @classmethod
    def load(cls, config: CoreConfig, *, progress: Callable[[int, int], None] | None = None) -> Engine:
        """Read the model directory and make everything ready for the first step. Any EngineError is final."""
        if config.backend != "cpu":
            raise ConfigError(
                f"backend {config.backend!r} is not in this build", hint="use --backend cpu; CUDA is issue 3's part"
            )
        started = time.monotonic()
        directory = Path(config.model_dir)
        model = ModelConfig.from_dir(directory)
        weights = load_weights(directory, model, dtype=config.dtype, progress=progress)
        load_seconds = time.monotonic() - started
        log_event(
            log, logging.INFO, "weights_loaded", bytes=weights.arena_bytes, seconds=round(load_seconds, 3),
            dtype=weights.dtype, checksum=weights.checksum,
        )  # fmt: skip
        for note in weights.notes:
            log_event(log, logging.WARNING, "checkpoint_note", note)
        free_bytes = available_bytes()
        if free_bytes is None and config.kv_tokens is None:
            raise ConfigError("cannot tell how much memory is free here", hint="give --kv-tokens")
        return cls(config, model, weights, free_bytes=free_bytes or 0, load_seconds=load_seconds)

    def close(self) -> None:
        self.runner.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, message: Generate) -> list[CoreMessage]:
        """Queue every choice. A request that can never be served is answered at once with finish_reason error."""
        try:
            self.scheduler.check_admissible(len(message.prompt_ids), message.params.max_tokens)
            if not 0 <= min(message.prompt_ids) <= max(message.prompt_ids) < self.model.vocab_size:
                raise AdmissionError(f"a prompt token id is outside 0..{self.model.vocab_size - 1}")
            states = [
                SampleState(message.params, message.prompt_ids, self.model.vocab_size, index)
                for index in range(message.n)
            ]
        except (AdmissionError, ValueError) as error:
            return [
                Tokens(
                    request_id=message.request_id,
                    index=index,
                    token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error=str(error),
                )
                for index in range(message.n)
            ]
        indices = self._by_request[message.request_id] = {}
        stop_ids = set(message.params.stop_token_ids)
        if not message.params.ignore_eos:
            stop_ids |= set(message.params.eos_token_ids)
        for index in range(message.n):
            sequence = Sequence(
                self._next_seq_id,
                message.prompt_ids,
                max_tokens=message.params.max_tokens,
                request_id=message.request_id,
                index=index,
                cache_salt=message.cache_salt,
                allow_prefix_hit=not message.echo_logprobs,
                deadline=message.deadline,
            )
            self._next_seq_id += 1
            choice = Choice(message, sequence, states[index], stop_ids=frozenset(stop_ids))
            if message.echo_logprobs:
                choice.prompt_logprobs = [None]
            indices[index] = sequence.seq_id
            self._choices[sequence.seq_id] = choice
            self.scheduler.add(sequence)
        return []

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Free one choice or all of them at once. Unknown ids are fine: the request may just have ended."""
        for choice_index, seq_id in list(self._by_request.get(request_id, {}).items()):
            if index is None or index == choice_index:
                self.scheduler.abort(seq_id)
                self._forget(self._choices[seq_id])

    # ---- one step --------------------------------------------------------------------------------------------------

    def step(self) -> list[CoreMessage]:
        """Run one forward pass if there is anything to do, and say what came of it."""
        out: list[CoreMessage] = []
        now = time.monotonic()
        for sequence in self.scheduler.expire(now):
            out.append(self._report(self._choice(sequence)))
        plan = self.scheduler.schedule()
        if plan is not None:
            out += self._run(plan)
            self._steps += 1
            self._last_step_seconds = time.monotonic() - now
        elif not self.scheduler.has_work and now - self._stats_at >= IDLE_STATS_SECONDS:
            self.scheduler.check_integrity()  # cheap when idle, and the moment a leak is provable
        if plan is not None or now - self._stats_at >= IDLE_STATS_SECONDS:
            self._stats_at = now
            out.append(self.stats())
        return out

    def _run(self, plan: StepPlan) -> list[CoreMessage]:
        batch, first_row = self._build_batch(plan)
        try:
            logits = self.runner.forward(batch)
        except (EngineError, ValueError, IndexError) as error:  # refused before it wrote anything: a bug of ours
            log_event(log, logging.ERROR, "step_failed", str(error), step=self._steps, exc_info=True)
            return [self._report(self._choice(seq), error=str(error)) for seq in self.scheduler.fail(plan)]
        broken = self._echo(plan, logits, first_row)
        sampling = [item for item in plan.items if item.samples and not item.seq.finished]
        rows = [first_row[item.seq.seq_id] + self._num_rows(item) - 1 for item in sampling]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        choices = [self._choice(item.seq) for item in sampling]
        results = sample(logits, [choice.sampling for choice in choices])
        tokens: dict[int, int] = {}
        stopped: dict[int, FinishReason] = {}
        for choice, result in zip(choices, results, strict=True):
            seq_id = choice.sequence.seq_id
            if result.error is not None:
                broken.setdefault(seq_id, result.error)
            else:
                tokens[seq_id] = result.token_id
                choice.sampling.append(result.token_id)
                if result.token_id in choice.stop_ids:
                    stopped[seq_id] = FinishReason.STOP
        places = {seq_id: self._locate(self._choices[seq_id]) for seq_id in broken}  # while the pages are still there
        ended = self.scheduler.commit(plan, tokens, stopped | dict.fromkeys(broken, FinishReason.ERROR))
        out: list[CoreMessage] = [
            self._failed(self._choices[seq_id], text, places[seq_id]) for seq_id, text in broken.items()
        ]
        for choice, result in zip(choices, results, strict=True):
            if choice.sequence.seq_id not in broken:
                out.append(self._result(choice, result))
        for sequence in ended:  # max_tokens = 0 (echo) samples nothing and ends with its prompt
            if (choice_left := self._choices.get(sequence.seq_id)) is not None:
                out.append(self._report(choice_left))
        return out

    def _num_rows(self, item: Any) -> int:
        """Logits rows of a scheduled item: every position for echo, the last one when it samples, else none."""
        if self._choices[item.seq.seq_id].prompt_logprobs is not None and item.start < item.seq.num_prompt_tokens:
            return int(item.count)
        return 1 if item.samples else 0

    def _build_batch(self, plan: StepPlan) -> tuple[StepBatch, dict[int, int]]:
        """Lay the scheduled tokens end to end; also where each sequence's logits rows begin."""
        items = plan.items
        counts = np.fromiter((item.count for item in items), np.int32, len(items))
        total = int(counts.sum())
        starts = np.fromiter((item.start for item in items), np.int32, len(items))
        ends = np.cumsum(counts, dtype=np.int32)
        token_ids = np.empty(total, np.int32)
        width = max(len(item.seq.block_table) for item in items)
        block_tables = np.full((len(items), width), -1, np.int32)
        rows: list[int] = []
        first_row: dict[int, int] = {}
        for i, item in enumerate(items):
            offset = int(ends[i] - counts[i])
            token_ids[offset : ends[i]] = item.seq.token_ids[item.start : item.start + item.count]
            block_tables[i, : len(item.seq.block_table)] = item.seq.block_table
            first_row[item.seq.seq_id] = len(rows)
            num_rows = self._num_rows(item)
            rows += range(int(ends[i]) - num_rows, int(ends[i]))
        positions = np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
        batch = StepBatch(
            token_ids=token_ids,
            positions=positions.astype(np.int32, copy=False),
            seq_index=np.repeat(np.arange(len(items), dtype=np.int32), counts),
            block_tables=block_tables,
            logits_rows=np.array(rows, np.int32),
        )
        return batch, first_row

    def _echo(self, plan: StepPlan, logits: Float32Array, first_row: dict[int, int]) -> dict[int, str]:
        """Logprobs of the prompt's own tokens: the row of position p judges token p + 1. Returns what was wrong."""
        broken: dict[int, str] = {}
        for item in plan.items:
            choice = self._choices.get(item.seq.seq_id)
            if choice is None or choice.prompt_logprobs is None:
                continue
            wanted = choice.message.params.logprobs or 0
            for p in range(item.start, min(item.start + item.count, item.seq.num_prompt_tokens - 1)):
                if p + 1 == len(choice.prompt_logprobs):  # not again after a preemption
                    row = logits[first_row[item.seq.seq_id] + p - item.start]
                    try:
                        choice.prompt_logprobs.append(token_logprobs(row, item.seq.token_ids[p + 1], wanted))
                    except NumericError as error:
                        broken[item.seq.seq_id] = error.message
                        break
        return broken

    def _locate(self, choice: Choice) -> dict[str, Any]:
        """Where NaN or Inf first appears for this sequence: {"layer", "op", "position"}, by computing it once more.

        On pages of its own. At most once a second: a GPU that has gone bad must not spend its time on diagnosis.
        """
        token_ids = choice.sequence.token_ids
        if time.monotonic() - self._located_at >= LOCATE_SECONDS:
            try:
                for start, batch in self._replay(token_ids):
                    if (found := self.runner.find_nonfinite(batch)) is not None:
                        layer, op, row = found
                        return {"layer": layer, "op": op, "position": start + row}
            except OutOfPages:
                pass  # the answer is less precise, nothing else
            finally:
                self._located_at = time.monotonic()
        return {"op": "logits", "position": len(token_ids) - 1}

    def _replay(self, token_ids: list[int]) -> Iterator[tuple[int, StepBatch]]:
        """(start, batch) of each chunk of a sequence that is computed from scratch beside the requests in flight, on
        borrowed pages that are given back at the end; logits at every position. OutOfPages if there are too few."""
        pages = self.kv_cache.allocate(-(-len(token_ids) // PAGE_TOKENS))
        try:
            table = np.array([pages], np.int32)
            for start in range(0, len(token_ids), self.config.prefill_chunk):
                chunk = np.array(token_ids[start : start + self.config.prefill_chunk], np.int32)
                rows = np.arange(len(chunk), dtype=np.int32)
                yield start, StepBatch(chunk, rows + np.int32(start), np.zeros_like(rows), table, rows)
        finally:
            self.kv_cache.release(pages)

    # ---- what a step means for a choice ----------------------------------------------------------------------------

    def _choice(self, sequence: Sequence) -> Choice:
        return self._choices[sequence.seq_id]

    def _failed(self, choice: Choice, text: str, where: dict[str, Any]) -> Tokens:
        where = {**where, "step": self._steps}
        log_event(log, logging.ERROR, "request_failed", text, req_id=choice.message.request_id, **where)
        return self._report(choice, error=text, error_where=where)

    def _result(self, choice: Choice, result: SampleResult) -> Tokens:
        if choice.sequence.finish_reason is FinishReason.STOP:
            return self._report(choice, stop_token_id=result.token_id)
        logprobs = [result.logprob] if result.logprob is not None else None
        return self._report(choice, token_ids=[result.token_id], logprobs=logprobs)

    def _report(self, choice: Choice, *, token_ids: list[int] | None = None, **fields: Any) -> Tokens:
        """The message of this step; when the scheduler has ended the sequence it carries the reason and is the last."""
        sequence, first = choice.sequence, not choice.reported
        choice.reported = True
        if sequence.finished:
            self._forget(choice)
        return Tokens(
            request_id=choice.message.request_id,
            index=sequence.index,
            token_ids=token_ids or [],
            cached_tokens=sequence.num_cached_tokens if first else 0,
            prompt_logprobs=choice.prompt_logprobs if first else None,
            finish_reason=sequence.finish_reason,
            **fields,
        )

    def _forget(self, choice: Choice) -> None:
        self._choices.pop(choice.sequence.seq_id, None)
        indices = self._by_request.get(choice.message.request_id, {})
        indices.pop(choice.sequence.index, None)
        if not indices:
            self._by_request.pop(choice.message.request_id, None)

    # ---- operators -------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        s = self.scheduler.stats
        return Stats(
            steps=s.steps,
            kv_pages_free=s.kv_pages_free,
            kv_pages_total=s.kv_pages_total,
            kv_slots_unused=s.kv_slots_unused,
            running=s.running,
            waiting=s.waiting,
            waiting_by_bucket=s.waiting_by_bucket,
            prefix_hit_tokens=s.prefix_hit_tokens,
            prefix_query_tokens=s.prefix_query_tokens,
            preemptions=s.preemptions,
            step_seconds=self._last_step_seconds,
        )

    def control(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        match op:
            case "checksum":
                if self.weights.arena is None:
                    raise EngineError("these weights have no arena to read back")
                actual = arena_checksum(self.weights.arena, num_threads=self.runner.num_threads)
                return {"expected": self.weights.checksum, "actual": actual, "ok": actual == self.weights.checksum}
            case "golden":
                return self._golden([int(t) for t in args["prompt_ids"]])
            case "drop_prefix_cache":
                return {"pages": self.kv_cache.drop_prefix_cache()}
        raise EngineError(f"unknown control operation {op!r}")

    def _golden(self, prompt_ids: list[int]) -> dict[str, Any]:
        """SHA-256 over the float32 logits of every position of a fixed prompt: the bits that judge GPU and release.

        Runs beside the requests in flight on pages of its own, without the prefix cache: everything is computed.
        """
        self.scheduler.check_admissible(len(prompt_ids), 1)
        digest = hashlib.sha256()
        for _start, batch in self._replay(prompt_ids):
            digest.update(self.runner.forward(batch).tobytes())
        return {"sha256": digest.hexdigest(), "positions": len(prompt_ids)}

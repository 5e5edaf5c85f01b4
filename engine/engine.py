"""The engine without processes: requests in, one `step()` at a time, messages out. engine/core.py wraps it.

A step reads in call order: expire deadlines -> schedule -> build the batch -> forward -> sample -> commit -> finish.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.batch import build_batch
from engine.config import ModelConfig
from engine.core_config import CoreConfig, context_length, plan_kv_pages, scheduler_config, usable_cpus
from engine.errors import AdmissionError, ConfigError, EngineError, NumericError
from engine.host_memory import available_bytes, resident_bytes
from engine.jobs import Jobs
from engine.kv_cache import KVCache
from engine.loader import load_weights
from engine.log import log_event
from engine.messages import ControlReply, CoreMessage, Generate, GoldenArgs, NoArgs, Ready, Stats, Tokens
from engine.probe import Probe, checksum
from engine.runner import MAX_THREADS, ModelRunner, kv_bytes_per_page
from engine.sampler import SampleState, sample, token_logprobs
from engine.scheduler import ScheduledSeq, Scheduler, StepPlan
from engine.sequence import Sequence
from engine.types import PAGE_TOKENS, FinishReason, Float32Array, SampleResult, TokenLogprob, Weights

log = logging.getLogger("appliance.engine")

T = TypeVar("T")

IDLE_STATS_SECONDS = 0.5
MAX_FAILED_STEPS = 3
LOCATE_SECONDS = 1.0  # least time between two searches for the layer where NaN began
LOCATE_TOKENS = 2048  # longest sequence that is searched


@dataclass(slots=True)
class Choice:
    """One of the n answers to a request: its sequence in the scheduler and its sampler state."""

    message: Generate
    sequence: Sequence
    sampling: SampleState
    scores: list[TokenLogprob | None] | None = None  # echo: logprobs of prompt tokens that were not sent yet
    num_scored: int = 0
    reported: bool = False  # the first message (with cached_tokens) was sent
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def log_id(self) -> str:
        """The id the client knows, under which all layers log."""
        return self.message.client_id or self.message.request_id


class Engine:
    """Owner of runner, scheduler and KV cache of one model. Not thread-safe: one caller, engine-core's loop."""

    def __init__(
        self, config: CoreConfig, model: ModelConfig, weights: Weights, *, free_bytes: int | None, load_seconds: float
    ) -> None:
        self.config, self.model, self.weights = config, model, weights
        asked = context_length(config, model.max_position)
        num_pages = plan_kv_pages(
            config, max_model_len=asked, bytes_per_page=kv_bytes_per_page(model), free_bytes=free_bytes
        )
        # One request can never have more than the whole pool; better a smaller context than requests that never fit.
        self.max_model_len = min(asked, num_pages * PAGE_TOKENS)
        if self.max_model_len < asked:
            note = f"the KV pool holds {self.max_model_len} tokens, so the context is that and not {asked}"
            log_event(log, logging.WARNING, "context_cut", note)
        self.kv_cache = KVCache(num_pages)
        self.scheduler = Scheduler(scheduler_config(config, self.max_model_len), self.kv_cache)
        self.runner = ModelRunner(
            model,
            weights,
            num_pages=num_pages,
            num_threads=config.num_threads or min(usable_cpus(), MAX_THREADS),
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
        self._longest_step_seconds = self._warm_step_seconds = 0.0
        self._jobs = Jobs()
        self._stats_at = 0.0
        self._located_at = -LOCATE_SECONDS
        self._failed_steps = 0
        self._probe = Probe(self.runner, self.kv_cache, config.prefill_chunk)

    @classmethod
    def load(cls, config: CoreConfig, *, progress: Callable[[int, int], None] | None = None) -> Engine:
        """Read the model directory and make everything ready for the first step. Any EngineError is final."""
        if config.backend != "cpu":
            raise ConfigError(f"backend {config.backend!r} is not in this build", hint="use --backend cpu")
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
        try:
            engine = cls(config, model, weights, free_bytes=free_bytes, load_seconds=load_seconds)
        except MemoryError as error:
            raise ConfigError(f"not enough memory: {error}", hint="lower --kv-tokens or --max-batch-tokens") from error
        engine.warm_up()
        return engine

    def warm_up(self) -> None:
        """Compute something before anybody is told that we are ready. ConfigError when the model answers NaN."""
        prompt_ids = [0] * min(self.max_model_len, self.config.prefill_chunk + 1)
        started = time.monotonic()
        if (where := self._probe.find_nonfinite(prompt_ids)) is not None:
            raise ConfigError(f"the model computes NaN or Inf at warm-up: {where}", hint="check its files and dtype")
        per_token = (time.monotonic() - started) / len(prompt_ids)
        self._warm_step_seconds = self._longest_step_seconds = per_token * self.config.max_batch_tokens

    def close(self) -> None:
        self._jobs.close()
        self.runner.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._jobs)

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, message: Generate) -> list[CoreMessage]:
        """Queue every choice. A request that can never be served is answered at once with finish_reason error."""
        try:
            self._check_prompt(message.prompt_ids, message.params.max_tokens)
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
                    refused=True,
                )
                for index in range(message.n)
            ]
        indices = self._by_request[message.request_id] = {}
        stop_ids = set(message.params.stop_token_ids)
        if not message.params.ignore_eos:
            stop_ids |= set(message.params.eos_token_ids)
        for index in range(message.n):
            scores_prompt = message.echo_logprobs and index == 0  # all choices have the same prompt
            sequence = Sequence(
                self._next_seq_id,
                message.prompt_ids,
                max_tokens=message.params.max_tokens,
                request_id=message.request_id,
                index=index,
                cache_salt=message.cache_salt,
                allow_prefix_hit=not scores_prompt,
                deadline=message.deadline,
            )
            self._next_seq_id += 1
            choice = Choice(message, sequence, states[index], stop_ids=frozenset(stop_ids))
            if scores_prompt:
                choice.scores, choice.num_scored = [None], 1
            indices[index] = sequence.seq_id
            self._choices[sequence.seq_id] = choice
            self.scheduler.add(sequence)
        return []

    def _check_prompt(self, prompt_ids: list[int], max_tokens: int) -> None:
        self.scheduler.check_admissible(len(prompt_ids), max_tokens)
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self.model.vocab_size:
            raise AdmissionError(f"a prompt token id is outside 0..{self.model.vocab_size - 1}")

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
            # Slowly forgotten: one step that was held up (a stopped process) must not excuse silence for ever.
            expected = max(self._warm_step_seconds, 0.99 * self._longest_step_seconds)
            self._longest_step_seconds = max(expected, self._last_step_seconds)
        out += self._jobs.advance()
        if plan is None and not self.has_work and now - self._stats_at >= IDLE_STATS_SECONDS:
            self.scheduler.check_integrity()  # cheap when idle, and the moment a leak is provable
        if plan is not None or now - self._stats_at >= IDLE_STATS_SECONDS:
            self._stats_at = now
            out.append(self.stats())
        return out

    def _run(self, plan: StepPlan) -> list[CoreMessage]:
        batch, first_row = build_batch(plan, self._num_rows)
        try:
            logits = self.runner.forward(batch)
        except (EngineError, ValueError, IndexError) as error:  # refused before it wrote anything: a bug of ours
            ids = sorted({self._choice(item.seq).log_id for item in plan.items})
            log_event(log, logging.ERROR, "step_failed", str(error), step=self._steps, req_ids=ids, exc_info=True)
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:  # not these requests' fault: be replaced, not half alive
                raise EngineError(f"{self._failed_steps} steps in a row failed: {error}") from error
            where = {"op": "step", "step": self._steps}
            failed = self.scheduler.fail(plan)
            return [self._report(self._choice(seq), error=str(error), error_where=where) for seq in failed]
        self._failed_steps = 0
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
        # Those that sampled nothing but have something to say: max_tokens = 0 (echo) ends with its prompt, and the
        # scores of a long prompt go out chunk by chunk, so that no message grows with the prompt.
        ended_ids = {sequence.seq_id for sequence in ended}
        for item in plan.items:
            silent = self._choices.get(item.seq.seq_id)
            if silent is not None and (item.seq.seq_id in ended_ids or silent.scores):
                out.append(self._report(silent))
        return out

    def _num_rows(self, item: ScheduledSeq) -> int:
        """Logits rows of a scheduled item: every position for echo, the last one when it samples, else none."""
        if self._choices[item.seq.seq_id].scores is not None and item.start < item.seq.num_prompt_tokens:
            return item.count
        return 1 if item.samples else 0

    def _echo(self, plan: StepPlan, logits: Float32Array, first_row: dict[int, int]) -> dict[int, str]:
        """Logprobs of the prompt's own tokens: the row of position p judges token p + 1. Returns what was wrong."""
        broken: dict[int, str] = {}
        for item in plan.items:
            choice = self._choices.get(item.seq.seq_id)
            if choice is None or choice.scores is None:
                continue
            wanted = choice.message.params.logprobs or 0
            for p in range(item.start, min(item.start + item.count, item.seq.num_prompt_tokens - 1)):
                if p + 1 == choice.num_scored:  # not again after a preemption
                    row = logits[first_row[item.seq.seq_id] + p - item.start]
                    try:
                        choice.scores.append(token_logprobs(row, item.seq.token_ids[p + 1], wanted))
                        choice.num_scored += 1
                    except NumericError as error:
                        broken[item.seq.seq_id] = error.message
                        break
        return broken

    def _locate(self, choice: Choice) -> dict[str, Any]:
        """Where NaN or Inf first appears for this sequence: {"layer", "op", "position"}. At most once a second, and
        not for long sequences: a GPU that has gone bad must not make the others wait for a diagnosis."""
        where: dict[str, Any] = {"located": False, "position": len(choice.sequence.token_ids) - 1}
        if time.monotonic() - self._located_at < LOCATE_SECONDS or len(choice.sequence.token_ids) > LOCATE_TOKENS:
            return where
        try:
            return self._probe.find_nonfinite(choice.sequence.token_ids) or where
        except (EngineError, ValueError, IndexError) as error:  # a diagnosis never ends more than it explains
            log_event(log, logging.WARNING, "not_located", str(error))
            return where
        finally:
            self._located_at = time.monotonic()

    # ---- what a step means for a choice ----------------------------------------------------------------------------

    def _choice(self, sequence: Sequence) -> Choice:
        return self._choices[sequence.seq_id]

    def _failed(self, choice: Choice, text: str, where: dict[str, Any]) -> Tokens:
        where = {**where, "step": self._steps}
        index = choice.sequence.index
        log_event(log, logging.ERROR, "request_failed", text, req_id=choice.log_id, choice=index, **where)
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
        scores = choice.scores
        if scores:
            choice.scores = []
        if sequence.finished:
            self._forget(choice)
        return Tokens(
            request_id=choice.message.request_id,
            index=sequence.index,
            token_ids=token_ids or [],
            cached_tokens=sequence.num_cached_tokens if first else 0,
            prompt_logprobs=scores or None,
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
            longest_step_seconds=self._longest_step_seconds,
            rss_bytes=resident_bytes(),
        )

    def control(self, control_id: int, op: str, args: dict[str, Any]) -> list[CoreMessage]:
        """Start answering an operator's question; long answers come out of later steps. Wrong arguments are refused."""
        try:
            match op:
                case "golden":
                    prompt_ids = _arguments(op, args, GoldenArgs).prompt_ids
                    self._check_prompt(prompt_ids, 1)
                    self._jobs.start(control_id, self._probe.golden(prompt_ids))
                    return []
                case "checksum":
                    _arguments(op, args, NoArgs)
                    self._jobs.start(control_id, checksum(self.weights))
                    return []
                case "drop_prefix_cache":
                    _arguments(op, args, NoArgs)
                    pages = self.kv_cache.drop_prefix_cache()
                    return [ControlReply(control_id=control_id, ok=True, result={"pages": pages})]
            raise AdmissionError(f"unknown control operation {op!r}")
        except AdmissionError as error:
            return [ControlReply(control_id=control_id, ok=False, error=error.message, refused=True)]

    def cancel_control(self, control_id: int) -> None:
        self._jobs.cancel(control_id)


def _arguments(op: str, args: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(args, kind)
    except msgspec.ValidationError as error:
        raise AdmissionError(f"arguments of {op}: {error}") from error

"""The engine without processes: requests in, one `step()` at a time, messages out. engine/core.py wraps it.

A step reads in call order: expire deadlines -> schedule -> launch -> collect the oldest step in flight -> commit ->
finish. With a backend that takes two plans, step n+1 is launched before step n is collected: what step n decides (stop
tokens, errors) and what happens meanwhile (aborts, deadlines, preemption) makes rows of step n+1 worthless, and those
are dropped here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.backend import Backend, Failure, LoadProgress, Pending, StepResult, StepWork, create_backend
from engine.choice import Choice
from engine.config import ModelConfig
from engine.core_config import CoreConfig, context_length, scheduler_config, with_defaults
from engine.errors import AdmissionError, ConfigError, DeviceLost, EngineError
from engine.host_memory import resident_bytes
from engine.kv_cache import KVCache
from engine.log import log_event
from engine.messages import CoreMessage, Fault, Generate, Ready, Stats, Tokens
from engine.operations import Operations
from engine.probe import Probe
from engine.sampler import SampleState
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from engine.types import PAGE_TOKENS, FinishReason, SampleResult

log = logging.getLogger("appliance.engine")

IDLE_STATS_SECONDS = 0.5
MAX_FAILED_STEPS = 3
LOCATE_SECONDS = 1.0  # least time between two searches for the layer where NaN began
LOCATE_TOKENS = 2048  # longest sequence that is searched


@dataclass(slots=True)
class _InFlight:
    """A step that was launched, or could not be: then `error` fails its plan when its turn comes."""

    plan: StepPlan
    choices: list[Choice]  # of plan.items
    pending: Pending | None
    error: Exception | None = None


class Engine:
    """Owner of backend, scheduler and KV cache of one model. Not thread-safe: one caller, engine-core's loop."""

    def __init__(self, config: CoreConfig, model: ModelConfig, backend: Backend, *, load_seconds: float = 0.0) -> None:
        self.config, self.model, self.backend = with_defaults(config), model, backend
        asked = context_length(config, model.max_position)
        self.max_model_len = min(asked, backend.max_model_len)
        if self.max_model_len < asked:
            note = f"the KV pool holds {self.max_model_len} tokens, so the context is that and not {asked}"
            log_event(log, logging.WARNING, "context_cut", note)
        self.kv_cache = KVCache(backend.num_pages)
        limits = scheduler_config(self.config, self.max_model_len, plans_in_flight=backend.plans_in_flight)
        self.scheduler = Scheduler(limits, self.kv_cache)
        self.ready = Ready(
            kv_pages=backend.num_pages,
            max_model_len=self.max_model_len,
            vocab_size=model.vocab_size,
            weights_bytes=backend.weights_bytes,
            weights_checksum=backend.weights_checksum,
            load_seconds=load_seconds,
            backend=backend.name,
            device=backend.device_id,
        )
        self._choices: dict[int, Choice] = {}  # by sequence id
        self._by_request: dict[str, dict[int, int]] = {}  # request id -> choice index -> sequence id
        self._in_flight: deque[_InFlight] = deque()
        self._next_seq_id = 1
        self._steps = 0
        self._last_step_seconds = 0.0
        self._longest_step_seconds = self._warm_step_seconds = 0.0
        self._stats_at = 0.0
        self._located_at = -LOCATE_SECONDS
        self._failed_steps = 0
        self._probe = Probe(backend, self.kv_cache, PAGE_TOKENS)  # short pieces: the streams wait for each
        self._faults = 0  # reported so far
        self._operations = Operations(
            backend, self.kv_cache, self._probe, self._check_prompt,
            allow_fault_injection=self.config.allow_fault_injection,
        )  # fmt: skip

    @classmethod
    def load(cls, config: CoreConfig, *, progress: LoadProgress | None = None) -> Engine:
        """Read the model directory and make everything ready for the first step. Any EngineError is final."""
        config = with_defaults(config)
        started = time.monotonic()
        model = ModelConfig.from_dir(Path(config.model_dir))
        backend = create_backend(config, model, progress)
        load_seconds = time.monotonic() - started
        log_event(
            log, logging.INFO, "weights_loaded", bytes=backend.weights_bytes, seconds=round(load_seconds, 3),
            backend=backend.name, checksum=backend.weights_checksum,
        )  # fmt: skip
        try:
            engine = cls(config, model, backend, load_seconds=load_seconds)
            engine.warm_up(progress)
        except BaseException:
            backend.close()
            raise
        return engine

    def warm_up(self, progress: LoadProgress | None = None) -> None:
        """Compute something before anybody is told that we are ready. ConfigError when the model answers NaN."""
        self.backend.warm_up(partial(progress, "warm-up") if progress is not None else None)
        limits = self.scheduler.config
        prompt_ids = [0] * min(self.max_model_len, limits.prefill_chunk + 1)
        started = time.monotonic()
        if not self._probe.is_finite(prompt_ids):
            where = self._probe.find_nonfinite(prompt_ids)
            raise ConfigError(f"the model computes NaN or Inf at warm-up: {where}", hint="check its files and dtype")
        per_token = (time.monotonic() - started) / len(prompt_ids)
        self._warm_step_seconds = self._longest_step_seconds = per_token * limits.max_batch_tokens

    def close(self) -> None:
        self._operations.close()
        self.backend.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._operations)

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, message: Generate) -> list[CoreMessage]:
        """Queue every choice. A request that can never be served is answered at once with finish_reason error."""
        try:
            self._check_prompt(message.prompt_ids, message.params.max_tokens)
            states = [
                SampleState(message.params, message.prompt_ids, self.model.vocab_size, index)
                for index in range(message.n)
            ]
            self.backend.check(states[0])
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
        """Launch the next forward pass, if there is one, and say what came of the oldest in flight."""
        out: list[CoreMessage] = []
        now = time.monotonic()
        for sequence in self.scheduler.expire(now):
            out.append(self._report(self._choices[sequence.seq_id]))
        launched = self._launch_next()
        collect = bool(self._in_flight) and not (launched and len(self._in_flight) < self.backend.plans_in_flight)
        if collect:
            out += self._collect(self._in_flight.popleft())
            self._steps += 1
            self._last_step_seconds = time.monotonic() - now
            # Slowly forgotten: one step that was held up (a stopped process) must not excuse silence for ever.
            expected = max(self._warm_step_seconds, 0.99 * self._longest_step_seconds)
            self._longest_step_seconds = max(expected, self._last_step_seconds)
        out += self._operations.advance()
        busy = collect or launched
        if not busy and not self.has_work and now - self._stats_at >= IDLE_STATS_SECONDS:
            self.scheduler.check_integrity()  # cheap when idle, and the moment a leak is provable
        if collect or now - self._stats_at >= IDLE_STATS_SECONDS:
            self._stats_at = now
            out.append(self.stats())
        return out

    def _launch_next(self) -> bool:
        """Schedule and launch one more step, if the backend takes one. False if there was nothing to launch."""
        if len(self._in_flight) >= self.backend.plans_in_flight or any(step.error for step in self._in_flight):
            return False  # what a failed plan should have sampled is nobody's input
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        choices = [self._choices[item.seq.seq_id] for item in plan.items]
        scoring = {
            item.seq.seq_id: wanted
            for item, choice in zip(plan.items, choices)
            if choice.scores is not None and (wanted := choice.wanted_scores(item)) is not None
        }
        step = _InFlight(plan, choices, None)
        try:
            step.pending = self.backend.launch(StepWork(plan, [choice.sampling for choice in choices], scoring))
        except DeviceLost:
            raise
        except (EngineError, ValueError, IndexError) as error:  # refused before it wrote anything: a bug of ours
            step.error = error
        self._in_flight.append(step)
        return True

    def _collect(self, step: _InFlight) -> list[CoreMessage]:
        try:
            if step.error is not None:
                raise step.error
            assert step.pending is not None
            result = self.backend.collect(step.pending)
        except DeviceLost:
            raise
        except (EngineError, ValueError, IndexError) as error:
            return self._fail_step(step, error)
        self._failed_steps = 0
        return self._commit(step, result)

    def _fail_step(self, step: _InFlight, error: Exception) -> list[CoreMessage]:
        ids = sorted({choice.log_id for choice in step.choices})
        log_event(log, logging.ERROR, "step_failed", str(error), step=self._steps, req_ids=ids, exc_info=error)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:  # not these requests' fault: be replaced, not half alive
            raise EngineError(f"{self._failed_steps} steps in a row failed: {error}") from error
        where = {"op": "step", "step": self._steps}
        failed = self.scheduler.fail(step.plan)
        ends = [self._report(self._choices[seq.seq_id], error=str(error), error_where=where) for seq in failed]
        return [self._fault("step", str(error), where), *ends]

    def _commit(self, step: _InFlight, result: StepResult) -> list[CoreMessage]:
        """Take in what a step computed, but for sequences that have ended since it was launched."""
        alive = [(item, choice) for item, choice in zip(step.plan.items, step.choices) if not item.seq.finished]
        broken = {item.seq.seq_id: result.failures[item.seq.seq_id] for item, _ in alive
                  if item.seq.seq_id in result.failures}  # fmt: skip
        tokens: dict[int, int] = {}
        stopped: dict[int, FinishReason] = {}
        for item, choice in alive:
            seq_id = item.seq.seq_id
            choice.keep_scores(item, result.scores.get(seq_id, ()))
            if item.samples and seq_id not in broken:
                token_id = tokens[seq_id] = result.samples[seq_id].token_id
                choice.sampling.append(token_id)
                if token_id in choice.stop_ids:
                    stopped[seq_id] = FinishReason.STOP
        places = {seq_id: self._locate(self._choices[seq_id], failure.where) for seq_id, failure in broken.items()}
        ended = self.scheduler.commit(step.plan, tokens, stopped | dict.fromkeys(broken, FinishReason.ERROR))
        out: list[CoreMessage] = []
        for seq_id, failure in broken.items():
            out += self._failed(self._choices[seq_id], failure, places[seq_id])
        for _, choice in alive:
            if choice.sequence.seq_id in tokens:
                out.append(self._result(choice, result.samples[choice.sequence.seq_id]))
        # Those that sampled nothing but have something to say: max_tokens = 0 (echo) ends with its prompt, and the
        # scores of a long prompt go out chunk by chunk, so that no message grows with the prompt.
        ended_ids = {sequence.seq_id for sequence in ended}
        for item, _ in alive:
            silent = self._choices.get(item.seq.seq_id)
            if silent is not None and (item.seq.seq_id in ended_ids or silent.scores):
                out.append(self._report(silent))
        return out

    def abandon(self, error: DeviceLost) -> list[CoreMessage]:
        """The last messages of an engine whose device is lost: every request that is not answered yet ends with an
        error that says where. Nothing on the device is touched any more."""
        self._in_flight.clear()
        out: list[CoreMessage] = []
        for choice in list(self._choices.values()):
            self.scheduler.finish(choice.sequence.seq_id, FinishReason.ERROR)
            out.append(self._report(choice, error=error.message, error_where={**error.where, "step": self._steps}))
        return out

    def _locate(self, choice: Choice, known: dict[str, Any] | None) -> dict[str, Any]:
        """Where NaN or Inf first appears for this sequence: {"layer", "op", "position"}. Unless the device told, it is
        searched for, at most once a second and not for long sequences: a GPU that has gone bad must not make the others
        wait for a diagnosis."""
        if known is not None:
            return known
        where: dict[str, Any] = {"located": False, "position": len(choice.sequence.token_ids) - 1}
        if time.monotonic() - self._located_at < LOCATE_SECONDS or len(choice.sequence.token_ids) > LOCATE_TOKENS:
            return where
        try:
            return self._probe.find_nonfinite(choice.sequence.token_ids) or where
        except DeviceLost:
            raise
        except (EngineError, ValueError, IndexError) as error:  # a diagnosis never ends more than it explains
            log_event(log, logging.WARNING, "not_located", str(error))
            return where
        finally:
            self._located_at = time.monotonic()

    # ---- what a step means for a choice ----------------------------------------------------------------------------

    def _failed(self, choice: Choice, failure: Failure, where: dict[str, Any]) -> list[CoreMessage]:
        where = {**where, "step": self._steps}
        index = choice.sequence.index
        log_event(log, logging.ERROR, "request_failed", failure.text, req_id=choice.log_id, choice=index, **where)
        kind = str(where.get("error", "nonfinite"))  # without the device's own word it is what the sampler found
        return [self._fault(kind, failure.text, where), self._report(choice, error=failure.text, error_where=where)]

    def _fault(self, kind: str, error: str, where: dict[str, Any]) -> Fault:
        self._faults += 1
        return Fault(number=self._faults, kind=kind, error=error, where=where, at=time.monotonic())

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
        return [*self._operations.start(control_id, op, args)]

    def cancel_control(self, control_id: int) -> None:
        self._operations.cancel(control_id)

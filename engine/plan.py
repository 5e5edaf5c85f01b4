"""What the scheduler hands out and is configured with; scheduler.py re-exports all of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import AdmissionError, ConfigError
from engine.fair_queue import NUM_BUCKETS
from engine.types import PAGE_TOKENS, FinishReason

if TYPE_CHECKING:
    from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step. None of them changes a result, only speed and waiting times.

    `max_batch_tokens` must leave a page of prefill beside a full batch of decodes, so that neither starves the other.
    """

    max_model_len: int  # prompt + output tokens of one sequence
    max_batch_tokens: int = 2048  # of one step, decode and prefill together
    max_batch_seqs: int = 256  # sequences that run at once
    prefill_chunk: int = 512  # most prefill tokens of a step in which others decode (bounds their ITL)
    bucket_weights: tuple[int, ...] = (4, 3, 2, 1)  # prefill shares of the length buckets, short to long
    max_overtakes: int = 64  # guarantee 2 of fair_queue.py
    max_plans_in_flight: int = 2
    prefix_cache: bool = True
    watermark_pages: int | None = None  # kept free for running sequences at admission; None = 1 % of the pool, >= 1

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_batch_seqs", "max_overtakes", "max_plans_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.prefill_chunk < PAGE_TOKENS or self.prefill_chunk % PAGE_TOKENS:
            raise ConfigError(
                f"prefill_chunk is {self.prefill_chunk}; it must be a multiple of {PAGE_TOKENS}",
                hint=f"use {PAGE_TOKENS}, {2 * PAGE_TOKENS} or {4 * PAGE_TOKENS}",
            )
        if self.max_batch_tokens < self.max_batch_seqs + PAGE_TOKENS:
            raise ConfigError(
                f"max_batch_tokens is {self.max_batch_tokens}; {self.max_batch_seqs} decoding sequences and one page "
                f"of prefill need {self.max_batch_seqs + PAGE_TOKENS}",
                hint="raise max_batch_tokens or lower max_batch_seqs",
            )
        if len(self.bucket_weights) != NUM_BUCKETS or min(self.bucket_weights) < 1:
            raise ConfigError(f"bucket_weights is {self.bucket_weights}; it must be {NUM_BUCKETS} whole numbers >= 1")
        if self.watermark_pages is not None and self.watermark_pages < 0:
            raise ConfigError(f"watermark_pages is {self.watermark_pages}; it must not be negative")

    def check_admissible(self, num_prompt_tokens: int, max_tokens: int, total_pages: int) -> None:
        """Raises AdmissionError if such a request could never be served, even alone in a pool of `total_pages`."""
        if num_prompt_tokens < 1:
            raise AdmissionError("the prompt has no tokens", hint="send at least one token")
        if max_tokens < 0:
            raise AdmissionError(f"max_tokens is {max_tokens}; it must not be negative")
        total = num_prompt_tokens + max_tokens
        asked = f"{num_prompt_tokens} prompt tokens + max_tokens {max_tokens}"
        if total > self.max_model_len:
            raise AdmissionError(
                f"{asked} = {total}, but the context is {self.max_model_len} tokens",
                hint="shorten the prompt"
                if num_prompt_tokens >= self.max_model_len
                else f"shorten the prompt or ask for at most {self.max_model_len - num_prompt_tokens} tokens",
            )
        need = pages_for(num_prompt_tokens + max(max_tokens, 1) - 1)  # the last sampled token needs no slot
        if need > total_pages:
            raise AdmissionError(
                f"{asked} need {need} KV pages of {PAGE_TOKENS} tokens, but the pool has {total_pages}",
                hint="shorten the request or give the engine more memory",
            )


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(slots=True)
class ScheduledSeq:
    """Tokens [start, start + count) of one sequence.

    `samples`: the logits of the last of them are wanted, a token is sampled. `token_pending` (decode only, count 1):
    the input token is the one that the previous plan in flight samples for this sequence; it is not in
    `seq.token_ids` yet, the runner takes it from where that plan left it.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool
    token_pending: bool = False


@dataclass(slots=True)
class StepPlan:
    """One forward pass: decodes first (oldest admission first), then prefill chunks. Each sequence at most once."""

    step: int
    items: list[ScheduledSeq]
    num_decodes: int
    num_tokens: int


@dataclass(slots=True)
class SchedulerStats:
    """Gauges of now and totals since start."""

    kv_pages_total: int
    kv_pages_free: int
    kv_pages_cached: int
    kv_slots_unused: int  # token slots in the pages of running sequences that hold nothing yet
    running: int
    waiting: int
    waiting_by_bucket: dict[str, int]
    steps: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    cache_evictions: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)

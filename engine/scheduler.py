"""Continuous batching: decides which tokens of which sequences the next forward pass computes.

Every step each decoding sequence gets its token first; what is left of the step goes to prefill, in chunks that end on
page borders (or at the end of what is known), shared between the length buckets by fair_queue.py. A sequence is
admitted only when all pages of its known tokens are free, so a prefill that has begun never waits for memory; a decode
that finds no page preempts the youngest sequence, which later recomputes what it lost (tokens are kept).

Nothing here may change a result: chunking, batching, cache hits and preemption only decide when a token is computed.
Same calls, same plans: no clock, hash seed or set order is involved, except through deadlines.

Overlap, for a backend that wants step n+1 queued while step n runs: call schedule() again before commit(). A decoding
sequence whose token is still being computed is planned with `token_pending` set: the input of that row is the token
which the previous plan samples. Plans are committed in the order in which they were made. If a commit ends a sequence
which a later plan in flight holds, that plan's row is computed for nothing, its token is dropped, and the pages are
freed when that plan is committed; the same holds for abort() and for preemption. With one plan at a time (schedule,
forward, commit) pages are freed at once.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from engine.deadlines import Deadlines
from engine.fair_queue import BUCKET_NAMES, FairQueue, bucket_of
from engine.kv_cache import IntegrityError, KVCache
from engine.plan import ScheduledSeq, SchedulerConfig, SchedulerStats, StepPlan
from engine.sequence import SeqState, Sequence
from engine.types import PAGE_TOKENS, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "BUCKET_NAMES",
    "IntegrityError",
    "KVCache",
    "ScheduledSeq",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SeqState",
    "Sequence",
    "StepPlan",
    "bucket_of",
]

# Looked up once: an enum member costs more than the rest of a line, and these run for every sequence of every step.
_RUNNING, _DRAINING, _FINISHED = SeqState.RUNNING, SeqState.DRAINING, SeqState.FINISHED
_ERROR = FinishReason.ERROR
_NOTHING_STOPPED: dict[int, FinishReason] = {}


class Scheduler:
    """Owner of every sequence and of the page pool. One thread; no call blocks."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVCache, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.kv = kv_cache
        self._clock = clock
        self._queue = FairQueue(config.bucket_weights, config.max_overtakes)
        self._seqs: dict[int, Sequence] = {}  # all that have not ended
        self._decoding: dict[int, Sequence] = {}  # whole prefill scheduled, in that order
        self._draining: dict[int, Sequence] = {}  # preempted, still in a plan in flight
        self._retiring: dict[int, Sequence] = {}  # ended, still in a plan in flight
        self._in_flight: deque[StepPlan] = deque()
        self._deadlines = Deadlines(self._seqs)
        self._next_order = 0
        watermark = config.watermark_pages
        self._watermark = max(1, kv_cache.total_pages // 100) if watermark is None else watermark
        self._steps = 0
        self._preemptions = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0
        self._finished = dict.fromkeys(FinishReason, 0)

    # ---- requests come and go ----------------------------------------------------------------------------------------

    def check_admissible(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises AdmissionError if such a request could never be served, even alone."""
        self.config.check_admissible(num_prompt_tokens, max_tokens, self.kv.total_pages)

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence. AdmissionError as check_admissible(); ValueError if its id is in use."""
        self.check_admissible(seq.num_prompt_tokens, seq.max_tokens)
        if seq.seq_id in self._seqs or seq.seq_id in self._retiring:
            raise ValueError(f"sequence id {seq.seq_id} is in use")
        if seq.state is not SeqState.WAITING or seq.block_table or seq.num_output_tokens:
            raise ValueError(f"{seq!r} was scheduled before; make a new Sequence")
        if seq.arrival is None:
            seq.arrival = self._clock()
        seq.order = self._next_order
        self._next_order += 1
        seq.bucket = bucket_of(seq.num_prompt_tokens)
        self._seqs[seq.seq_id] = seq
        self._queue.push(seq)
        self._deadlines.push(seq)

    def finish(self, seq_id: int, reason: FinishReason) -> bool:
        """Ends a sequence in any state and frees its pages (once no plan in flight holds it). False, and nothing
        happens, if it has ended already. With ERROR its pages also leave the prefix cache, in case they are why."""
        seq = self._seqs.pop(seq_id, None)
        if seq is None:
            return False
        if seq.state is SeqState.WAITING:
            self._queue.remove(seq)
        else:
            self._stop_running(seq)
            self._draining.pop(seq_id, None)
        seq.state = _FINISHED
        seq.finish_reason = reason
        self._finished[reason] += 1
        if reason is FinishReason.ERROR:
            self.kv.forget(seq.block_table)
        if seq.num_in_flight:
            self._retiring[seq_id] = seq
        else:
            self.kv.detach(seq)
        return True

    def abort(self, seq_id: int) -> bool:
        """finish() with ABORT: allowed at any time, for any id, any number of times."""
        return self.finish(seq_id, FinishReason.ABORT)

    def expire(self, now: float | None = None) -> list[Sequence]:
        """Ends every sequence whose deadline is at or before `now` and returns them, earliest deadline first."""
        now = self._clock() if now is None else now
        expired = list(self._deadlines.pop_expired(now))
        for seq in expired:
            self.finish(seq.seq_id, FinishReason.DEADLINE)
        return expired

    # ---- a step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next forward pass; None if nothing can be computed before the next commit() or add()."""
        if len(self._in_flight) >= self.config.max_plans_in_flight:
            raise RuntimeError(f"{len(self._in_flight)} plans are in flight; commit() the oldest first")
        self._grow_decodes()
        items = self._plan_decodes()
        num_decodes = num_tokens = len(items)
        budget = self.config.max_batch_tokens - num_decodes
        if num_decodes:
            budget = min(budget, self.config.prefill_chunk)
        num_tokens += self._plan_prefill(items, budget)
        if not items:
            return None
        self._steps += 1
        plan = StepPlan(self._steps, items, num_decodes, num_tokens)
        self._in_flight.append(plan)
        return plan

    def _plan_decodes(self) -> list[ScheduledSeq]:
        items = []
        for seq in self._decoding.values():
            start = seq.num_scheduled_tokens
            if start == seq.scheduling_limit:
                continue  # its last token is in flight already, or it waits for a page that is being drained
            seq.num_scheduled_tokens = start + 1
            seq.num_in_flight += 1
            items.append(ScheduledSeq(seq, start, 1, True, start >= len(seq.token_ids)))
        return items

    def _grow_decodes(self) -> None:
        """Gives a page to each decoding sequence that is at the end of its last one, the oldest first."""
        full = [seq for seq in self._decoding.values() if seq.num_scheduled_tokens == seq.scheduling_limit]
        for seq in sorted(full, key=_order):
            if seq.scheduling_limit < seq.max_kv_tokens and seq.state is _RUNNING and self._make_room(seq):
                self.kv.grow(seq)

    def _make_room(self, seq: Sequence) -> bool:
        """Preempts the youngest until a page is free. False if `seq` itself was the youngest, or if it must wait for
        plans in flight that hold the pages of those already given up."""
        while not self.kv.free_pages:
            if self._draining or self._retiring:
                return False
            victim = max(self._running(), key=_order)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _running(self) -> list[Sequence]:
        return [*self._decoding.values(), *(seq for seq in self._queue.partial if seq is not None)]

    def _preempt(self, seq: Sequence) -> None:
        self._stop_running(seq)
        self._preemptions += 1
        seq.num_preemptions += 1
        seq.state = _DRAINING
        self._draining[seq.seq_id] = seq
        if not seq.num_in_flight:
            self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        del self._draining[seq.seq_id]
        self.kv.detach(seq)
        seq.state = SeqState.WAITING
        self._queue.push_front(seq)

    def _stop_running(self, seq: Sequence) -> None:
        self._decoding.pop(seq.seq_id, None)
        if self._queue.partial[seq.bucket] is seq:
            self._queue.partial[seq.bucket] = None

    # ---- prefill -----------------------------------------------------------------------------------------------------

    def _plan_prefill(self, items: list[ScheduledSeq], budget: int) -> int:
        """Hands out up to `budget` tokens of prefill, a page at a time; returns how many. Appends to `items`."""
        queue = self._queue
        left = budget
        chunks: dict[int, ScheduledSeq] = {}  # of this step, by sequence
        unfit: set[int] = set()  # buckets that have nothing to run now
        skip: set[int] = set()
        while left and (bucket := queue.next_bucket(skip)) is not None:
            seq = queue.partial[bucket]
            if seq is None:
                seq = self._admit(bucket)
                if seq is None:
                    unfit.add(bucket)
                    skip.add(bucket)
                    continue
            count = min(PAGE_TOKENS, len(seq.token_ids) - seq.num_scheduled_tokens)
            if count > left:  # a chunk that is not the last one ends on a page border
                skip.add(bucket)
                continue
            left -= count
            queue.charge(bucket, count)
            self._extend_chunk(seq, count, chunks, items)
        queue.end_step(unfit)
        return budget - left

    def _extend_chunk(
        self, seq: Sequence, count: int, chunks: dict[int, ScheduledSeq], items: list[ScheduledSeq]
    ) -> None:
        item = chunks.get(seq.seq_id)
        if item is None:
            item = chunks[seq.seq_id] = ScheduledSeq(seq, seq.num_scheduled_tokens, 0, False)
            items.append(item)
            seq.num_in_flight += 1
        item.count += count
        seq.num_scheduled_tokens += count
        if seq.num_scheduled_tokens == len(seq.token_ids):
            item.samples = seq.max_tokens > 0
            self._queue.partial[seq.bucket] = None
            self._decoding[seq.seq_id] = seq

    def _admit(self, bucket: int) -> Sequence | None:
        """Gives the head of a bucket the pages of all its known tokens, or None if it must wait."""
        seq = self._queue.head(bucket)
        assert seq is not None
        num_running = self.num_running
        if num_running >= self.config.max_batch_seqs:
            self._queue.refuse(bucket)
            return None
        use_cache = self.config.prefix_cache and seq.allow_prefix_hit
        if not self.kv.attach(seq, use_cache=use_cache, keep_free=self._headroom(seq, num_running)):
            self._queue.refuse(bucket)
            return None
        seq.state = _RUNNING
        if not seq.num_preemptions:
            seq.num_cached_tokens = seq.num_computed_tokens
            self._prefix_hit_tokens += seq.num_cached_tokens
            self._prefix_query_tokens += seq.num_prompt_tokens if use_cache else 0
        self._queue.admitted(seq)
        return seq

    def _headroom(self, seq: Sequence, num_running: int) -> int:
        """Pages an admission must leave free; none if `seq` runs alone (check_admissible: it fits).

        If it was preempted before, one for itself and each running sequence: so many borders are crossed in the next
        PAGE_TOKENS steps, so it stays at least that long and recomputing it was worth the while.
        """
        if not num_running:
            return 0
        return max(num_running + 1, self._watermark) if seq.num_preemptions else self._watermark

    # ---- results -----------------------------------------------------------------------------------------------------

    def commit(
        self,
        plan: StepPlan,
        tokens: Mapping[int, int],
        stopped: Mapping[int, FinishReason] = _NOTHING_STOPPED,
    ) -> list[Sequence]:
        """Takes in the results of the oldest plan in flight, after its forward pass: appends the sampled tokens
        (seq_id -> token id), publishes full pages to the prefix cache, and ends sequences. Returns those that ended.

        `stopped` ends sequences of this plan: STOP with its last token in `tokens`, ERROR without one. Those that
        reached max_tokens end with LENGTH. Entries for sequences that ended before are ignored. ValueError, and
        nothing is changed, if the plan is not the oldest or a sampling sequence has neither token nor reason.
        """
        if not self._in_flight or self._in_flight[0] is not plan:
            raise ValueError(f"step {plan.step} is not the oldest plan in flight")
        for item in plan.items:
            if item.samples and item.seq.seq_id not in tokens:
                self._check_excused(plan, item.seq, stopped)
        self._in_flight.popleft()
        use_cache = self.config.prefix_cache
        ended = []
        for item in plan.items:
            seq = item.seq
            seq.num_in_flight -= 1
            state = seq.state
            if state is _FINISHED:
                self._retire(seq)
                continue
            reason = stopped.get(seq.seq_id) if stopped else None
            if reason is not _ERROR:
                end = seq.num_computed_tokens = item.start + item.count
                if item.samples and (token := tokens.get(seq.seq_id)) is not None:
                    seq.token_ids.append(token)
                if use_cache and end // PAGE_TOKENS > seq.num_published_pages:
                    self.kv.publish(seq)
                if reason is None and end >= seq.max_kv_tokens:
                    reason = FinishReason.LENGTH
            if reason is not None:
                self.finish(seq.seq_id, reason)
                ended.append(seq)
            elif state is _DRAINING and not seq.num_in_flight:
                self._requeue(seq)
        return ended

    @staticmethod
    def _check_excused(plan: StepPlan, seq: Sequence, stopped: Mapping[int, FinishReason]) -> None:
        if seq.seq_id not in stopped and seq.state is not _FINISHED:
            raise ValueError(f"step {plan.step} sampled for sequence {seq.seq_id} but no token was given")

    def _retire(self, seq: Sequence) -> None:
        if not seq.num_in_flight:
            self.kv.detach(seq)
            del self._retiring[seq.seq_id]

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The forward pass of the oldest plan in flight failed as a whole: ends its sequences with ERROR."""
        reasons = {item.seq.seq_id: FinishReason.ERROR for item in plan.items}
        return self.commit(plan, {}, reasons)

    # ---- what others may know ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._seqs or self._in_flight)

    @property
    def num_running(self) -> int:
        return len(self._decoding) + self._queue.num_partial()

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._draining)

    def waiting_by_bucket(self) -> dict[str, int]:
        return self._queue.waiting_by_bucket()

    def get(self, seq_id: int) -> Sequence | None:
        """The sequence with this id, unless it has ended."""
        return self._seqs.get(seq_id)

    @property
    def stats(self) -> SchedulerStats:
        """O(running)."""
        return SchedulerStats(
            kv_pages_total=self.kv.total_pages,
            kv_pages_free=self.kv.free_pages,
            kv_pages_cached=self.kv.cached_pages,
            kv_slots_unused=sum(seq.unused_slots for seq in self._running()),
            running=self.num_running,
            waiting=self.num_waiting,
            waiting_by_bucket=self.waiting_by_bucket(),
            steps=self._steps,
            preemptions=self._preemptions,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            cache_evictions=self.kv.evictions,
            finished=dict(self._finished),
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError naming the page or the sequence if the book-keeping contradicts itself. O(pool)."""
        holders = [*self._running(), *self._draining.values(), *self._retiring.values()]
        self.kv.check_integrity(holders)
        for seq in self._queue:
            if seq.block_table or seq.num_in_flight or seq.state is not SeqState.WAITING:
                raise IntegrityError(f"{seq!r} waits but holds pages or is in a plan in flight")
        if len(self._seqs) != len(self._running()) + len(self._draining) + len(self._queue):
            raise IntegrityError(f"{len(self._seqs)} sequences are alive but not each is in exactly one place")


def _order(seq: Sequence) -> int:
    return seq.order

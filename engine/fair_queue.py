"""Which waiting sequence gets prefill tokens next: first come first served inside a length bucket, weighted fair
sharing between the buckets, and a bound on how often a sequence that does not fit is overtaken.

Two guarantees, both tested:
1. Compute. While buckets a and b both have prefill work that fits, the tokens they get stay in proportion to their
   weights: |tokens_a / weight_a - tokens_b / weight_b| <= 2 * (PAGE_TOKENS / weight_a + PAGE_TOKENS / weight_b)
   (start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996, with one page as the largest quantum; twice their
   bound because the end of a step, too small for a whole page, goes to whoever can use it). So a short prompt waits
   at most for the other buckets' shares, never for a whole long prompt, and long prompts always move.
2. Memory and slots. Once the head of a bucket was refused for want of pages or a slot, other buckets admit at most
   `max_overtakes` later arrivals before that bucket admits one; then all admission waits until what runs has freed
   enough for it. A sequence with k others before it in its bucket: at most (k + 1) * max_overtakes.
A share that a bucket cannot use (nothing waits, nothing fits, or guarantee 2 holds it back) is not saved up.
"""

from __future__ import annotations

from collections import OrderedDict
from math import lcm
from typing import TYPE_CHECKING

from engine.sequence import Sequence
from engine.types import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET_LIMITS = (128, 512, 2048)
"""Prompt tokens: a prompt is in the first bucket whose limit it does not exceed, else in the last one."""
BUCKET_NAMES = ("1-128", "129-512", "513-2048", "2049-8192+")
NUM_BUCKETS = len(BUCKET_NAMES)


def bucket_of(num_prompt_tokens: int) -> int:
    for bucket, limit in enumerate(BUCKET_LIMITS):
        if num_prompt_tokens <= limit:
            return bucket
    return NUM_BUCKETS - 1


class FairQueue:
    """Waiting sequences, and of each bucket the one whose prefill has begun (`partial`)."""

    def __init__(self, weights: tuple[int, ...], max_overtakes: int) -> None:
        self._waiting: list[OrderedDict[int, Sequence]] = [OrderedDict() for _ in range(NUM_BUCKETS)]
        self.partial: list[Sequence | None] = [None] * NUM_BUCKETS
        self._max_overtakes = max_overtakes
        self._refused = [False] * NUM_BUCKETS  # the head did not fit when it was its turn
        self._overtakes = [0] * NUM_BUCKETS  # admissions of later arrivals elsewhere since then
        scale = lcm(*weights)
        self._cost = [scale // weight for weight in weights]  # virtual time of one token
        self._time = [0] * NUM_BUCKETS
        self._max_lag = PAGE_TOKENS * max(self._cost)
        self._now = 0  # virtual time at which the last quantum was given

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._waiting:
            yield from queue.values()

    def waiting_by_bucket(self) -> dict[str, int]:
        return {name: len(queue) for name, queue in zip(BUCKET_NAMES, self._waiting)}

    def num_partial(self) -> int:
        return sum(seq is not None for seq in self.partial)

    def push(self, seq: Sequence) -> None:
        self._waiting[seq.bucket][seq.seq_id] = seq

    def push_front(self, seq: Sequence) -> None:
        """Puts a preempted sequence back where its arrival puts it: before every later arrival of its bucket.

        Preemption takes the youngest first, so the place is the front except when several sequences drain at once.
        """
        queue = self._waiting[seq.bucket]
        older = []
        for other in queue.values():
            if other.order > seq.order:
                break
            older.append(other.seq_id)
        queue[seq.seq_id] = seq
        queue.move_to_end(seq.seq_id, last=False)
        for seq_id in reversed(older):
            queue.move_to_end(seq_id, last=False)

    def remove(self, seq: Sequence) -> None:
        queue = self._waiting[seq.bucket]
        del queue[seq.seq_id]
        if not queue:
            self._refused[seq.bucket] = False
            self._overtakes[seq.bucket] = 0

    def head(self, bucket: int) -> Sequence | None:
        return next(iter(self._waiting[bucket].values()), None)

    def next_bucket(self, skip: set[int]) -> int | None:
        """The bucket to serve now, not one of `skip`; None if there is no work. Ties go to the shorter prompts."""
        urgent = self._urgent_bucket()
        best = None
        for bucket in range(NUM_BUCKETS):
            if bucket in skip or not self._may_run(bucket, urgent):
                continue
            if best is None or self._time[bucket] < self._time[best]:
                best = bucket
        return best

    def _may_run(self, bucket: int, urgent: int | None) -> bool:
        if self.partial[bucket] is not None:
            return True
        return bool(self._waiting[bucket]) and urgent in (None, bucket)

    def _urgent_bucket(self) -> int | None:
        """The bucket that was overtaken often enough; of several the one whose head is oldest."""
        urgent: Sequence | None = None
        for bucket in range(NUM_BUCKETS):
            if self._overtakes[bucket] < self._max_overtakes:
                continue
            seq = self.head(bucket)
            if seq and (urgent is None or seq.order < urgent.order):
                urgent = seq
        return None if urgent is None else urgent.bucket

    def refuse(self, bucket: int) -> None:
        """The head of `bucket` was offered tokens but no pages or no slot were free."""
        self._refused[bucket] = True

    def admitted(self, seq: Sequence) -> None:
        """The head of a bucket got its pages: it is the bucket's partial now, and an overtake of those refused."""
        self.remove(seq)
        self.partial[seq.bucket] = seq
        self._refused[seq.bucket] = False
        self._overtakes[seq.bucket] = 0
        for bucket in range(NUM_BUCKETS):
            other = self.head(bucket)
            if other and self._refused[bucket] and other.order < seq.order:
                self._overtakes[bucket] += 1

    def charge(self, bucket: int, num_tokens: int) -> None:
        """`num_tokens` <= PAGE_TOKENS of prefill went to `bucket`."""
        self._now = max(self._now, self._time[bucket])
        self._time[bucket] += num_tokens * self._cost[bucket]

    def end_step(self, unfit: set[int]) -> None:
        """Buckets that had nothing to run, or nothing that fits (`unfit`), do not save up the share they left."""
        urgent = self._urgent_bucket()
        for bucket in range(NUM_BUCKETS):
            idle = bucket in unfit or not self._may_run(bucket, urgent)
            floor = self._now if idle else self._now - self._max_lag
            self._time[bucket] = max(self._time[bucket], floor)

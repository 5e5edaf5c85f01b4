"""Deadlines of sequences that have not ended, earliest first."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engine.sequence import Sequence


class Deadlines:
    """A heap whose entries of ended sequences are dropped lazily; it stays within 2 * live + 64 entries."""

    def __init__(self, live: Mapping[int, Sequence]) -> None:
        """`live`: the owner's sequences by id; those no longer in it are of no interest."""
        self._live = live
        self._heap: list[tuple[float, int, Sequence]] = []  # (deadline, arrival number, sequence)

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, seq: Sequence) -> None:
        if seq.deadline is None:
            return
        heapq.heappush(self._heap, (seq.deadline, seq.order, seq))
        if len(self._heap) > 64 + 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._alive(entry[2])]
            heapq.heapify(self._heap)

    def pop_expired(self, now: float) -> Iterator[Sequence]:
        """Live sequences whose deadline is at or before `now` (seconds)."""
        while self._heap and self._heap[0][0] <= now:
            seq = heapq.heappop(self._heap)[2]
            if self._alive(seq):
                yield seq

    def _alive(self, seq: Sequence) -> bool:
        return self._live.get(seq.seq_id) is seq

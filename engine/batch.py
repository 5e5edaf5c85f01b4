"""From a plan to the arrays of one forward pass, and batches that compute a sequence from scratch beside the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.types import PAGE_TOKENS, StepBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from engine.kv_cache import KVCache
    from engine.plan import ScheduledSeq, StepPlan

PENDING = -1


def build_batch(plan: StepPlan, num_logits: Callable[[ScheduledSeq], int]) -> tuple[StepBatch, dict[int, int]]:
    """Lay the scheduled tokens end to end; `num_logits` says of how many of an item's last tokens logits are wanted.

    Returns the batch and, by sequence id, the index of its first logits row. The token id of a row whose token is
    pending is PENDING; whoever runs the batch puts the sampled one there.
    """
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
        known = item.seq.token_ids[item.start : item.start + item.count]
        token_ids[offset : ends[i]] = PENDING if item.token_pending else known
        block_tables[i, : len(item.seq.block_table)] = item.seq.block_table
        first_row[item.seq.seq_id] = len(rows)
        num_rows = num_logits(item)
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


def replay(kv_cache: KVCache, token_ids: list[int], chunk_tokens: int) -> Generator[tuple[int, StepBatch], None, None]:
    """(start, batch) of each chunk of a sequence that is computed from scratch beside the requests in flight, on
    borrowed pages that are given back at the end; logits at every position. OutOfPages if there are too few."""
    pages = kv_cache.allocate(-(-len(token_ids) // PAGE_TOKENS))
    try:
        table = np.array([pages], np.int32)
        for start in range(0, len(token_ids), chunk_tokens):
            chunk = np.array(token_ids[start : start + chunk_tokens], np.int32)
            rows = np.arange(len(chunk), dtype=np.int32)
            yield start, StepBatch(chunk, rows + np.int32(start), np.zeros_like(rows), table, rows)
    finally:
        kv_cache.release(pages)

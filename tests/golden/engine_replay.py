"""Runs known token sequences through the engine in every way it has, and returns the logits of every position.

Nothing is sampled: the tokens after the prompt are given ("teacher forcing"), so all ways compute the same thing.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.config import ModelConfig
from engine.loader import load_weights
from engine.runner import ModelRunner
from engine.scheduler import KVCache, Scheduler, SchedulerConfig, Sequence
from engine.types import PAGE_TOKENS, Float32Array, StepBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.scheduler import StepPlan

Ids = list[int]
MAX_BATCH_TOKENS = 1024


@dataclass
class Engine:
    """One model on the CPU backend, with the KV pool of its runner."""

    config: ModelConfig
    runner: ModelRunner

    @classmethod
    def load(cls, directory: Path, *, num_pages: int, max_model_len: int, num_threads: int = 2) -> Engine:
        config = ModelConfig.from_dir(directory)
        weights = load_weights(directory, config)
        return cls(
            config,
            ModelRunner(
                config,
                weights,
                num_pages=num_pages,
                num_threads=num_threads,
                max_batch_tokens=MAX_BATCH_TOKENS,
                max_model_len=max_model_len,
            ),
        )

    def forward(self, parts: list[tuple[Ids, int, int, list[int]]]) -> list[Float32Array]:
        """One step. Each part is (ids, start, count, block_table): tokens [start, start + count) of `ids`.
        Returns the logits (count, vocab) of each part."""
        width = max(len(table) for *_, table in parts)
        tables = np.full((len(parts), width), -1, np.int32)
        tokens, positions, owners = [], [], []
        for row, (ids, start, count, table) in enumerate(parts):
            tables[row, : len(table)] = table
            tokens += ids[start : start + count]
            positions += range(start, start + count)
            owners += [row] * count
        batch = StepBatch(
            np.asarray(tokens, np.int32),
            np.asarray(positions, np.int32),
            np.asarray(owners, np.int32),
            tables,
            np.arange(len(tokens), dtype=np.int32),
        )
        logits = self.runner.forward(batch)
        bounds = itertools.accumulate((count for _, _, count, _ in parts), initial=0)
        return [logits[a:b] for a, b in itertools.pairwise(bounds)]

    def in_chunks(self, ids: Ids, size: int) -> Float32Array:
        """Prefill in chunks of `size` (1 = a decode step a token), into pages in shuffled order. (len(ids), vocab)"""
        table = self._scattered_pages(len(ids), seed=size)
        starts = range(0, len(ids), size)
        return np.concatenate([self.forward([(ids, start, min(size, len(ids) - start), table)])[0] for start in starts])

    def _scattered_pages(self, num_tokens: int, seed: int) -> list[int]:
        return random.Random(seed).sample(range(self.runner.num_pages), -(-num_tokens // PAGE_TOKENS))


class Replay:
    """The engine's own scheduler and KV cache over one runner; `run` serves several sequences at once."""

    def __init__(
        self, engine: Engine, *, prefix_cache: bool, prefill_chunk: int = PAGE_TOKENS, num_pages: int | None = None
    ) -> None:
        self.engine = engine
        pages = engine.runner.num_pages if num_pages is None else num_pages
        config = SchedulerConfig(
            max_model_len=engine.runner.max_model_len,
            max_batch_tokens=max(prefill_chunk, 2 * PAGE_TOKENS),
            max_batch_seqs=32,
            prefill_chunk=prefill_chunk,
            prefix_cache=prefix_cache,
        )
        self.kv = KVCache(pages)
        self.scheduler = Scheduler(config, self.kv)
        self.cached_tokens: list[int] = []  # of each sequence of the last run()
        self._ids = itertools.count()

    def run(self, requests: list[tuple[Ids, int]]) -> list[dict[int, Float32Array]]:
        """Each request is (all ids, length of the prompt): the rest is decoded token by token. Returns, for each, the
        logits row of every position that was computed (those from the prefix cache are not)."""
        known = {next(self._ids): request for request in requests}
        rows: dict[int, dict[int, Float32Array]] = {seq_id: {} for seq_id in known}

        def forced(plan: StepPlan, logits: list[Float32Array]) -> dict[int, int]:
            tokens = {}
            for item, part in zip(plan.items, logits):
                for offset in range(item.count):
                    _keep(rows[item.seq.seq_id], item.start + offset, part[offset])
                if item.samples:
                    ids = known[item.seq.seq_id][0]
                    end = item.start + item.count
                    tokens[item.seq.seq_id] = ids[end] if end < len(ids) else 0
            return tokens

        self._drive(((seq_id, ids[:prompt], len(ids) - prompt + 1) for seq_id, (ids, prompt) in known.items()), forced)
        return list(rows.values())

    def greedy(self, prompts: list[Ids], count: int) -> list[Ids]:
        """`count` tokens of argmax (the lowest id of equals) after each prompt; all prompts in one running batch."""

        def best(plan: StepPlan, logits: list[Float32Array]) -> dict[int, int]:
            sampled = (item for item in zip(plan.items, logits) if item[0].samples)
            return {item.seq.seq_id: int(np.argmax(part[-1])) for item, part in sampled}

        sequences = self._drive(((next(self._ids), prompt, count) for prompt in prompts), best)
        return [sequence.output_ids for sequence in sequences]

    def _drive(
        self,
        requests: Iterable[tuple[int, Ids, int]],
        sample: Callable[[StepPlan, list[Float32Array]], dict[int, int]],
    ) -> list[Sequence]:
        sequences = [Sequence(seq_id, ids, max_tokens=count) for seq_id, ids, count in requests]
        for sequence in sequences:
            self.scheduler.add(sequence)
        limit = 4 * sum(sequence.num_prompt_tokens + sequence.max_tokens for sequence in sequences) + 16
        for _ in range(limit):
            plan = self.scheduler.schedule()
            if plan is None:
                break
            parts = [(item.seq.token_ids, item.start, item.count, item.seq.block_table) for item in plan.items]
            self.scheduler.commit(plan, sample(plan, self.engine.forward(parts)))
        assert not self.scheduler.has_work, f"not done after {limit} steps"
        self.scheduler.check_integrity()
        self.cached_tokens = [sequence.num_cached_tokens for sequence in sequences]
        return sequences


def _keep(rows: dict[int, Float32Array], position: int, row: Float32Array) -> None:
    """A position computed twice (after a preemption) must give the same bits."""
    if position in rows:
        assert np.array_equal(rows[position], row), f"position {position} changed when it was computed again"
    rows[position] = row

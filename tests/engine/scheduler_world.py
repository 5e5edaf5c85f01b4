"""A model-free engine around the scheduler, for its tests: a KV store that remembers which token is in each slot.

Every scheduled token is checked the way attention would read it: positions 0..p through the block table must hold the
sequence's own tokens. That catches wrong sharing, stale pages, use after free and unwritten slots, without trusting any
book-keeping of the scheduler.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.scheduler import KVCache, Scheduler, SchedulerConfig, Sequence, StepPlan
from engine.types import PAGE_TOKENS, FinishReason


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def next_token(context: list[int], seq_id: int, vocab: int) -> int:
    """The 'model': a pure function of everything before it, so a wrong history or a repeated sample shows."""
    digest = blake2b(repr((seq_id, context)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab


@dataclass
class Snapshot:
    """What the runner copies when a plan is made: later changes of the block table must not matter to it."""

    plan: StepPlan
    tables: list[list[int]]


@dataclass
class World:
    config: SchedulerConfig
    num_pages: int
    depth: int = 1  # plans in flight
    vocab: int = 1000
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.kv = KVCache(self.num_pages)
        self.scheduler = Scheduler(self.config, self.kv, clock=self.clock)
        self.slots: list[list[int | None]] = [[None] * PAGE_TOKENS for _ in range(self.num_pages)]
        self.queue: deque[Snapshot] = deque()
        self.sequences: dict[int, Sequence] = {}
        self.truth: dict[int, list[int]] = {}  # what each sequence's tokens must be
        self.crashed: set[int] = set()  # in a plan whose forward pass never ran
        self.admissions: list[int] = []  # seq_ids by first scheduled token (again after a preemption)
        self.log: list[tuple[str, int]] = []  # ("admitted" or "preempted", seq_id) in the order seen
        self._runs: dict[int, int] = {}  # seq_id -> preemptions at its last admission
        self._preemptions: dict[int, int] = {}
        self.steps = 0
        self.max_step_tokens = 0

    def add(self, seq: Sequence) -> None:
        self.scheduler.add(seq)
        self.sequences[seq.seq_id] = seq
        self.truth[seq.seq_id] = list(seq.token_ids)

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        for seq_id, seq in self.sequences.items():
            if seq.num_preemptions > self._preemptions.get(seq_id, 0):
                self._preemptions[seq_id] = seq.num_preemptions
                self.log.append(("preempted", seq_id))
        if plan is not None:
            self._check_plan(plan)
            self.queue.append(Snapshot(plan, [list(item.seq.block_table) for item in plan.items]))
        self.scheduler.check_integrity()
        return plan

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.config
        assert len({item.seq.seq_id for item in plan.items}) == len(plan.items)
        assert plan.num_tokens == sum(item.count for item in plan.items) <= config.max_batch_tokens
        assert len(plan.items) <= config.max_batch_seqs
        prefill = plan.num_tokens - plan.num_decodes
        assert not plan.num_decodes or prefill <= config.prefill_chunk
        self.max_step_tokens = max(self.max_step_tokens, plan.num_tokens)
        for i, item in enumerate(plan.items):
            seq = item.seq
            assert item.count >= 1
            end = item.start + item.count
            if i < plan.num_decodes:
                assert item.count == 1 and item.samples
                assert item.token_pending == (item.start >= seq.num_tokens)
            else:
                assert not item.token_pending
                assert end % PAGE_TOKENS == 0 or end == seq.num_tokens, "chunk border"
                assert item.samples == (end == seq.num_tokens and seq.max_tokens > 0)
            if item.samples:
                pending = seq.num_output_tokens + item.token_pending
                assert pending < seq.max_tokens, "a token over max_tokens"
            if self._runs.get(seq.seq_id) != seq.num_preemptions:
                self._runs[seq.seq_id] = seq.num_preemptions
                self.admissions.append(seq.seq_id)
                self.log.append(("admitted", seq.seq_id))

    def run_oldest(
        self, stop: dict[int, FinishReason] | None = None, crash: bool = False
    ) -> tuple[StepPlan, list[Sequence]]:
        """The forward pass of the oldest plan and its commit. `stop`: these end in this step."""
        stop = stop or {}
        snapshot = self.queue.popleft()
        plan = snapshot.plan
        if crash:
            self.crashed.update(item.seq.seq_id for item in plan.items)
            ended = self.scheduler.fail(plan)
            assert all(item.seq.finished for item in plan.items)
            self.scheduler.check_integrity()
            return plan, ended
        tokens: dict[int, int] = {}
        for item, table in zip(plan.items, snapshot.tables):
            self._forward(item.seq, item.start, item.count, table)
        for item, table in zip(plan.items, snapshot.tables):
            seq = item.seq
            if seq.finished and item.start + item.count > len(self.truth[seq.seq_id]):
                continue  # its input was never sampled
            if seq.seq_id in self.crashed:
                continue  # what the crashed pass should have written is not there; nobody else may see it
            context = self._read(seq, item.start + item.count, table)
            if item.samples:
                token = next_token(context, seq.seq_id, self.vocab)
                if stop.get(seq.seq_id) is not FinishReason.ERROR:
                    tokens[seq.seq_id] = token
                    if not seq.finished:
                        self.truth[seq.seq_id].append(token)
        ended = self.scheduler.commit(plan, tokens, stop)
        for item in plan.items:
            assert item.seq.token_ids == self.truth[item.seq.seq_id]
        self.steps += 1
        self.scheduler.check_integrity()
        return plan, ended

    def _forward(self, seq: Sequence, start: int, count: int, table: list[int]) -> None:
        truth = self.truth[seq.seq_id]
        for position in range(start, start + count):
            if position < len(truth):
                value = truth[position]
            else:
                assert seq.finished, "a token that nobody knows"
                value = -1  # a row in flight of a sequence that ended: it computes garbage into its own page
            self.slots[table[position // PAGE_TOKENS]][position % PAGE_TOKENS] = value

    def _read(self, seq: Sequence, end: int, table: list[int]) -> list[int]:
        """What attention at position end-1 sees; it must be the sequence's own tokens."""
        seen: list[int | None] = []
        for page in table[: -(-end // PAGE_TOKENS)]:
            seen.extend(self.slots[page])
        expected = self.truth[seq.seq_id][:end]
        assert seen[:end] == expected, f"{seq!r} reads another sequence's tokens"
        return expected

    def step(self, stop: dict[int, FinishReason] | None = None) -> bool:
        """One turn of the engine loop; False if there was nothing to do."""
        plan = self.schedule() if len(self.queue) < self.depth else None
        if self.queue and (plan is None or len(self.queue) >= self.depth):
            self.run_oldest(stop)
            return True
        return plan is not None

    def drain(self, max_steps: int = 100_000) -> int:
        """Runs until nothing is left; returns the number of turns."""
        for turn in range(max_steps):
            if not self.scheduler.has_work:
                return turn
            assert self.step(), "there is work but nothing runs: a deadlock"
        raise AssertionError(f"not done after {max_steps} steps")

    def assert_empty(self) -> None:
        assert self.kv.free_pages == self.num_pages
        assert not self.scheduler.has_work
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for seq in self.sequences.values():
            assert seq.finished and seq.finish_reason is not None and not seq.block_table
            if seq.finish_reason is FinishReason.LENGTH:
                assert seq.num_output_tokens == seq.max_tokens
        self.kv.check_integrity([])


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "max_model_len": 4096,
        "max_batch_tokens": 1024,
        "max_batch_seqs": 32,
        "prefill_chunk": 256,
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]

"""The two guarantees of fair_queue.py, and what they mean for a user who waits."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.fair_queue import NUM_BUCKETS, bucket_of
from engine.scheduler import KVCache, Scheduler, Sequence
from engine.types import PAGE_TOKENS
from tests.engine.scheduler_world import World, config

LENGTHS = ((1, 128), (129, 512), (513, 2048), (2049, 3500))


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, 0), (128, 0), (129, 1), (512, 1), (513, 2), (2048, 2), (2049, 3), (8192, 3), (9999, 3)]
)
def test_buckets(length: int, bucket: int) -> None:
    assert bucket_of(length) == bucket


class Load:
    """Keeps chosen buckets backlogged with requests of one output token and counts the prefill each bucket gets."""

    def __init__(self, seed: int, weights: tuple[int, ...] = (4, 3, 2, 1)) -> None:
        self.rng = random.Random(seed)
        self.ids = itertools.count()
        limits = config(max_batch_tokens=700, max_batch_seqs=64, bucket_weights=weights, prefix_cache=False)
        self.scheduler = Scheduler(limits, KVCache(2000))
        self.alive: dict[int, Sequence] = {}

    def add(self, length: int) -> Sequence:
        seq = Sequence(next(self.ids), [1] * length, max_tokens=1)
        self.scheduler.add(seq)
        self.alive[seq.seq_id] = seq
        return seq

    def fill(self, bucket: int) -> None:
        for _ in range(12 - list(self.scheduler.waiting_by_bucket().values())[bucket]):
            self.add(self.rng.randint(*LENGTHS[bucket]))

    def leave(self, bucket: int) -> None:
        for seq in [seq for seq in self.alive.values() if seq.bucket == bucket]:
            self.scheduler.abort(seq.seq_id)

    def step(self, buckets: tuple[int, ...]) -> list[int]:
        for bucket in buckets:
            self.fill(bucket)
        plan = self.scheduler.schedule()
        assert plan is not None
        tokens = [0] * NUM_BUCKETS
        for item in plan.items:
            tokens[item.seq.bucket] += item.count
        for seq in self.scheduler.commit(plan, {item.seq.seq_id: 1 for item in plan.items if item.samples}):
            del self.alive[seq.seq_id]
        return tokens


@pytest.mark.parametrize("weights", [(4, 3, 2, 1), (1, 1, 1, 1), (5, 1, 1, 7)])
@pytest.mark.parametrize("buckets", [(0, 1, 2, 3), (0, 3), (1, 2), (0, 1, 3)])
def test_backlogged_buckets_share_prefill_by_weight(weights: tuple[int, ...], buckets: tuple[int, ...]) -> None:
    load = Load(1, weights)
    for _ in range(20):
        load.step((2,))  # whoever ran alone before owes nothing, and whoever was idle has saved nothing
    for bucket in set(range(NUM_BUCKETS)) - set(buckets):
        load.leave(bucket)
    got = [0] * NUM_BUCKETS
    for _ in range(80):
        got = [a + b for a, b in zip(got, load.step(buckets))]
        for a, b in itertools.combinations(buckets, 2):
            bound = 2 * (PAGE_TOKENS / weights[a] + PAGE_TOKENS / weights[b])
            assert abs(got[a] / weights[a] - got[b] / weights[b]) <= bound
    assert all(got[bucket] for bucket in buckets)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    world = World(config(max_model_len=8192, max_batch_tokens=512), num_pages=100)
    world.add(Sequence(1, [1] * 8000, max_tokens=1))
    world.step()
    world.step()
    short = Sequence(2, [2] * 100, max_tokens=1)
    world.add(short)
    world.step()
    world.step()
    assert short.finished, "first token in the very next step"
    assert not world.sequences[1].finished


def test_a_long_prompt_moves_under_a_flood_of_short_ones() -> None:
    """Bucket 3 has weight 1 beside bucket 0 with 4: at least a fifth of the prefill tokens, less one quantum each."""
    load = Load(3)
    load.fill(0)
    long = load.add(4000)
    tokens = 0
    while not long.finished and tokens < 40_000:
        assert 3.9 * tokens / 20 <= long.num_scheduled_tokens + 4 * PAGE_TOKENS
        tokens += sum(load.step((0,)))
    assert tokens <= 4000 * 5 + 8 * PAGE_TOKENS


@pytest.mark.parametrize("max_overtakes", [1, 5, 20])
@pytest.mark.parametrize("scarce", ["pages", "slots"])
def test_who_does_not_fit_is_overtaken_a_bounded_number_of_times(max_overtakes: int, scarce: str) -> None:
    """A long request that needs almost the whole pool, or any slot, under an endless stream of short ones."""
    world = World(
        config(
            max_batch_seqs=4 if scarce == "slots" else 32, max_overtakes=max_overtakes, bucket_weights=(1000, 1, 1, 1)
        ),
        num_pages=30,
    )
    rng = random.Random(1)
    ids = itertools.count()

    def flood() -> None:
        while world.scheduler.num_waiting < 20:
            world.add(Sequence(next(ids), [rng.randrange(99)] * rng.randint(1, 100), max_tokens=rng.randint(1, 60)))

    flood()
    for _ in range(5):
        world.step()
    long = Sequence(10_000_000, [7] * 3300, max_tokens=5)
    world.add(long)
    flood()
    steps = 0
    while long.seq_id not in world.admissions:
        flood()
        world.step()
        steps += 1
        assert steps < 3000
    later = [
        i for i in world.admissions[: world.admissions.index(long.seq_id)] if world.sequences[i].order > long.order
    ]
    assert len(later) <= max_overtakes
    for _ in range(3000):
        if long.finished:
            break
        flood()
        world.step()
    assert long.finished


def test_a_refused_head_that_leaves_does_not_hold_the_others() -> None:
    world = World(config(max_overtakes=1), num_pages=30)
    for seq_id in range(4):
        world.add(Sequence(seq_id, [seq_id] * 100, max_tokens=60))
    world.step()
    world.add(Sequence(50, [1] * 3700, max_tokens=2))
    for seq_id in range(100, 103):
        world.add(Sequence(seq_id, [seq_id] * 100, max_tokens=60))
    for _ in range(4):
        world.step()
    assert 102 not in world.admissions, "admission waits for the one that was overtaken"
    world.scheduler.abort(50)
    world.step()
    assert 102 in world.admissions
    world.drain()
    world.assert_empty()

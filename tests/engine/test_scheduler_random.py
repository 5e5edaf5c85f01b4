"""The scheduler under random arrivals, lengths, shared prefixes, salts, aborts, failures, deadlines, tiny pools and
overlap, with every read of the KV checked against a store that remembers what was written (scheduler_world.py).

Default: 2,000 steps. APPLIANCE_FULL=1: 20,000.
"""

from __future__ import annotations

import os
import random

import pytest

from engine.fair_queue import bucket_of
from engine.scheduler import Sequence
from engine.types import FinishReason
from tests.engine.scheduler_world import World, config

FULL = os.environ.get("APPLIANCE_FULL") == "1"
STEPS_PER_RUN = 1250 if FULL else 125
EDGES = (1, 2, 126, 127, 128, 129, 130, 255, 256, 257, 258, 384, 511, 512, 513, 600)


class Driver:
    def __init__(self, seed: int, depth: int) -> None:
        self.rng = rng = random.Random(seed)
        pages = rng.choice((8, 10, 16, 40))
        limit = min(1400, pages * 128)
        self.limit = limit
        self.world = World(
            config(
                max_model_len=limit,
                max_batch_tokens=rng.choice((160, 300, 700)),
                max_batch_seqs=rng.choice((2, 5, 32)),
                prefill_chunk=rng.choice((128, 256)),
                max_overtakes=rng.choice((1, 3, 64)),
                watermark_pages=rng.choice((None, 0)),
                prefix_cache=rng.random() < 0.85,
                max_plans_in_flight=max(2, depth),
            ),
            num_pages=pages,
            depth=depth,
        )
        vocab = 3
        self.prefixes = [[rng.randrange(vocab) for _ in range(1400)] for _ in range(3)]
        self.next_id = 0

    def arrive(self) -> None:
        rng = self.rng
        prompt_len = min(rng.choice(EDGES) if rng.random() < 0.6 else rng.randrange(1, 700), self.limit - 1)
        shared = rng.choice((0, prompt_len, rng.randrange(prompt_len + 1)))
        prompt = rng.choice(self.prefixes)[:shared] + [rng.randrange(3) for _ in range(prompt_len - shared)]
        room = self.limit - prompt_len
        max_tokens = min(room, rng.choice((0, 1, 2, 5, 30, 129, 260, room)))
        for _ in range(rng.choice((1, 1, 1, 4))):  # n identical choices
            seq = Sequence(
                self.next_id,
                prompt,
                max_tokens=max_tokens,
                cache_salt=rng.choice(("", "", "tenant")),
                allow_prefix_hit=rng.random() < 0.9,
                deadline=self.world.clock.now + rng.randrange(1, 400) if rng.random() < 0.1 else None,
            )
            self.next_id += 1
            self.world.add(seq)

    def interfere(self) -> None:
        """Things that may happen between any two calls, with plans in flight or not."""
        rng, world = self.rng, self.world
        alive = [seq for seq in world.sequences.values() if not seq.finished]
        if alive and rng.random() < 0.04:
            assert world.scheduler.abort(rng.choice(alive).seq_id)
        if alive and rng.random() < 0.01:
            assert world.scheduler.finish(rng.choice(alive).seq_id, FinishReason.ERROR)
        if rng.random() < 0.01:
            world.kv.drop_prefix_cache()
        if rng.random() < 0.05:
            world.scheduler.abort(rng.randrange(-1, self.next_id + 1))  # whatever it is: never harmful
        world.clock.now += 1
        for seq in world.scheduler.expire():
            assert seq.finish_reason is FinishReason.DEADLINE and seq.deadline <= world.clock.now
        world.scheduler.check_integrity()

    def run(self, steps: int) -> None:
        rng, world = self.rng, self.world
        for _ in range(steps):
            if world.scheduler.num_waiting < 30 and rng.random() < 0.3:
                self.arrive()
            self.interfere()
            if len(world.queue) < world.depth:
                world.schedule()
                self.interfere()
            if world.queue and (len(world.queue) == world.depth or rng.random() < 0.3):
                plan = world.queue[0].plan
                stop = {}
                for item in plan.items:
                    if rng.random() < 0.02:
                        stop[item.seq.seq_id] = FinishReason.ERROR
                    elif item.samples and rng.random() < 0.02:
                        stop[item.seq.seq_id] = FinishReason.STOP
                _, ended = world.run_oldest(stop, crash=rng.random() < 0.005)
                assert all(seq.finished for seq in ended)
        world.drain()
        world.assert_empty()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_shared_by_mistake(seed: int, depth: int) -> None:
    driver = Driver(seed * 10 + depth, depth)
    driver.run(STEPS_PER_RUN)
    assert driver.next_id > 10


def _fifo_world(seed: int, depth: int) -> World:
    rng = random.Random(seed)
    world = World(config(max_batch_seqs=6, max_overtakes=4, max_plans_in_flight=2), num_pages=24, depth=depth)
    for seq_id in range(60):
        length = rng.choice((5, 128, 129, 400, 512, 513, 900, 2048, 2049))
        seq = Sequence(seq_id, [rng.randrange(50) for _ in range(length)], max_tokens=rng.randrange(1, 150))
        world.add(seq)
    world.drain()
    world.assert_empty()
    return world


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_first_come_first_served_inside_a_bucket(seed: int, depth: int) -> None:
    world = _fifo_world(seed, depth)
    for bucket in range(4):
        first = []
        for seq_id in world.admissions:
            if bucket_of(world.sequences[seq_id].num_prompt_tokens) == bucket and seq_id not in first:
                first.append(seq_id)
        assert first == sorted(first)
        assert first


def test_same_calls_same_plans() -> None:
    def trace(world: World) -> list[int]:
        return world.admissions + [token for seq in world.sequences.values() for token in seq.token_ids]

    assert trace(_fifo_world(7, 2)) == trace(_fifo_world(7, 2))


def test_overlap_cache_chunks_and_memory_do_not_change_a_token() -> None:
    rng = random.Random(5)
    prefix = [rng.randrange(50) for _ in range(700)]
    prompts = [prefix[: rng.randrange(1, 700)] + [rng.randrange(50)] for _ in range(12)]

    def outputs(depth: int, pages: int, **changes: object) -> list[list[int]]:
        world = World(config(**changes), num_pages=pages, depth=depth)
        for seq_id, prompt in enumerate(prompts):
            world.add(Sequence(seq_id, prompt, max_tokens=140))
        world.drain()
        world.assert_empty()
        return [seq.output_ids for seq in world.sequences.values()]

    plain = outputs(1, 200, prefix_cache=False)
    assert plain == outputs(1, 200)
    assert plain == outputs(2, 9)
    assert plain == outputs(1, 9, max_batch_seqs=4, max_batch_tokens=132, prefill_chunk=128)
    assert plain == outputs(2, 12, max_batch_seqs=3, max_batch_tokens=3000, prefill_chunk=2048)

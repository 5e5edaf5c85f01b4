"""What users and operators of the scheduler rely on, case by case."""

from __future__ import annotations

import gc
import itertools

import pytest

from engine.errors import AdmissionError, ConfigError
from engine.scheduler import KVCache, Scheduler, SchedulerConfig, Sequence, StepPlan
from engine.types import PAGE_TOKENS, FinishReason
from tests.engine.scheduler_world import World, config

EDGES = [1, 2, 127, 128, 129, 255, 256, 257, 384, 385]


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def ids(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [item.seq.seq_id for item in plan.items]


# ---- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (0, 5, "no tokens"),
        (3, -1, "max_tokens is -1"),
        (1000, 25, r"1000 prompt tokens \+ max_tokens 25 = 1025, but the context is 1024"),
        (1025, 0, "context is 1024"),
        (800, 98, r"800 prompt tokens \+ max_tokens 98 need 8 KV pages of 128 tokens, but the pool has 7"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(length: int, max_tokens: int, message: str) -> None:
    world = World(config(max_model_len=1024), num_pages=7)
    with pytest.raises(AdmissionError, match=message):
        world.scheduler.check_admissible(length, max_tokens)
    with pytest.raises(AdmissionError, match=message):
        world.scheduler.add(Sequence(1, prompt(length), max_tokens=max_tokens))
    assert not world.scheduler.has_work


@pytest.mark.parametrize(("length", "max_tokens"), [(1024, 0), (1023, 1), (1, 1023), (900, 124)])
def test_a_request_that_fills_the_context_runs_to_its_end(length: int, max_tokens: int) -> None:
    world = World(config(max_model_len=1024), num_pages=8)
    seq = Sequence(1, prompt(length), max_tokens=max_tokens)
    world.add(seq)
    world.drain()
    assert seq.num_tokens == 1024 and seq.finish_reason is FinishReason.LENGTH
    world.assert_empty()


@pytest.mark.parametrize("pages", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_pool_of_exactly_the_needed_size_is_enough(pages: int, depth: int) -> None:
    """The last sampled token needs no slot, so prompt + max_tokens may be one more than the slots."""
    slots = pages * PAGE_TOKENS
    world = World(config(), num_pages=pages, depth=depth)
    for seq_id, length in enumerate((1, slots // 2, slots)):
        world.add(Sequence(seq_id, prompt(length, start=seq_id), max_tokens=slots - length + 1))
    with pytest.raises(AdmissionError, match=f"need {pages + 1} KV pages"):
        world.scheduler.check_admissible(slots, 2)
    world.drain()
    world.assert_empty()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_chunk": 100}, "multiple of 128"),
        ({"prefill_chunk": 0}, "multiple of 128"),
        ({"max_batch_seqs": 0}, "max_batch_seqs is 0"),
        ({"max_batch_tokens": 159, "max_batch_seqs": 32}, "need 160"),
        ({"bucket_weights": (1, 1, 1)}, "bucket_weights"),
        ({"bucket_weights": (1, 1, 1, 0)}, "bucket_weights"),
        ({"watermark_pages": -1}, "watermark_pages"),
    ],
)
def test_a_config_that_would_starve_somebody_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_an_id_in_use_is_refused_even_while_its_last_plan_is_in_flight() -> None:
    world = World(config(), num_pages=8)
    world.add(Sequence(1, prompt(5), max_tokens=3))
    with pytest.raises(ValueError, match="1 is in use"):
        world.scheduler.add(Sequence(1, prompt(5), max_tokens=3))
    world.schedule()
    world.scheduler.abort(1)
    with pytest.raises(ValueError, match="1 is in use"):
        world.scheduler.add(Sequence(1, prompt(5), max_tokens=3))
    world.run_oldest()
    with pytest.raises(ValueError, match="scheduled before"):
        world.scheduler.add(world.sequences[1])
    world.scheduler.add(Sequence(1, prompt(5), max_tokens=3))


# ---- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", EDGES)
def test_chunks_end_on_page_borders_and_only_the_last_one_samples(length: int) -> None:
    world = World(config(prefill_chunk=128), num_pages=8)
    world.add(Sequence(0, [7], max_tokens=50))  # while one decodes, prefill_chunk is the limit
    world.step()
    world.add(Sequence(1, prompt(length), max_tokens=2))
    chunks = []
    for _ in range(-(-length // 128)):
        plan = world.schedule()
        assert plan is not None
        chunks += [(item.start, item.count, item.samples) for item in plan.items[1:]]
        world.run_oldest()
    borders = [*range(0, length, 128), length]
    assert chunks == [(a, b - a, b == length) for a, b in itertools.pairwise(borders)]


def test_echo_without_output_computes_the_whole_prompt_and_samples_nothing() -> None:
    world = World(config(), num_pages=8)
    world.add(Sequence(1, prompt(300), max_tokens=1))
    world.drain()
    echo = Sequence(2, prompt(300), max_tokens=0, allow_prefix_hit=False)
    world.add(echo)
    plan = world.schedule()
    assert plan is not None
    assert [(item.start, item.count, item.samples) for item in plan.items] == [(0, 300, False)]
    _, ended = world.run_oldest()
    assert ended == [echo] and echo.finish_reason is FinishReason.LENGTH and echo.num_cached_tokens == 0
    world.assert_empty()


def test_every_decoding_sequence_gets_its_token_in_every_step_beside_a_long_prefill() -> None:
    world = World(config(max_batch_tokens=160, max_batch_seqs=32, prefill_chunk=128), num_pages=100)
    for seq_id in range(8):
        world.add(Sequence(seq_id, prompt(5, start=seq_id), max_tokens=60))
    world.step()
    assert world.scheduler.num_running == 8
    world.add(Sequence(100, prompt(3000, start=50), max_tokens=1))
    for _ in range(23):
        plan = world.schedule()
        assert plan is not None
        assert ids(plan)[: plan.num_decodes] == list(range(8))
        assert plan.num_tokens - plan.num_decodes == 128, "and prefill gets its chunk"
        world.run_oldest()


def test_prefill_moves_by_a_page_a_step_beside_a_full_batch() -> None:
    world = World(config(max_batch_tokens=160, max_batch_seqs=32), num_pages=100)
    for seq_id in range(31):
        world.add(Sequence(seq_id, [seq_id], max_tokens=100))
    world.step()
    world.add(Sequence(99, prompt(1000), max_tokens=1))
    world.drain(max_steps=120)
    assert world.admissions.index(99) == 31
    world.assert_empty()


# ---- prefix cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", EDGES)
def test_a_fully_cached_prompt_recomputes_its_last_page_only(length: int) -> None:
    world = World(config(), num_pages=16)
    outputs = []
    for seq_id in range(2):
        seq = Sequence(seq_id, prompt(length), max_tokens=1)
        world.add(seq)
        plan = world.schedule()
        assert plan is not None
        cached = 0 if seq_id == 0 else (length - 1) // PAGE_TOKENS * PAGE_TOKENS
        assert [(item.start, item.count) for item in plan.items] == [(cached, length - cached)]
        assert seq.num_cached_tokens == cached
        world.run_oldest()
        outputs.append(seq.output_ids)
    stats = world.scheduler.stats
    assert stats.prefix_query_tokens == 2 * length
    assert stats.prefix_hit_tokens == (length - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_output_pages_are_shared_with_the_next_turn_of_a_chat() -> None:
    world = World(config(), num_pages=16)
    first = Sequence(1, prompt(100), max_tokens=200)
    world.add(first)
    world.drain()
    second = Sequence(2, first.token_ids + prompt(50), max_tokens=1)
    world.add(second)
    world.drain()
    assert second.num_cached_tokens == 256  # 299 tokens of the first turn are in the pool: two full pages


def test_identical_prompts_in_one_step_do_not_share_unfinished_pages() -> None:
    world = World(config(), num_pages=16)
    for seq_id in range(3):
        world.add(Sequence(seq_id, prompt(257), max_tokens=4))
    plan = world.schedule()
    assert ids(plan) == [0, 1, 2]
    tables = [world.sequences[i].block_table for i in range(3)]
    assert len({page for table in tables for page in table}) == 9
    world.run_oldest()
    world.add(Sequence(3, prompt(257), max_tokens=4))
    world.schedule()
    assert world.sequences[3].block_table[:2] == tables[0][:2]
    world.run_oldest()
    world.drain()
    world.assert_empty()


def test_a_page_in_flight_is_not_shared_before_its_commit() -> None:
    world = World(config(max_batch_seqs=4), num_pages=16, depth=2)
    world.add(Sequence(1, prompt(300), max_tokens=5))
    world.schedule()
    world.add(Sequence(2, prompt(300), max_tokens=5))
    world.schedule()
    assert not set(world.sequences[1].block_table) & set(world.sequences[2].block_table)
    world.run_oldest()
    world.add(Sequence(3, prompt(300), max_tokens=5))
    world.schedule()
    assert world.sequences[3].num_cached_tokens == 256
    world.drain()
    world.assert_empty()


def test_pages_of_a_failed_sequence_leave_the_cache() -> None:
    world = World(config(), num_pages=16)
    for seq_id, reason in ((1, FinishReason.STOP), (2, FinishReason.ERROR), (3, FinishReason.STOP)):
        world.add(Sequence(seq_id, prompt(300), max_tokens=9))
        world.schedule()
        world.run_oldest({seq_id: reason})
        assert world.sequences[seq_id].finish_reason is reason
    assert [world.sequences[i].num_cached_tokens for i in (1, 2, 3)] == [0, 256, 0]
    world.assert_empty()


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_finish_frees_the_pages_at_once() -> None:
    world = World(config(), num_pages=16)
    seq = Sequence(1, prompt(300), max_tokens=9)
    world.add(seq)
    world.step()
    assert world.kv.free_pages == 13
    assert world.scheduler.finish(1, FinishReason.STOP)
    assert world.kv.free_pages == 16 and seq.finish_reason is FinishReason.STOP
    assert not world.scheduler.finish(1, FinishReason.LENGTH), "the first reason stays"
    assert seq.finish_reason is FinishReason.STOP
    world.assert_empty()


def test_the_token_that_stopped_a_sequence_may_also_be_its_last_allowed_one() -> None:
    world = World(config(), num_pages=4)
    world.add(Sequence(1, prompt(3), max_tokens=1))
    world.schedule()
    _, ended = world.run_oldest({1: FinishReason.STOP})
    assert [seq.finish_reason for seq in ended] == [FinishReason.STOP]


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_between_schedule_and_commit_frees_pages_only_when_nothing_writes_to_them(depth: int) -> None:
    world = World(config(), num_pages=4, depth=depth)
    world.add(Sequence(1, prompt(300), max_tokens=50))
    for _ in range(depth):
        world.schedule()
    assert world.scheduler.abort(1) and not world.scheduler.abort(1) and not world.scheduler.abort(12345)
    assert world.kv.free_pages == 1
    world.add(Sequence(2, prompt(200, start=7), max_tokens=50))  # needs two pages
    for left in range(depth, 0, -1):
        assert world.kv.free_pages == 1, "a plan in flight still writes to the pages"
        if left < depth:
            assert world.scheduler.schedule() is None
        world.run_oldest()
    assert world.kv.free_pages == 4
    world.drain()
    world.assert_empty()
    assert world.sequences[1].output_ids == []


def test_abort_while_waiting_keeps_the_order_of_the_others() -> None:
    world = World(config(max_batch_seqs=1), num_pages=8)
    for seq_id in range(5):
        world.add(Sequence(seq_id, [seq_id], max_tokens=2))
    world.scheduler.abort(2)
    assert world.scheduler.waiting_by_bucket() == {"1-128": 4, "129-512": 0, "513-2048": 0, "2049-8192+": 0}
    world.drain()
    assert world.admissions == [0, 1, 3, 4]
    world.assert_empty()


def test_a_stop_seen_late_drops_the_token_of_the_plan_in_flight() -> None:
    world = World(config(), num_pages=4, depth=2)
    seq = Sequence(1, prompt(3), max_tokens=50)
    world.add(seq)
    world.schedule()
    plan = world.schedule()
    assert plan is not None and plan.items[0].token_pending
    world.run_oldest({1: FinishReason.STOP})
    assert seq.num_output_tokens == 1 and world.kv.free_pages == 3
    world.run_oldest()
    assert seq.num_output_tokens == 1
    world.assert_empty()


def test_no_row_is_planned_past_max_tokens_with_plans_in_flight() -> None:
    world = World(config(), num_pages=4, depth=2)
    world.add(Sequence(1, prompt(3), max_tokens=2))
    world.schedule()
    world.schedule()
    world.run_oldest()
    assert world.scheduler.schedule() is None and world.scheduler.has_work
    world.run_oldest()
    world.assert_empty()


def test_a_failed_forward_pass_ends_its_sequences_and_nobody_else() -> None:
    world = World(config(max_batch_seqs=2), num_pages=8)
    for seq_id in range(3):
        world.add(Sequence(seq_id, [seq_id], max_tokens=2))
    world.schedule()
    _, ended = world.run_oldest(crash=True)
    assert [seq.seq_id for seq in ended] == [0, 1]
    assert all(seq.finish_reason is FinishReason.ERROR for seq in ended)
    world.drain()
    assert world.sequences[2].finish_reason is FinishReason.LENGTH
    world.assert_empty()


def test_deadlines_hold_for_waiting_and_running_sequences() -> None:
    world = World(config(max_batch_seqs=1), num_pages=8)
    for seq_id, deadline in enumerate((9.0, 3.0, None, 5.0)):
        world.add(Sequence(seq_id, [seq_id], max_tokens=50, deadline=deadline))
    world.step()
    world.clock.now = 2.9
    assert world.scheduler.expire() == []
    assert [seq.seq_id for seq in world.scheduler.expire(5.0)] == [1, 3]
    assert [seq.seq_id for seq in world.scheduler.expire(9.0)] == [0]
    assert world.scheduler.expire(1e9) == []
    world.drain()
    assert [seq.finish_reason for seq in world.sequences.values()] == [
        *[FinishReason.DEADLINE] * 2,
        FinishReason.LENGTH,
        FinishReason.DEADLINE,
    ]
    world.assert_empty()


def test_ended_sequences_leave_nothing_behind() -> None:
    """Among them the heap of deadlines, which would keep each until its deadline, hours later."""
    scheduler = Scheduler(config(), KVCache(8), clock=lambda: 0.0)
    for seq_id in range(3000):
        scheduler.add(Sequence(seq_id, [seq_id % 7], max_tokens=1, deadline=1e6 - seq_id))
        if seq_id % 3 == 0:
            scheduler.abort(seq_id)
        elif (plan := scheduler.schedule()) is not None:
            scheduler.commit(plan, {item.seq.seq_id: 1 for item in plan.items})
    del plan
    assert not scheduler.has_work
    gc.collect()
    alive = sum(isinstance(thing, Sequence) and thing.request_id == "" for thing in gc.get_objects())
    assert alive <= 70  # the heap keeps up to 64 dead entries


# ---- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257])
def test_the_youngest_is_preempted_keeps_its_tokens_and_ends_the_same(length: int, depth: int) -> None:
    def outputs(pages: int) -> tuple[list[list[int]], World]:
        world = World(config(), num_pages=pages, depth=depth)
        for seq_id in range(2):
            world.add(Sequence(seq_id, prompt(length, start=seq_id * 1000), max_tokens=300))
        world.drain()
        world.assert_empty()
        return [seq.output_ids for seq in world.sequences.values()], world

    plenty, relaxed = outputs(100)
    tight, world = outputs(-(-(length + 299) // PAGE_TOKENS) + -(-length // PAGE_TOKENS) + 1)
    assert plenty == tight
    assert relaxed.scheduler.stats.preemptions == 0
    assert world.sequences[0].num_preemptions == 0, "the oldest always moves"
    assert world.sequences[1].num_preemptions >= 1


def test_a_resumed_sequence_reuses_what_is_still_cached_and_reports_the_first_hit_only() -> None:
    world = World(config(watermark_pages=0), num_pages=6)
    old = Sequence(0, prompt(128), max_tokens=300)
    young = Sequence(1, prompt(300, start=500), max_tokens=300)
    world.add(old)
    world.add(young)
    while not young.num_preemptions:
        assert world.step()
    kept = list(young.token_ids)
    assert young.num_output_tokens > 0 and young.block_table == [] and young.num_computed_tokens == 0
    if world.queue:
        world.run_oldest()
    while (plan := world.schedule()) is not None and young not in [item.seq for item in plan.items]:
        world.run_oldest()
    assert plan is not None
    assert young.token_ids == kept and young.num_cached_tokens == 0
    item = next(item for item in plan.items if item.seq is young)
    assert item.start % PAGE_TOKENS == 0 and item.start + item.count == len(kept) and item.samples
    world.drain()
    world.assert_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_sequence_comes_back_before_later_arrivals_of_its_bucket(depth: int) -> None:
    world = World(config(max_batch_seqs=3, max_model_len=800), num_pages=9, depth=depth)
    for seq_id in range(8):
        world.add(Sequence(seq_id, prompt(120, start=seq_id * 200), max_tokens=500))
    world.drain()
    world.assert_empty()
    assert world.scheduler.stats.preemptions > 0
    not_running = set(range(8))
    for kind, seq_id in world.log:
        if kind == "admitted":
            assert seq_id == min(not_running), "the oldest that waits goes first"
            not_running.remove(seq_id)
        elif kind == "preempted":
            not_running.add(seq_id)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_resumed_sequence_stays_for_a_page_of_steps(depth: int) -> None:
    world = World(config(max_model_len=1000, watermark_pages=0), num_pages=12, depth=depth)
    for seq_id in range(5):
        world.add(Sequence(seq_id, prompt(100 + 13 * seq_id, start=seq_id * 200), max_tokens=600))
    resumed: dict[int, int] = {}
    running = dict.fromkeys(range(5), False)
    stays = []
    while world.scheduler.has_work:
        assert world.step()
        for seq_id, seq in world.sequences.items():
            now_running = seq.state.value == "running"
            if seq.num_preemptions and now_running and not running[seq_id]:
                resumed[seq_id] = world.steps
            if running[seq_id] and not now_running and not seq.finished and seq_id in resumed:
                stays.append(world.steps - resumed[seq_id])
            running[seq_id] = now_running
    world.assert_empty()
    assert resumed
    assert all(stay >= PAGE_TOKENS - 2 for stay in stays), stays


# ---- the contract with the engine loop -------------------------------------------------------------------------------


def test_commit_refuses_a_wrong_order_or_a_missing_token_and_changes_nothing() -> None:
    world = World(config(), num_pages=8, depth=2)
    world.add(Sequence(1, prompt(3), max_tokens=9))
    first, second = world.schedule(), world.schedule()
    assert first is not None and second is not None
    with pytest.raises(ValueError, match="not the oldest"):
        world.scheduler.commit(second, {1: 5})
    with pytest.raises(ValueError, match="sequence 1 but no token"):
        world.scheduler.commit(first, {})
    assert world.sequences[1].num_computed_tokens == 0
    with pytest.raises(RuntimeError, match="2 plans are in flight"):
        world.scheduler.schedule()
    world.scheduler.commit(first, {1: 5})
    with pytest.raises(ValueError, match="not the oldest"):
        world.scheduler.commit(first, {1: 5})
    world.scheduler.commit(second, {1: 6})
    assert world.sequences[1].output_ids == [5, 6]


def test_stats_count_pages_slots_and_sequences() -> None:
    world = World(config(max_batch_seqs=2), num_pages=8)
    for seq_id, length in enumerate((5, 200, 600)):
        world.add(Sequence(seq_id, prompt(length), max_tokens=3))
    world.step()
    stats = world.scheduler.stats
    assert (stats.running, stats.waiting, stats.steps) == (2, 1, 1)
    assert (stats.kv_pages_total, stats.kv_pages_free) == (8, 5)
    assert stats.kv_slots_unused == (128 - 5) + (256 - 200)
    assert stats.waiting_by_bucket["513-2048"] == 1
    assert SchedulerConfig(max_model_len=10).max_batch_seqs == 256

"""The page pool and the prefix cache alone, and under hash functions that collide."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from engine import sequence as sequence_module
from engine.errors import ConfigError
from engine.kv_cache import IntegrityError, KVCache, OutOfPages
from engine.sequence import Sequence
from engine.types import PAGE_TOKENS
from tests.engine.scheduler_world import World, config


def computed(pool: KVCache, seq_id: int, tokens: list[int], salt: str = "") -> Sequence:
    """A sequence whose whole prompt went through the model and was published."""
    seq = Sequence(seq_id, tokens, max_tokens=1, cache_salt=salt)
    assert pool.attach(seq, use_cache=True, keep_free=0)
    seq.num_computed_tokens = seq.num_scheduled_tokens = len(tokens)
    pool.publish(seq)
    return seq


def test_allocation_takes_all_or_nothing() -> None:
    pool = KVCache(3)
    held = pool.allocate(2)
    with pytest.raises(OutOfPages, match="2 KV pages asked for, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.free_pages == 1
    pool.release(held)
    assert pool.free_pages == 3
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_a_page_freed_twice_is_reported_by_number() -> None:
    pool = KVCache(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(IntegrityError, match=f"page {pages[0]} was freed twice"):
        pool.release(pages)


def test_integrity_names_a_lost_page() -> None:
    pool = KVCache(4)
    page = pool.allocate(1)[0]
    with pytest.raises(IntegrityError, match=f"page {page} has 1 references but 0 block tables"):
        pool.check_integrity([])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 pages"):
        KVCache(0)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 384, 385])
def test_a_repeated_prompt_hits_every_full_page_but_never_its_last_token(length: int) -> None:
    pool = KVCache(16)
    tokens = list(range(length))
    first = computed(pool, 1, tokens)
    again = Sequence(2, tokens, max_tokens=1)
    assert pool.attach(again, use_cache=True, keep_free=0)
    expected = (length - 1) // PAGE_TOKENS
    assert again.num_computed_tokens == expected * PAGE_TOKENS < length
    assert again.block_table[:expected] == first.block_table[:expected]
    assert not set(again.block_table[expected:]) & set(first.block_table)
    pool.check_integrity([first, again])


def test_a_page_matches_only_behind_the_same_prefix_and_salt() -> None:
    pool = KVCache(16)
    page_a, page_b, tail = [1] * 128, [2] * 128, [9]
    computed(pool, 1, page_a + page_b + tail)

    def hits(tokens: list[int], salt: str = "") -> int:
        return len(pool.match(Sequence(2, tokens, max_tokens=1, cache_salt=salt), len(tokens) // PAGE_TOKENS)[0])

    assert hits(page_a + page_b) == 2
    assert hits(page_a + page_a) == 1
    assert hits(page_b + page_a) == 0  # the same pages in another order
    assert hits(page_b) == 0  # known content, but not as a first page
    assert hits(page_a + page_b, salt="tenant") == 0
    assert hits([1] * 127 + [2] + page_b) == 0


@pytest.mark.parametrize("digest", [b"", b"0"])
@pytest.mark.parametrize("seed", range(3))
def test_hash_collisions_never_share_a_page(monkeypatch: pytest.MonkeyPatch, digest: bytes, seed: int) -> None:
    """With a hash of one value or of two bits every lookup collides; only comparing keeps tenants and texts apart."""
    monkeypatch.setattr(sequence_module, "root_digest", lambda salt: b"r")
    monkeypatch.setattr(
        sequence_module, "page_digest", lambda parent, tokens: digest and bytes([(sum(tokens) + sum(parent)) % 4])
    )
    rng = random.Random(seed)
    world = World(config(max_batch_seqs=8), num_pages=14)  # scheduler_world checks every read
    for seq_id in range(60):
        tokens = [token for _ in range(rng.randrange(1, 5)) for token in [rng.randrange(2)] * 128]
        salt = rng.choice(("", "tenant"))
        world.add(Sequence(seq_id, [*tokens, rng.randrange(2)], max_tokens=3, cache_salt=salt))
        world.add(Sequence(1000 + seq_id, tokens, max_tokens=3, cache_salt=salt))
        world.step()
    world.drain()
    world.assert_empty()


def test_salts_are_compared_and_not_only_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_module, "root_digest", lambda salt: b"the same for every tenant")
    pool = KVCache(8)
    computed(pool, 1, [1] * 257, salt="a")
    assert len(pool.match(Sequence(2, [1] * 257, max_tokens=1, cache_salt="a"), 2)[0]) == 2
    assert pool.match(Sequence(3, [1] * 257, max_tokens=1, cache_salt="b"), 2)[0] == []


def test_a_child_is_not_reached_through_a_recomputed_parent_of_other_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """X and Y collide. Y's child is cached behind Y; after Y is evicted and X takes its place in the index, a prompt
    X + child must not hit the child of Y."""
    monkeypatch.setattr(sequence_module, "page_digest", lambda parent, tokens: parent[:1] + bytes([len(parent)]))
    pool = KVCache(8)
    x, y, child = [1] * 128, [2] * 128, [3] * 128
    first = computed(pool, 1, y + child + [0])
    pool.forget(first.block_table[:1])
    second = computed(pool, 2, x + [0])
    pages, _ = pool.match(Sequence(3, x + child, max_tokens=1), 2)
    assert pages == second.block_table[:1]


def test_least_recently_used_prefix_goes_first_and_from_its_tail() -> None:
    pool = KVCache(6)
    prompts = {name: [ord(name)] * 256 + [0] for name in "ab"}
    for i, name in enumerate("ab"):
        seq = computed(pool, i, prompts[name])
        pool.detach(seq)
    assert pool.cached_pages == 4 and pool.free_pages == 6
    pool.detach(computed(pool, 7, prompts["a"]))  # a was used again, so b is the older one

    def cached(name: str) -> int:
        return len(pool.match(Sequence(9, prompts[name], max_tokens=1), 2)[0])

    pool.allocate(3)  # two that were never cached and one eviction
    assert (cached("a"), cached("b")) == (2, 1)
    pool.allocate(1)
    assert (cached("a"), cached("b")) == (2, 0)
    pool.allocate(1)
    assert (cached("a"), cached("b")) == (1, 0)
    assert pool.evictions == 3


def test_referenced_pages_are_never_evicted() -> None:
    pool = KVCache(4)
    seq = computed(pool, 1, [5] * 257)
    pool.allocate(1)
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    assert len(pool.match(Sequence(2, [5] * 257, max_tokens=1), 2)[0]) == 2
    assert pool.ref_count(seq.block_table[0]) == 1


def test_a_refused_attach_changes_nothing() -> None:
    pool = KVCache(4)
    pool.detach(computed(pool, 1, [1] * 257))
    big = Sequence(2, [1] * 256 + [2] * 300, max_tokens=1)  # 5 pages, 2 of them cached
    assert not pool.attach(big, use_cache=True, keep_free=0)
    assert pool.free_pages == 4 and pool.cached_pages == 2 and big.block_table == []
    fits = Sequence(3, [1] * 256 + [2] * 256, max_tokens=1)  # exactly 4
    assert not pool.attach(fits, use_cache=True, keep_free=1)
    assert pool.attach(fits, use_cache=True, keep_free=0)
    assert pool.free_pages == 0


def test_duplicates_computed_side_by_side_stay_private() -> None:
    pool = KVCache(8)
    tokens = [4] * 257
    twins = [Sequence(i, tokens, max_tokens=1) for i in range(2)]
    for seq in twins:
        assert pool.attach(seq, use_cache=True, keep_free=0)
    assert not set(twins[0].block_table) & set(twins[1].block_table)
    for seq in twins:
        seq.num_computed_tokens = seq.num_scheduled_tokens = 257
        pool.publish(seq)
    assert pool.cached_pages == 2
    pool.check_integrity(twins)
    pool.detach(twins[1])
    assert pool.cached_pages == 2 and pool.free_pages == 5


def test_drop_prefix_cache_keeps_running_sequences_whole() -> None:
    pool = KVCache(8)
    running = computed(pool, 1, [1] * 257)
    pool.detach(computed(pool, 2, [2] * 257))
    table = list(running.block_table)
    assert pool.drop_prefix_cache() == 4
    assert pool.cached_pages == 0 and running.block_table == table and pool.free_pages == 5
    running.token_ids += [1] * 128
    pool.grow(running)
    running.num_computed_tokens = running.num_scheduled_tokens = 385
    pool.publish(running)  # its chain is broken: nothing may be published behind a dropped parent
    assert pool.cached_pages == 0
    pool.check_integrity([running])


def test_against_a_plain_model_of_the_pool() -> None:
    """Random allocate / acquire / release against dictionaries; an independent statement of what the pool does."""
    rng = random.Random(3)
    pool, total = KVCache(12), 12
    refs: OrderedDict[int, int] = OrderedDict()
    for _ in range(3000):
        choice = rng.random()
        if choice < 0.5 and len(refs) < total:
            for page in pool.allocate(rng.randrange(1, total - len(refs) + 1)):
                assert page not in refs
                refs[page] = 1
        elif choice < 0.7 and refs:
            page = rng.choice(list(refs))
            pool.acquire([page])
            refs[page] += 1
        elif refs:
            page = rng.choice(list(refs))
            pool.release([page])
            refs[page] -= 1
            if not refs[page]:
                del refs[page]
        assert pool.free_pages == total - len(refs)
        assert all(pool.ref_count(page) == refs.get(page, 0) for page in range(total))

"""Paged attention and the QKV step against kernels/reference.py, and against hostile block tables."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import PAGE_TOKENS
from kernels import cpu_ops as ops
from kernels import reference

F64 = np.float64


class Case:
    """Some sequences in a shuffled pool. Every slot no token may see holds NaN, so that a wrong read shows."""

    def __init__(self, seed: int, lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int) -> None:
        """lengths: (tokens already in the pool, tokens in this batch) of each sequence."""
        rng = np.random.default_rng(seed)
        pages = [-(-(old + new) // PAGE_TOKENS) for old, new in lengths]
        order = rng.permutation(sum(pages) + 2).astype(np.int32)
        self.block_tables = np.full((len(lengths), max(pages) + 1), -1, np.int32)
        shape = (len(order), kv_heads, PAGE_TOKENS, head_dim)
        self.k_pages, self.v_pages = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        used = 0
        positions, seq_index = [], []
        for s, (old, new) in enumerate(lengths):
            self.block_tables[s, : pages[s]] = order[used : used + pages[s]]
            used += pages[s]
            for p in range(old + new):
                slot = self.block_tables[s, p // PAGE_TOKENS], slice(None), p % PAGE_TOKENS
                self.k_pages[slot] = rng.standard_normal((kv_heads, head_dim))
                self.v_pages[slot] = rng.standard_normal((kv_heads, head_dim))
            positions += range(old, old + new)
            seq_index += [s] * new
        self.positions, self.seq_index = np.array(positions, np.int32), np.array(seq_index, np.int32)
        self.q = rng.standard_normal((len(positions), heads, head_dim)).astype(np.float32)
        self.scale = head_dim**-0.5

    def run(self, keep=slice(None), window=None, threads=2) -> np.ndarray:
        q = np.ascontiguousarray(self.q[keep])
        out = np.full_like(q, np.nan)
        ops.paged_attention(
            out, q, self.k_pages, self.v_pages, self.positions[keep], self.seq_index[keep], self.block_tables,
            scale=self.scale, window=window, num_threads=threads,
        )  # fmt: skip
        return out

    def expected(self, window=None, dtype=F64) -> np.ndarray:
        return reference.paged_attention(
            self.q, self.k_pages, self.v_pages, self.positions, self.seq_index, self.block_tables,
            scale=self.scale, window=window, dtype=dtype,
        )  # fmt: skip


# Standard normal data: |score| < 8, so a relative error of a few u in it moves a weight by < 1e-5; outputs are < 5.
TOLERANCE = 2e-5


@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 67)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([2, 6, 16, 30, 64, 80, 96, 128, 256]),
    window=st.one_of(st.none(), st.integers(1, 400)),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_any_mix_of_prefill_and_decode(lengths, kv_heads, group, head_dim, window, seed):
    case = Case(seed, lengths, kv_heads * group, kv_heads, head_dim)
    np.testing.assert_allclose(case.run(window=window), case.expected(window), atol=TOLERANCE, rtol=0)


def test_more_query_heads_per_kv_head_than_a_block_holds():
    case = Case(1, [(10, 9), (130, 1)], 71, 1, 64)  # Falcon's 71 heads on one KV head
    np.testing.assert_allclose(case.run(), case.expected(), atol=TOLERANCE, rtol=0)


def test_query_heads_read_their_contiguous_kv_head():
    """V constant per KV head: whatever the weights, head h must return exactly its KV head's constant (B-45)."""
    case = Case(2, [(0, 5), (200, 3)], 12, 4, 64)
    case.v_pages[...] = np.array([1, 2, 4, 8], np.float32)[None, :, None, None]
    out = case.run()
    expected = np.repeat([1, 2, 4, 8], 3).astype(np.float32)
    np.testing.assert_allclose(out, np.broadcast_to(expected[None, :, None], out.shape), rtol=1e-6)


def test_a_nan_in_one_sequence_or_at_a_later_position_reaches_nobody_else():
    case = Case(3, [(0, 40), (100, 40), (260, 1)], 6, 2, 64)
    clean = case.run()
    page = case.block_tables[1, 0]
    case.k_pages[page, 0, 120] = np.nan  # sequence 1, position 120, KV head 0
    case.v_pages[page, 1, 125] = np.inf
    spoilt = case.run()
    sees_k = (case.seq_index == 1) & (case.positions >= 120)
    sees_v = (case.seq_index == 1) & (case.positions >= 125)
    assert np.isnan(spoilt[sees_k, :3]).all()
    assert not np.isfinite(spoilt[sees_v, 3:]).any()
    np.testing.assert_array_equal(spoilt[~sees_k, :3], clean[~sees_k, :3])
    np.testing.assert_array_equal(spoilt[~sees_v, 3:], clean[~sees_v, 3:])


def test_huge_scores_do_not_overflow():
    case = Case(4, [(0, 150)], 2, 1, 64)
    case.q *= 1e4
    out = case.run()
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, case.expected(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("window", [1, 5, 128, 129])
def test_pages_before_the_window_may_be_gone(window):
    case = Case(5, [(500, 9)], 4, 2, 64)
    expected = case.run(window=window)
    case.block_tables[0, : (500 - window + 1) // PAGE_TOKENS] = -1
    np.testing.assert_array_equal(case.run(window=window), expected)


def kv_call(op: str, case: Case) -> None:
    tokens = (case.k_pages, case.v_pages, case.positions, case.seq_index, case.block_tables)
    n, heads, head_dim = case.q.shape
    if op == "attention":
        ops.paged_attention(np.empty_like(case.q), case.q, *tokens, scale=1.0)
        return
    qkv = np.ones((n, (heads + 2 * case.k_pages.shape[1]) * head_dim), np.float32)
    table = np.ones((1024, head_dim // 2), np.float32)
    ops.qkv_rope_append(np.empty_like(case.q), qkv, table, table, *tokens)


@pytest.mark.parametrize("op", ["attention", "append"])
@pytest.mark.parametrize("page", [-1, -(2**31), 2**31 - 1, "num_pages"])
def test_a_page_outside_the_pool_is_refused_before_anything_is_touched(op, page):
    case = Case(6, [(0, 3), (125, 6)], 4, 2, 64)
    case.block_tables[1, 1] = len(case.k_pages) if page == "num_pages" else page
    before = case.k_pages.copy(), case.v_pages.copy()
    with pytest.raises(IndexError, match=r"token 6 needs page .* \(entry 1 of block table 1\)"):
        kv_call(op, case)
    np.testing.assert_array_equal(case.k_pages, before[0])
    np.testing.assert_array_equal(case.v_pages, before[1])


@pytest.mark.parametrize("op", ["attention", "append"])
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("positions", -1, "token 2 has position -1"),
        ("positions", 2**31 - 1, "token 2 has position 2147483647"),
        ("positions", 3 * PAGE_TOKENS, "token 2 has position 384"),
        ("seq_index", -1, "token 2 is of sequence -1, but there are 2"),
        ("seq_index", 2, "token 2 is of sequence 2"),
    ],
)
def test_a_token_outside_the_tables_is_refused(op, field, value, text):
    case = Case(7, [(0, 3), (125, 6)], 4, 2, 64)
    getattr(case, field)[2] = value
    with pytest.raises(IndexError, match=text):
        kv_call(op, case)


@pytest.mark.parametrize("op", ["attention", "append"])
def test_pools_and_heads_that_do_not_fit_are_refused(op):
    for heads, kv_heads, head_dim, text in (
        (5, 2, 64, "not a multiple"),
        (2, 1, 258, "even size"),
        (2, 1, 5, "even size"),
    ):
        case = Case(8, [(0, 3)], heads, kv_heads, head_dim)
        with pytest.raises(ValueError, match=text):
            kv_call(op, case)
    case = Case(8, [(0, 3)], 4, 2, 64)
    case.k_pages = np.ascontiguousarray(case.k_pages[:, :, :64])
    with pytest.raises(ValueError, match="k_pages has size 64 along axis 2; wanted 128"):
        kv_call(op, case)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 260), st.integers(1, 20)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (6, 2), (4, 4)]),
    head_dim=st.sampled_from([2, 10, 64, 128]),
    bias=st.booleans(),
    norm=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_qkv_rope_append(lengths, heads, head_dim, bias, norm, seed):
    num_heads, kv_heads = heads
    case = Case(seed, lengths, num_heads, kv_heads, head_dim)
    rng = np.random.default_rng(seed + 1)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    width = (num_heads + 2 * kv_heads) * head_dim
    qkv, cos, sin = values(len(case.positions), width), values(400, head_dim // 2), values(400, head_dim // 2)
    extras = {
        "bias": values(width) if bias else None,
        "q_norm": values(head_dim) if norm else None,
        "k_norm": values(head_dim) if norm else None,
        "eps": 1e-6,
    }
    tokens = (case.positions, case.seq_index, case.block_tables)
    wide_k, wide_v = case.k_pages.astype(F64), case.v_pages.astype(F64)
    expected = reference.qkv_rope_append(qkv, cos, sin, wide_k, wide_v, *tokens, **extras, dtype=F64)
    q_out = np.full_like(case.q, np.nan)
    ops.qkv_rope_append(q_out, qkv, cos, sin, case.k_pages, case.v_pages, *tokens, **extras, num_threads=2)
    # Every factor is below 6, and a norm of very small rows can magnify up to 1 / sqrt(eps) of a rounding.
    np.testing.assert_allclose(q_out, expected, rtol=1e-5, atol=2e-4 if norm else 5e-6)
    np.testing.assert_allclose(case.k_pages, wide_k, rtol=1e-5, atol=2e-4 if norm else 5e-6)
    np.testing.assert_allclose(case.v_pages, wide_v, rtol=1e-6, atol=1e-6)


def test_the_last_page_of_a_pool_beyond_4_gib():
    """A sparse pool of 2 x 4.3 GiB whose last page is written and read: 32-bit offsets would land elsewhere (B-31)."""
    kv_heads, head_dim = 8, 128
    num_pages = 2**32 // (kv_heads * PAGE_TOKENS * head_dim * 4) + 128
    shape = (num_pages, kv_heads, PAGE_TOKENS, head_dim)
    size = int(np.prod(shape)) * 4
    assert size > 2**32
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        maps = [mmap.mmap(-1, size, flags=flags) for _ in range(2)]
    except OSError:
        pytest.skip("address space for two maps of 4.3 GiB is not to be had")
    k_pages, v_pages = (np.frombuffer(m, np.float32).reshape(shape) for m in maps)
    rng = np.random.default_rng(9)
    qkv = rng.standard_normal((1, (8 + 2 * kv_heads) * head_dim)).astype(np.float32)
    ones, zeros = np.ones((256, head_dim // 2), np.float32), np.zeros((256, head_dim // 2), np.float32)
    tokens = (np.array([127], np.int32), np.array([0], np.int32), np.array([[num_pages - 1]], np.int32))
    q = np.empty((1, 8, head_dim), np.float32)
    ops.qkv_rope_append(q, qkv, ones, zeros, k_pages, v_pages, *tokens)
    heads = qkv.reshape(8 + 2 * kv_heads, head_dim)
    np.testing.assert_array_equal(k_pages[-1, :, 127], heads[8:16])
    np.testing.assert_array_equal(v_pages[-1, :, 127], heads[16:])
    out = np.empty_like(q)
    q[...] = 1000 * heads[8:16]  # the other 127 keys are zero, so all the weight falls on the last
    ops.paged_attention(out, q, k_pages, v_pages, *tokens, scale=1.0)
    np.testing.assert_array_equal(out[0], heads[16:])
    del k_pages, v_pages
    for m in maps:
        m.close()

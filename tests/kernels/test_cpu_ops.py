"""The CPU ops against kernels/reference.py in float64, with error bounds from the order of the sums.

u = 2^-24. A canonical sum of n products is a chain of n/8 fused multiply-adds per lane and three additions: its error
is at most (n/8 + 4) u sum|a_i b_i| (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import _cpu, reference
from kernels import cpu_ops as ops

U = 2.0**-24
F64 = np.float64


@pytest.fixture(params=["avx2", "generic"])
def isa(request):
    before = _cpu.isa()
    try:
        _cpu.set_isa(request.param)
    except ValueError:
        pytest.skip(f"no {request.param} here")
    yield request.param
    _cpu.set_isa(before)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def unaligned(x: np.ndarray) -> np.ndarray:
    """The same values 4 bytes past an allocation's start and up to its very end (a sanitizer sees a read past it)."""
    view = np.empty(x.nbytes + 4, np.uint8)[4:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


@given(
    rows=st.integers(1, 67), n=st.integers(1, 67), k=st.integers(1, 200), bf16=st.booleans(), seed=st.integers(0, 99),
    threads=st.integers(1, 2),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_matmul_is_within_the_bound_of_its_order(rows, n, k, bf16, seed, threads):
    x, w = unaligned(normal(seed, rows, k)), normal(seed + 1, n, k)
    if bf16:
        w = bf16_bits(w)
    w = unaligned(w)
    out = unaligned(np.full((rows, n), np.nan, np.float32))
    ops.matmul(out, x, w, num_threads=threads)
    wide = reference.widen(w)
    bound = (k / 8 + 4) * U * (np.abs(x).astype(F64) @ np.abs(wide).astype(F64).T)
    assert (np.abs(out - reference.matmul(x, w, F64)) <= bound).all()


@pytest.mark.parametrize("k", [1, 7, 8, 9, 16, 23, 64, 67])
def test_matmul_has_the_bits_of_the_stated_order(isa, k):
    x, w = normal(k, 5, k), normal(k + 1, 9, k)
    out = np.empty((5, 9), np.float32)
    ops.matmul(out, x, w)
    expected = [[reference.ordered_dot(a, b) for b in w] for a in x]
    np.testing.assert_array_equal(out, np.array(expected, np.float32))


def test_matmul_of_bf16_has_the_bits_of_the_same_values_in_float32():
    bits = bf16_bits(normal(3, 100, 77))
    for rows in (1, 2, 3, 4, 5, 40):
        x = normal(rows, rows, 77)
        narrow, wide = np.empty((rows, 100), np.float32), np.empty((rows, 100), np.float32)
        ops.matmul(narrow, x, bits)
        ops.matmul(wide, x, reference.widen(bits))
        np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 4, 5, 13])
def test_a_bad_row_spoils_itself_only(bad, rows):
    x, w = normal(1, rows, 43), normal(2, 30, 43)
    clean, spoilt = np.empty((rows, 30), np.float32), np.empty((rows, 30), np.float32)
    ops.matmul(clean, x, w)
    x[rows // 2, 42] = bad
    ops.matmul(spoilt, x, w)
    assert not np.isfinite(spoilt[rows // 2]).any()
    keep = np.arange(rows) != rows // 2
    np.testing.assert_array_equal(spoilt[keep], clean[keep])


@given(rows=st.integers(1, 67), width=st.integers(1, 130), add=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_rmsnorm(rows, width, add, seed):
    x, weight = unaligned(normal(seed, rows, width)), unaligned(normal(seed + 1, width))
    residual = normal(seed + 2, rows, width) if add else None
    total = x + residual if add else x.copy()
    out = np.empty_like(x)
    ops.rmsnorm(out, x, weight, 1e-5, residual=residual, num_threads=2)
    np.testing.assert_array_equal(x, total)  # the sum itself is one rounding: exact
    expected = reference.rmsnorm(total, weight, 1e-5, F64)
    assert (np.abs(out - expected) <= (width / 8 + 12) * U * np.abs(expected) + 1e-40).all()


def test_rmsnorm_of_a_row_with_nan_leaves_the_others():
    x = normal(5, 9, 50)
    x[4, 17] = np.nan
    x[7] = 0
    out = np.empty_like(x)
    ops.rmsnorm(out, x, np.ones(50, np.float32), 1e-6, num_threads=2)
    assert np.isnan(out[4]).all()
    assert np.isfinite(np.delete(out, 4, 0)).all()
    assert (out[7] == 0).all()


@given(
    rows=st.integers(1, 67), width=st.integers(1, 70), scale=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 99)
)
@settings(max_examples=50, deadline=None)
def test_swiglu(rows, width, scale, seed):
    gate_up = normal(seed, rows, 2 * width) * np.float32(scale)
    out = np.empty((rows, width), np.float32)
    ops.swiglu(out, gate_up)
    expected = reference.swiglu(gate_up, F64)
    assert (np.abs(out - expected) <= 8 * U * np.abs(expected) + 1e-34).all()  # below that e^-g is inf


def test_swiglu_at_the_ends():
    gate = np.array([-np.inf, -200, -88.9, 0, 200, np.inf, np.nan, 1], np.float32)
    out = np.empty((1, 8), np.float32)
    ops.swiglu(out, np.concatenate([gate, np.ones(8, np.float32)])[None])
    assert out[0, 1] == 0 and abs(out[0, 2]) < 1e-36 and out[0, 3] == 0 and out[0, 4] == 200 and out[0, 5] == np.inf
    assert np.isnan(out[0, 6]) and out[0, 7] == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6)
    assert np.isnan(out[0, 0])  # -inf / inf, as PyTorch's formula gives


def test_exp_is_within_one_ulp(isa):
    bits = np.concatenate([np.arange(0, 0x42B17218, 7919), np.arange(0x80000000, 0xC2CFF1B5, 7919)]).astype(np.uint32)
    x = bits.view(np.float32)
    y = np.empty_like(x)
    ops.exp(y, x)
    true = np.exp(x.astype(np.longdouble))
    ulp = np.maximum(np.spacing(true.astype(np.float32)).astype(np.longdouble), 2.0**-149)
    assert (np.abs(y - true) / ulp).max() <= 1.0


def test_exp_at_the_ends(isa):
    x = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1000, -1000, 88.73, -104.1], np.float32)
    y = np.empty_like(x)
    ops.exp(y, x)
    np.testing.assert_array_equal(y, np.array([1, 1, np.inf, 0, np.nan, np.inf, 0, np.inf, 0], np.float32))


@pytest.mark.parametrize("bf16", [False, True])
def test_embed_copies_rows(bf16):
    table = normal(1, 50, 37)
    table = bf16_bits(table) if bf16 else table
    ids = np.array([49, 0, 7, 7, 31], np.int32)
    out = np.empty((5, 37), np.float32)
    ops.embed(out, table, ids, num_threads=2)
    np.testing.assert_array_equal(out, reference.embed(table, ids))


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1, -(2**31)])
def test_embed_refuses_an_id_outside_the_table(bad):
    out = np.zeros((3, 4), np.float32)
    with pytest.raises(IndexError, match=f"token id {bad} at index 1"):
        ops.embed(out, normal(1, 50, 4), np.array([3, bad, 4], np.int32))
    assert (out == 0).all()


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ops.matmul(f32(2, 3), f32(2, 4), f32(3, 5)), ValueError, "w has size 5 along axis 1; wanted 4"),
        (lambda: ops.matmul(f32(2, 4), f32(2, 4), f32(3, 4)), ValueError, "out has size 4 along axis 1"),
        (lambda: ops.matmul(f32(2, 3), f32(4), f32(3, 4)), ValueError, "x has 1 dimensions; wanted 2"),
        (lambda: ops.matmul(f32(2, 3), np.zeros((2, 4)), f32(3, 4)), TypeError, "x has element format 'd'"),
        (lambda: ops.matmul(f32(2, 3), f32(2, 4), np.zeros((3, 4), np.int16)), TypeError, "float32 or uint16"),
        (lambda: ops.matmul(f32(2, 3), f32(2, 8)[:, ::2], f32(3, 4)), ValueError, "x must be a C-contiguous"),
        (lambda: ops.matmul(f32(2, 3), f32(2, 4), f32(3, 4), num_threads=0), ValueError, "num_threads is 0"),
        (lambda: ops.matmul(f32(2, 3), f32(2, 4), f32(3, 4), num_threads=257), ValueError, "num_threads is 257"),
        (lambda: ops.matmul(f32(2, 3), [1.0], f32(3, 4)), TypeError, "x must be a C-contiguous array"),
        (lambda: ops.swiglu(f32(2, 3), f32(2, 5)), ValueError, "gate_up has size 5 along axis 1; wanted 6"),
        (lambda: ops.rmsnorm(f32(2, 3), f32(2, 3), f32(4), 1e-5), ValueError, "weight has size 4"),
        (lambda: ops.embed(f32(2, 3), f32(9, 3), np.zeros(2, np.int64)), TypeError, "wanted int32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_overlapping_and_read_only_and_misaligned_outputs_are_refused():
    block = f32(8, 8)
    with pytest.raises(ValueError, match="out and x overlap"):
        ops.matmul(block[:4], block[2:6], f32(8, 8))
    locked = f32(2, 3)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="out must be a C-contiguous writable"):
        ops.matmul(locked, f32(2, 4), f32(3, 4))
    odd = np.zeros(33, np.uint8)[1:].view(np.float32).reshape(2, 4)
    with pytest.raises(ValueError, match="x is not aligned"):
        ops.matmul(f32(2, 3), odd, f32(3, 4))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_matrices(shape):
    rows, n, k = shape
    out = np.full((rows, n), 7, np.float32)
    ops.matmul(out, f32(rows, k), f32(n, k), num_threads=2)
    assert (out == 0).all()

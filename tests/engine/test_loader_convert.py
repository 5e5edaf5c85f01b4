"""Conversions: every float16 and bfloat16 value, rounding against exact arithmetic, block borders."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.convert import BLOCK, BfloatOverflow, convert


def run(bits: np.ndarray, source: str, out: str) -> np.ndarray:
    result = np.zeros(bits.size, np.uint32 if out == "F32" else np.uint16)
    convert(memoryview(bits.tobytes()), source, memoryview(result).cast("B"), out)
    return result


ALL16 = np.arange(1 << 16, dtype=np.uint16)


def test_every_float16_becomes_the_same_float32():
    expected = ALL16.view(np.float16).astype(np.float32)
    got = run(ALL16, "F16", "F32")
    nan = np.isnan(expected)
    assert np.array_equal(got[~nan], expected.view(np.uint32)[~nan])
    assert np.isnan(got.view(np.float32)[nan]).all()
    assert np.array_equal(got[nan] >> 31, ALL16[nan] >> 15)  # sign kept


def test_every_bfloat16_becomes_its_float32():
    got = run(ALL16, "BF16", "F32")
    for bits in (0x0000, 0x8000, 0x0001, 0x3F80, 0xC049, 0x7F7F, 0x7F80, 0xFF80, 0x7FC1, 0x0080):
        assert struct.pack("<I", got[bits]) == b"\0\0" + struct.pack("<H", bits)  # bfloat16 = the upper two bytes
    assert np.unique(got).size == 1 << 16


def nearest_bfloat16(value: float) -> int:
    """Bits by exact arithmetic: float64 holds a float32, its two bfloat16 neighbours and their distances exactly."""
    bits = struct.unpack("<I", struct.pack("<f", abs(value)))[0]
    low = bits >> 16
    below, above = (struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in (low, low + 1))
    down, up = abs(value) - below, above - abs(value)
    chosen = low if down < up or (down == up and low % 2 == 0) else low + 1
    return chosen | (0x8000 if math.copysign(1, value) < 0 else 0)


LARGEST = struct.unpack("<f", struct.pack("<I", 0x7F7F0000))[0]


@given(st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=1, max_size=50))
def test_float32_rounds_to_the_nearest_bfloat16_ties_to_even(values):
    got = run(np.array(values, np.float32).view(np.uint32), "F32", "BF16")
    assert [int(x) for x in got] == [nearest_bfloat16(v) for v in np.array(values, np.float32).tolist()]


def test_ties_near_ties_and_subnormals():
    words = [(high << 16) | low for high in (0, 1, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x8001, 0xBF80)
             for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]  # fmt: skip
    bits = np.array(words, np.uint32)
    expected = [nearest_bfloat16(v) for v in bits.view(np.float32).tolist()]
    assert run(bits, "F32", "BF16").tolist() == expected


def test_nan_stays_nan_and_infinity_infinity():
    words = [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000, 0x7F80FFFF]  # low payloads must not vanish
    got = run(np.array(words, np.uint32), "F32", "BF16")
    assert all(word & 0x7F80 == 0x7F80 and word & 0x7F for word in got.tolist())
    assert [word >> 15 for word in got.tolist()] == [word >> 31 for word in words]
    assert run(np.array([0x7F800000, 0xFF800000], np.uint32), "F32", "BF16").tolist() == [0x7F80, 0xFF80]


@pytest.mark.parametrize("bits", [0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000, 0xFF7FFFFF])
def test_a_finite_value_that_would_become_infinite_is_refused(bits):
    with pytest.raises(BfloatOverflow):
        run(np.array([0, bits, 0x7FC00000], np.uint32), "F32", "BF16")
    assert run(np.array([bits - 1 if bits & 0xFFFF == 0x8000 else 0], np.uint32), "F32", "BF16")[0] & 0x7FFF <= 0x7F7F


def test_every_float16_rounds_to_bfloat16():
    values = ALL16.view(np.float16)
    got = run(ALL16, "F16", "BF16")
    finite = np.isfinite(values)
    assert [int(x) for x in got[finite]] == [nearest_bfloat16(float(v)) for v in values[finite]]
    assert np.array_equal((got.astype(np.uint32) << 16).view(np.float32)[~finite], values[~finite], equal_nan=True)


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_block_borders(count):
    values = np.random.default_rng(count).standard_normal(count).astype(np.float16)
    got = run(values.view(np.uint16), "F16", "F32")
    assert np.array_equal(got.view(np.float32), values.astype(np.float32))

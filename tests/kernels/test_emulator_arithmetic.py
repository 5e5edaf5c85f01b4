"""The emulator's types and intrinsics against numpy, Python's integers and the PTX ISA's special cases."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.launch import CommonArgument, Launch, address
from tests.kernels.emulator import EmulatedExecutor

CASES = Path(__file__).parent / "emulator" / "cases"
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65519.99, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14]


@pytest.fixture
def ex() -> EmulatedExecutor:
    return EmulatedExecutor(sources=[CASES])


def run(ex: EmulatedExecutor, kernel: str, *arguments: Any, grid: int = 1, block: int = 256) -> None:
    packed = [address(item.ctypes.data) if isinstance(item, np.ndarray) else item for item in arguments]
    ex.run(Launch("arithmetic", kernel, (grid, 1, 1), (block, 1, 1), (CommonArgument(0), *packed)))


def floats(count: int) -> np.ndarray:
    """Any bit pattern, values that lie between two of bf16 or fp16, and special ones."""
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**32, count, dtype=np.uint32)
    ties = (rng.integers(0, 2**16, count, dtype=np.uint32) << 16) | 0x8000
    halves = rng.integers(0, 2**16, count).astype(np.uint16).view(np.float16).astype(np.float32)
    between = (halves.view(np.uint32) | 0x1000).view(np.float32)
    return np.concatenate([any_bits.view(np.float32), ties.view(np.float32), halves, between, np.float32(SPECIAL)])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rounding_to_half_is_numpys(ex: EmulatedExecutor) -> None:
    values = floats(3000)
    out = ex.array(values.size, np.uint16)
    run(ex, "to_half", values, out, np.int32(values.size), grid=-(-values.size // 256))
    want = values.astype(np.float16).view(np.uint16)
    nan = np.isnan(values)
    assert np.array_equal(out[~nan], want[~nan])
    assert np.array_equal(out[nan], np.full(nan.sum(), 0x7FFF))  # CUDA math API: the canonical NaN


def test_rounding_to_bf16_takes_the_nearest_and_even_ties(ex: EmulatedExecutor) -> None:
    values = floats(1000)
    out = ex.array(values.size, np.uint16)
    run(ex, "to_bf16", values, out, np.int32(values.size), grid=-(-values.size // 256))
    for value, bits in zip(values, out, strict=True):
        below = int(np.float32(value).view(np.uint32)) >> 16  # towards zero
        if np.isnan(value):
            assert bits == 0x7FFF
        elif np.isinf(value):
            assert bits == below
        else:  # beyond the largest finite value the next "value" is 2^128, as in IEEE 754's rounding
            low, high = (abs(Fraction(0) + _exact(below + i)) for i in range(2))
            to_low, to_high = abs(Fraction(float(value))) - low, high - abs(Fraction(float(value)))
            up = to_high < to_low or (to_high == to_low and below % 2 == 1)
            assert bits == below + up, value


def _exact(bits: int) -> Fraction:
    """The value of bf16 bits, with infinity as 2^128."""
    exponent, fraction = bits >> 7 & 255, bits & 127
    if exponent == 0:
        return Fraction(fraction, 128) / 2**126
    return (1 + Fraction(fraction, 128)) * Fraction(2) ** (exponent - 127)


def test_widening_is_exact(ex: EmulatedExecutor) -> None:
    from_bf16, from_half = ex.array(65536, np.float32), ex.array(65536, np.float32)
    run(ex, "widen", from_bf16, from_half, grid=256)
    bits = np.arange(65536, dtype=np.uint32)
    assert np.array_equal(from_bf16.view(np.uint32), bits << 16)
    want = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    nan = np.isnan(want)
    assert np.array_equal(from_half[~nan].view(np.uint32), want[~nan].view(np.uint32))
    assert np.isnan(from_half[nan]).all()


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def byte_perm(x: int, y: int, selector: int) -> int:
    """PTX ISA, prmt: selector digit = byte to take, its high bit = copy of that byte's sign."""
    data, out = (y << 32 | x).to_bytes(8, "little"), []
    for i in range(4):
        digit = selector >> 4 * i & 15
        byte = data[digit & 7]
        out.append((255 if byte & 128 else 0) if digit & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def test_integer_intrinsics(ex: EmulatedExecutor) -> None:
    rng = np.random.default_rng(1)
    edges = [0, 1, 2, 31, 32, 33, 2**31 - 1, 2**31, 2**32 - 1]
    pairs = [(x, y) for x in edges for y in edges] + rng.integers(0, 2**32, (200, 2)).tolist()
    a, b = (np.array(column, np.uint32) for column in zip(*pairs, strict=True))
    out = ex.array((len(pairs), 12), np.uint64)
    run(ex, "integers", a, b, out, np.int32(len(pairs)))
    for (x, y), row in zip(pairs, out.tolist(), strict=True):
        wide, other = x << 32 | y, y << 32 | x
        want = [
            x * y >> 32,
            (signed(x, 32) * signed(y, 32) >> 32) % 2**32,
            wide * other >> 64,
            (signed(wide, 64) * signed(other, 64) >> 64) % 2**64,
            32 - x.bit_length(),
            64 - wide.bit_length(),
            wide.bit_count(),
            (x & -x).bit_length(),
            int(f"{x:032b}"[::-1], 2),
            (other << (y & 31) >> 32) % 2**32,  # of y:x, the upper half
            (other >> (x & 31)) % 2**32,
            byte_perm(x, y, x ^ y),
        ]
        assert row == want, (x, y)


def test_conversions_to_integers_saturate(ex: EmulatedExecutor) -> None:
    values = [
        0.5,
        1.5,
        2.5,
        -0.5,
        -2.5,
        3e9,
        -3e9,
        5e9,
        1e19,
        -1e19,
        2e19,
        np.inf,
        -np.inf,
        2.0**31,
        2.0**63,
        -(2.0**63),
    ]
    out = ex.array((len(values) + 1, 6), np.int64)
    run(ex, "to_integers", np.array([*values, np.nan]), out, np.int32(len(values) + 1))
    ranges = [(-(2**31), 2**31 - 1), (0, 2**32 - 1), (-(2**63), 2**63 - 1)]
    ranges += [ranges[0], ranges[2], (0, 2**64 - 1)]
    for value, row in zip(values, out.tolist(), strict=False):
        for column, (low, high) in enumerate(ranges):
            exact = value if abs(value) == np.inf or column > 2 else float(np.float32(value))
            want = (high if exact > 0 else low) if abs(exact) == np.inf else min(max(round(exact), low), high)
            assert row[column] % 2**64 == want % 2**64, (value, column)
    # PTX ISA, cvt: NaN is 0, but the least number (or 2^63) where one side has 64 bits.
    assert [item % 2**64 for item in out[-1].tolist()] == [0, 0, 2**63, 2**64 - 2**31, 2**63, 2**63]


def test_no_fused_operation_but_where_asked(ex: EmulatedExecutor) -> None:
    rng = np.random.default_rng(2)
    a, b, c = (rng.standard_normal(500).astype(np.float32) for _ in range(3))
    out = ex.array((500, 6), np.float32)
    run(ex, "rounding", a, b, c, out, np.int32(500))
    apart = a * b + c  # numpy rounds twice
    exact = a.astype(np.float64) * b.astype(np.float64)  # exact: 48 bits
    fused = np.array([_round_to_float(Fraction(float(p)) + Fraction(float(q))) for p, q in zip(exact, c, strict=True)])
    assert np.array_equal(out[:, 0], apart) and np.array_equal(out[:, 1], apart)
    assert np.array_equal(out[:, 2], fused) and (fused != apart).any()
    assert np.array_equal(out[:, 3], a / b)
    assert np.array_equal(out[:, 4], np.sqrt(np.abs(a))) and np.array_equal(out[:, 5], np.float32(1) / b)


def _round_to_float(value: Fraction) -> np.float32:
    """The nearest float32, ties to even (values are normal)."""
    near = np.float32(float(value))  # at most one step off, by rounding twice
    choices = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(choices, key=lambda item: (abs(Fraction(float(item)) - value), int(item.view(np.uint32)) & 1))

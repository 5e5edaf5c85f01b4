"""Conversion of weight chunks between float16, bfloat16 (as uint16 bits) and float32, into memory given by the caller.

numpy has no bfloat16 and its own float16 -> float32 loop is slow; these work on the bits, a block that fits the
cache at a time, and release the GIL. All are exact or round to nearest, ties to even. NaN stays NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 1 << 16  # elements; source, result and scratch stay in a 1 MB L2 cache

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

_F16_SCALE = np.array(0x77800000, dtype=np.uint32).view(np.float32)  # 2**112 = 2**(127 - 15)


class BfloatOverflow(ValueError):
    """A finite value is too large for bfloat16 and would become infinite."""


class Scratch:
    """Working memory of one thread, reused for every block: fresh arrays of this size would each be a mmap."""

    def __init__(self) -> None:
        self.a = np.empty(BLOCK, np.uint32)
        self.b = np.empty(BLOCK, np.uint32)
        self.wide = np.empty(BLOCK, np.uint32)


def bf16_to_f32(source: U16, out: U32, scratch: Scratch) -> None:
    """Exact: a bfloat16 is the upper half of a float32."""
    np.left_shift(source, np.uint32(16), out=out, dtype=np.uint32)


def f16_to_f32(source: U16, out: U32, scratch: Scratch) -> None:
    """Exact, subnormals, infinities and NaN payloads included.

    Exponent and mantissa moved into float32's place give the value times 2**-112, so one multiplication by a power of
    two puts it right, subnormals too (a float32 subnormal times 2**112 is exact).
    """
    sign = scratch.a[: source.size]
    np.bitwise_and(source, np.uint32(0x7FFF), out=out, dtype=np.uint32)
    any_special = out.size and out.max() >= 0x7C00  # infinity or NaN
    np.left_shift(out, np.uint32(13), out=out)
    value = out.view(np.float32)
    np.multiply(value, _F16_SCALE, out=value)
    np.bitwise_and(source, np.uint32(0x8000), out=sign, dtype=np.uint32)
    np.left_shift(sign, np.uint32(16), out=sign)
    np.bitwise_or(out, sign, out=out)
    if any_special:
        special = (source & np.uint16(0x7C00)) == 0x7C00
        wide = source[special].astype(np.uint32)
        out[special] = (sign[special] | np.uint32(0x7F800000)) | ((wide & np.uint32(0x3FF)) << np.uint32(13))


def f32_to_bf16(source: U32, out: U16, scratch: Scratch) -> None:
    """Round to nearest, ties to even. NaN keeps sign and upper payload and is made quiet. Raises BfloatOverflow."""
    work = scratch.b[: source.size]
    np.bitwise_and(source, np.uint32(0x7FFFFFFF), out=work)
    largest = work.max() if work.size else 0
    if largest >= 0x7F7F8000 and np.any((work >= 0x7F7F8000) & (work < 0x7F800000)):
        raise BfloatOverflow  # at least half way from the largest finite bfloat16 to the next, which is infinity
    nan = (work > 0x7F800000) if largest > 0x7F800000 else None
    np.right_shift(source, np.uint32(16), out=work)
    np.bitwise_and(work, np.uint32(1), out=work)
    np.add(work, np.uint32(0x7FFF), out=work)  # half of the last bit kept, less one unless that bit is odd
    np.add(work, source, out=work)
    np.right_shift(work, np.uint32(16), out=out, casting="unsafe")  # the upper half is zero
    if nan is not None:
        out[nan] = (source[nan] >> np.uint32(16)) | np.uint32(0x40)


def f16_to_bf16(source: U16, out: U16, scratch: Scratch) -> None:
    """Through float32: exact up, one rounding down. The range grows, so nothing overflows."""
    wide = scratch.wide[: source.size]
    f16_to_f32(source, wide, scratch)
    f32_to_bf16(wide, out, scratch)


_CONVERTERS: dict[tuple[str, str], Callable[[Any, Any, Scratch], None]] = {
    ("BF16", "F32"): bf16_to_f32,
    ("F16", "F32"): f16_to_f32,
    ("F32", "BF16"): f32_to_bf16,
    ("F16", "BF16"): f16_to_bf16,
}
_BITS: dict[str, type[np.uint16] | type[np.uint32]] = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32}


def convert(source: memoryview, source_dtype: str, out: memoryview, out_dtype: str) -> None:
    """Fill `out` with the elements of `source` (bytes of equal element counts). dtypes: "F16", "BF16", "F32".

    Raises BfloatOverflow; the caller knows the tensor's name.
    """
    step = _CONVERTERS[source_dtype, out_dtype]
    before = np.frombuffer(source, dtype=_BITS[source_dtype])
    after = np.frombuffer(out, dtype=_BITS[out_dtype])
    scratch = Scratch()
    for start in range(0, before.size, BLOCK):
        step(before[start : start + BLOCK], after[start : start + BLOCK], scratch)

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

BLOCK = 1 << 16  # elements; 3 arrays of 4 bytes each stay in a 1 MB L2 cache

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

_F16_SCALE = np.array(0x77800000, dtype=np.uint32).view(np.float32)  # 2**112 = 2**(127 - 15)


class BfloatOverflow(ValueError):
    """A finite value is too large for bfloat16 and would become infinite."""


def bf16_to_f32(source: U16, out: U32) -> None:
    """Exact: a bfloat16 is the upper half of a float32."""
    np.left_shift(source, np.uint32(16), out=out, dtype=np.uint32)


def f16_to_f32(source: U16, out: U32) -> None:
    """Exact, subnormals, infinities and NaN payloads included.

    Exponent and mantissa moved into float32's place give the value times 2**-112, so one multiplication by a power of
    two puts it right, subnormals too (a float32 subnormal times 2**112 is exact).
    """
    np.bitwise_and(source, np.uint32(0x7FFF), out=out, dtype=np.uint32)
    special = out >= 0x7C00  # infinity or NaN
    np.left_shift(out, np.uint32(13), out=out)
    value = out.view(np.float32)
    np.multiply(value, _F16_SCALE, out=value)
    if special.any():
        wide = source[special].astype(np.uint32)
        out[special] = np.uint32(0x7F800000) | ((wide & np.uint32(0x3FF)) << np.uint32(13))
    sign = np.bitwise_and(source, np.uint32(0x8000), dtype=np.uint32)
    np.left_shift(sign, np.uint32(16), out=sign)
    np.bitwise_or(out, sign, out=out)


def f32_to_bf16(source: U32, out: U16) -> None:
    """Round to nearest, ties to even. NaN keeps sign and upper payload and is made quiet. Raises BfloatOverflow."""
    odd = np.right_shift(source, np.uint32(16))
    np.bitwise_and(odd, np.uint32(1), out=odd)
    np.add(odd, np.uint32(0x7FFF), out=odd)
    np.add(odd, source, out=odd)
    np.right_shift(odd, np.uint32(16), out=odd)
    magnitude = np.bitwise_and(source, np.uint32(0x7FFFFFFF))
    if magnitude.size and magnitude.max() >= 0x7F7F8000:  # half way above the largest finite bfloat16, or special
        if np.any((magnitude >= 0x7F7F8000) & (magnitude < 0x7F800000)):
            raise BfloatOverflow
        nan = magnitude > 0x7F800000
        odd[nan] = (source[nan] >> np.uint32(16)) | np.uint32(0x40)
    out[...] = odd  # fits: the upper half is zero


def f16_to_bf16(source: U16, out: U16) -> None:
    """Through float32: exact up, one rounding down. The range grows, so nothing overflows."""
    wide = np.empty(source.shape, np.uint32)
    f16_to_f32(source, wide)
    f32_to_bf16(wide, out)


_CONVERTERS: dict[tuple[str, str], Callable[[Any, Any], None]] = {
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
    for start in range(0, before.size, BLOCK):
        step(before[start : start + BLOCK], after[start : start + BLOCK])

"""Dequantisation of GGML tensor formats to float32, vectorised with numpy.

Layouts are those of the block structs in ggml (ggml-common.h); every block is little-endian. The arithmetic is float32
in the order of ggml's reference code, so the results are bit-equal to the `gguf` package's
(tests/appliance/test_dequant.py).

Notation: d, m are a block's scale and minimum; q the integer of a weight. An output row is the blocks end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[Any]  # (num_blocks,) structured
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One storage format. `decode` takes (num_blocks,) of `layout` and gives (num_blocks, block_weights) float32."""

    name: str
    number: int  # enum ggml_type, as written in the file
    block_weights: int
    layout: np.dtype[Any]
    decode: Callable[[Blocks], Float32Array]

    @property
    def block_bytes(self) -> int:
        return self.layout.itemsize


def dequantize(raw: npt.NDArray[np.uint8], ggml_type: GgmlType) -> Float32Array:
    """(rows, row_bytes) uint8 -> (rows, row_weights) float32. row_bytes must be whole blocks.

    Non-finite scales give non-finite weights, without a warning; the caller decides what that means.
    """
    rows, row_bytes = raw.shape
    if row_bytes % ggml_type.block_bytes:
        raise ValueError(f"{ggml_type.name}: rows of {row_bytes} bytes are not whole blocks of {ggml_type.block_bytes}")
    blocks = np.ascontiguousarray(raw).reshape(-1).view(ggml_type.layout)
    with np.errstate(all="ignore"):
        values = ggml_type.decode(blocks)
    return values.reshape(rows, row_bytes // ggml_type.block_bytes * ggml_type.block_weights)


def _column(field: npt.NDArray[Any]) -> Float32Array:
    return field.astype(np.float32)[:, np.newaxis]


def _nibbles(packed: UInt8Array) -> UInt8Array:
    """(blocks, n) bytes -> (blocks, 2n): all low nibbles, then all high ones."""
    return np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=1)


def _fifth_bits(bits: UInt8Array) -> UInt8Array:
    """(blocks, 4) bytes, bit i belongs to weight i -> (blocks, 32) of 0 or 16."""
    return np.unpackbits(bits, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: Blocks) -> Float32Array:
    q = _nibbles(b["q"]).view(np.int8) - np.int8(8)
    return _column(b["d"]) * q.astype(np.float32)


def _q4_1(b: Blocks) -> Float32Array:
    return _column(b["d"]) * _nibbles(b["q"]).astype(np.float32) + _column(b["m"])


def _q5_0(b: Blocks) -> Float32Array:
    q = (_nibbles(b["q"]) | _fifth_bits(b["h"])).view(np.int8) - np.int8(16)
    return _column(b["d"]) * q.astype(np.float32)


def _q5_1(b: Blocks) -> Float32Array:
    q = _nibbles(b["q"]) | _fifth_bits(b["h"])
    return _column(b["d"]) * q.astype(np.float32) + _column(b["m"])


def _q8_0(b: Blocks) -> Float32Array:
    return b["q"].astype(np.float32) * _column(b["d"])


def _six_bit_scales(packed: UInt8Array) -> tuple[UInt8Array, UInt8Array]:
    """(blocks, 12) bytes -> scales and minimums (blocks, 8), 6 bits each.

    Bytes 0-3 and 4-7 hold the first four scales and minimums in their low 6 bits; their top 2 bits are the top of the
    last four, whose low nibbles share bytes 8-11 (scale low, minimum high).
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    top, low_six, four = np.uint8(0x30), np.uint8(63), np.uint8(4)
    scales = np.concatenate((first & low_six, (third & np.uint8(15)) | (first >> np.uint8(2) & top)), axis=1)
    minimums = np.concatenate((second & low_six, (third >> four) | (second >> np.uint8(2) & top)), axis=1)
    return scales, minimums


def _k_affine(b: Blocks, q: UInt8Array) -> Float32Array:
    """q (blocks, 8, 32) -> d * scale * q - dmin * minimum, eight sub-blocks of 32."""
    scales, minimums = _six_bit_scales(b["s"])
    d = (_column(b["d"]) * scales.astype(np.float32))[:, :, np.newaxis]
    m = (_column(b["m"]) * minimums.astype(np.float32))[:, :, np.newaxis]
    values: Float32Array = d * q.astype(np.float32) - m
    return values.reshape(len(b), 256)


def _k_nibbles(packed: UInt8Array) -> UInt8Array:
    """(blocks, 128) bytes -> (blocks, 8, 32): each 32 bytes hold two sub-blocks, low then high nibbles."""
    groups = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((groups & np.uint8(15), groups >> np.uint8(4)), axis=2).reshape(-1, 8, 32)


def _q4_k(b: Blocks) -> Float32Array:
    return _k_affine(b, _k_nibbles(b["q"]))


def _q5_k(b: Blocks) -> Float32Array:
    sub_block = np.arange(8, dtype=np.uint8)[np.newaxis, :, np.newaxis]
    high = b["h"][:, np.newaxis, :] >> sub_block & np.uint8(1)  # bit j of byte l: weight l of sub-block j
    return _k_affine(b, _k_nibbles(b["q"]) | high << np.uint8(4))


def _q6_k(b: Blocks) -> Float32Array:
    low = b["q"].reshape(-1, 2, 1, 64)  # two halves of 128 weights; 64 bytes: weights 0..63 low, 64..127 high nibbles
    low = np.concatenate((low & np.uint8(15), low >> np.uint8(4)), axis=2).reshape(-1, 2, 4, 32)
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)[np.newaxis, np.newaxis, :, np.newaxis]
    high = b["h"].reshape(-1, 2, 1, 32) >> shift & np.uint8(3)
    q = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    d = (_column(b["d"]) * b["s"].astype(np.float32))[:, :, np.newaxis]
    values: Float32Array = d * q.reshape(-1, 16, 16).astype(np.float32)
    return values.reshape(len(b), 256)


def _bf16(b: Blocks) -> Float32Array:
    widened: npt.NDArray[np.uint32] = b["q"].astype(np.uint32) << np.uint32(16)
    return widened.view(np.float32)[:, np.newaxis]


def _plain(b: Blocks) -> Float32Array:
    return _column(b["q"])


def _layout(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


_D, _M = ("d", "<f2"), ("m", "<f2")
GGML_TYPES: dict[int, GgmlType] = {
    entry.number: entry
    for entry in (
        GgmlType("F32", 0, 1, _layout(("q", "<f4")), _plain),
        GgmlType("F16", 1, 1, _layout(("q", "<f2")), _plain),
        GgmlType("Q4_0", 2, 32, _layout(_D, ("q", "u1", 16)), _q4_0),
        GgmlType("Q4_1", 3, 32, _layout(_D, _M, ("q", "u1", 16)), _q4_1),
        GgmlType("Q5_0", 6, 32, _layout(_D, ("h", "u1", 4), ("q", "u1", 16)), _q5_0),
        GgmlType("Q5_1", 7, 32, _layout(_D, _M, ("h", "u1", 4), ("q", "u1", 16)), _q5_1),
        GgmlType("Q8_0", 8, 32, _layout(_D, ("q", "i1", 32)), _q8_0),
        GgmlType("Q4_K", 12, 256, _layout(_D, _M, ("s", "u1", 12), ("q", "u1", 128)), _q4_k),
        GgmlType("Q5_K", 13, 256, _layout(_D, _M, ("s", "u1", 12), ("h", "u1", 32), ("q", "u1", 128)), _q5_k),
        GgmlType("Q6_K", 14, 256, _layout(("q", "u1", 128), ("h", "u1", 64), ("s", "i1", 16), _D), _q6_k),
        GgmlType("BF16", 30, 1, _layout(("q", "<u2")), _bf16),
    )
}
"""By the number in the file. IQ and ternary types, Q2_K, Q3_K and Q8_1 are refused by the reader."""

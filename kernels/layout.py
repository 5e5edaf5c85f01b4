"""How weights and keys lie in device memory, in numpy: the statement that kernels/common.cuh ("layouts") also makes.

Tests compare kernels with these functions; the loader and the runner take sizes and offsets from here. Matrices are
bf16, given as uint16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

U16 = npt.NDArray[np.uint16]
I64 = npt.NDArray[np.int64]

PAGE_TOKENS = 128
TILE_ROWS = 16
TILE_COLUMNS = 64
TILE_BYTES = 2 * TILE_ROWS * TILE_COLUMNS
ARENA_ALIGNMENT = 2048
"""Of every parameter in the arena: a tile, and more than any copy instruction asks for."""

HEAD_DIMS_PADDED = (64, 96, 128, 256)


class RowMap(IntEnum):
    """kernels/retile.cu: where row r of a checkpoint matrix goes in the tiled one."""

    PLAIN = 0  # row0 + r
    GATE = 1  # gate_up: r // 8 * 16 + r % 8
    UP = 2  # gate_up: the same + 8


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_columns(columns: int) -> int:
    """k_pad of the GEMM kernels, and the least row length (ld) of an activation buffer with that many columns."""
    return round_up(columns, TILE_COLUMNS)


def tiled_elements(rows: int, columns: int) -> int:
    """Elements of a tiled matrix (rows, columns), padding included."""
    return round_up(rows, TILE_ROWS) * padded_columns(columns)


def gate_up_rows(intermediate: int) -> int:
    """Rows of the interleaved gate_up matrix of `intermediate` gate and as many up rows; both padded to 8."""
    return 2 * round_up(intermediate, TILE_ROWS // 2)


def mapped_rows(rows: npt.NDArray[Any], row_map: RowMap, row0: int = 0) -> I64:
    """Row of the tiled matrix for each row of a checkpoint matrix."""
    r: I64 = np.asarray(rows, np.int64)
    if row_map == RowMap.PLAIN:
        return r + row0
    mapped: I64 = r // 8 * 16 + r % 8 + (8 if row_map == RowMap.UP else 0)
    return mapped


def tile_offset(n: npt.NDArray[Any], k: npt.NDArray[Any], k_pad: int) -> I64:
    """Element offset of W[n][k] in its tiled matrix; arrays broadcast. common.cuh:tile_offset."""
    n, k = np.asarray(n, np.int64), np.asarray(k, np.int64)
    index = (n // 16) * (k_pad // 64) + k // 64
    chunk = (k // 8 % 8) ^ (n % 8)
    offset: I64 = index * 1024 + (n // 8 % 2) * 512 + (n % 8) * 64 + chunk * 8 + k % 8
    return offset


def tile(matrix: U16) -> U16:
    """(N, K) bf16 bits -> flat tiled array, zeros in the padding."""
    rows, columns = matrix.shape
    padded = np.zeros((round_up(rows, TILE_ROWS), padded_columns(columns)), np.uint16)
    padded[:rows, :columns] = matrix
    # (tile row, atom, row, tile column, chunk, element): rows and tile columns change places, then the swizzle
    parts = padded.reshape(len(padded) // 16, 2, 8, -1, 8, 8).transpose(0, 3, 1, 2, 4, 5)
    chunk = np.arange(8)
    swizzled = np.empty_like(parts)
    for row in range(8):
        swizzled[:, :, :, row, chunk ^ row] = parts[:, :, :, row]
    return swizzled.reshape(-1)


def untile(tiled: U16, rows: int, columns: int) -> U16:
    """The inverse of `tile`."""
    n, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    matrix: U16 = tiled[tile_offset(n, k, padded_columns(columns))]
    return matrix


def interleave_gate_up(gate: U16, up: U16) -> U16:
    """(I, K) each -> (gate_up_rows(I), K) in the row order of the tiled matrix; `tile` it next."""
    rows, columns = gate.shape
    out = np.zeros((gate_up_rows(rows), columns), np.uint16)
    out[mapped_rows(np.arange(rows), RowMap.GATE)] = gate
    out[mapped_rows(np.arange(rows), RowMap.UP)] = up
    return out


# ---- the arena -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArenaSlot:
    """One parameter on the device. Vectors are fp32 (columns 0); matrices are bf16 tiles."""

    offset: int  # bytes, a multiple of ARENA_ALIGNMENT
    nbytes: int  # without the padding up to the next parameter
    rows: int  # of the tiled matrix (gate_up: interleaved, see gate_up_rows); elements of a vector
    columns: int

    @property
    def is_matrix(self) -> bool:
        return self.columns > 0

    @property
    def k_pad(self) -> int:
        return padded_columns(self.columns)


def arena_slots(parameters: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[dict[str, ArenaSlot], int]:
    """Places of canonical parameters (engine.params.parameters: name and shape) and the arena's size in bytes.

    A name that ends in "gate_up" has shape (2 I, K), rows gate then up, and is laid out interleaved.
    """
    slots: dict[str, ArenaSlot] = {}
    position = 0
    for name, shape in parameters:
        if len(shape) == 1:
            rows, columns, nbytes = shape[0], 0, 4 * shape[0]
        else:
            rows, columns = shape
            if name.endswith("gate_up"):
                rows = gate_up_rows(rows // 2)
            nbytes = 2 * tiled_elements(rows, columns)
        slots[name] = ArenaSlot(position, nbytes, rows, columns)
        position = round_up(position + nbytes, ARENA_ALIGNMENT)
    return slots, position


# ---- the KV pool -----------------------------------------------------------------------------------------------------


def padded_head_dim(head_dim: int) -> int:
    """Dp: the row length of q, and of K and V in a page. ValueError if no kernel takes the head_dim."""
    for padded in HEAD_DIMS_PADDED:
        if head_dim <= padded:
            step = {64: 4, 96: 8, 128: 8, 256: 16}[padded]
            if head_dim < 2 or head_dim % step:
                break
            return padded
    raise ValueError(
        f"head_dim is {head_dim}; the CUDA kernels take multiples of 4 up to 64, of 8 up to 128, of 16 up to 256"
    )


def page_elements(num_kv_heads: int, head_dim: int) -> int:
    """Elements of the keys (or the values) of one layer in one page."""
    return num_kv_heads * PAGE_TOKENS * padded_head_dim(head_dim)


def kv_pool_bytes(num_layers: int, num_pages: int, num_kv_heads: int, head_dim: int) -> int:
    """The whole pool: per layer K then V, each of num_pages pages and the dummy page (index num_pages)."""
    return num_layers * 2 * (num_pages + 1) * page_elements(num_kv_heads, head_dim) * 2


def kv_layer_offsets(layer: int, num_pages: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Byte offsets of a layer's K and V in the pool."""
    nbytes = (num_pages + 1) * page_elements(num_kv_heads, head_dim) * 2
    return 2 * layer * nbytes, (2 * layer + 1) * nbytes


def kv_offset(
    page: npt.NDArray[Any],
    head: npt.NDArray[Any],
    token: npt.NDArray[Any],
    d: npt.NDArray[Any],
    num_kv_heads: int,
    dp: int,
) -> I64:
    """Element offset in a layer's K or V; arrays broadcast. common.cuh:kv_offset."""
    page, head, token, d = (np.asarray(part, np.int64) for part in (page, head, token, d))
    if dp == 96:
        in_page = token * 96 + ((d // 8) ^ (token // 2 % 4)) * 8
    else:  # panels of 64 columns
        in_page = d // 64 * (64 * PAGE_TOKENS) + token * 64 + ((d // 8 % 8) ^ (token % 8)) * 8
    offset: I64 = (page * num_kv_heads + head) * (PAGE_TOKENS * dp) + in_page + d % 8
    return offset


def swizzle_pages(pages: U16, dp: int) -> U16:
    """(P, Hkv, 128, D) bf16 bits -> flat, as the pool holds them, zeros in columns D..Dp."""
    num_pages, heads, _, head_dim = pages.shape
    flat = np.zeros(num_pages * heads * PAGE_TOKENS * dp, np.uint16)
    flat[_page_indices(num_pages, heads, head_dim, dp)] = pages
    return flat


def unswizzle_pages(flat: U16, num_pages: int, num_kv_heads: int, head_dim: int, dp: int) -> U16:
    """The inverse of swizzle_pages; head_dim = dp shows the padding too."""
    pages: U16 = flat[_page_indices(num_pages, num_kv_heads, head_dim, dp)]
    return pages


def _page_indices(num_pages: int, heads: int, head_dim: int, dp: int) -> I64:
    page, head, token, d = np.ogrid[:num_pages, :heads, :PAGE_TOKENS, :head_dim]
    return kv_offset(page, head, token, d, heads, dp)

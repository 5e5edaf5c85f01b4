"""Launches of attention (kernels/attention_decode.cu, attention_prefill.cu), and what they need beside them.

Pure functions of shapes and device addresses (int). Mathematics and layouts stand at the top of the .cu files and of
attention_core.cuh. Decode and prefill give the same bits for a token, so what runs where is a choice of speed alone.
Sizes: Hq/Hkv heads, D head_dim, Dp its padding (layout.padded_head_dim).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kernels.launch import CommonArgument, Executor, Launch, Op, address
from kernels.layout import PAGE_TOKENS, padded_head_dim

HEAD_BLOCK = 16
"""Query heads of a KV head that one block computes together: the rows of a tensor core tile."""

_i32 = np.int32
_PARTIAL_HEADER = 8  # floats before o: m, l, padding
_DECODE_WARPS = 4
_EXCHANGE_BYTES = 5632  # attention_decode.cu
_HOPPER_STAGES = {64: (6, 2), 96: (4, 2), 128: (3, 2), 256: (3, 1)}  # page buffers a block, blocks a multiprocessor
_PREFILL_ROWS = {"hopper": {64: 128, 96: 128, 128: 128, 256: 128}, "portable": {64: 128, 96: 128, 128: 128, 256: 64}}
_WGMMA_THREADS = 384
_WGMMA_STAGES = {64: 4, 128: 2, 256: 1}  # hopper: buffers of K and V; head_dims not here take the portable kernel


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is the same for every layer of a model. ValueError if no kernel takes it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0  # 0 = none; else a token sees the last `window` positions, itself included

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads must be a multiple of {self.num_kv_heads} KV heads")
        if self.window < 0:
            raise ValueError(f"window {self.window}: must be 0 (none) or positive")
        padded_head_dim(self.head_dim)

    @property
    def padded_dim(self) -> int:
        return padded_head_dim(self.head_dim)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def head_blocks(self) -> int:
        return self.num_kv_heads * -(-self.group // HEAD_BLOCK)

    @property
    def scale_log2(self) -> np.float32:
        return np.float32(math.log2(math.e) / math.sqrt(self.head_dim))


def partial_bytes(shape: AttentionShape, max_visible_pages: int) -> int:
    """Workspace of decode: `max_visible_pages` = the largest page_prefix[M] of a step (a page that several rows share
    counts once for each)."""
    return max_visible_pages * shape.num_heads * (shape.padded_dim + _PARTIAL_HEADER) * 4


def counter_elements(shape: AttentionShape, max_rows: int) -> int:
    """uint32 elements of decode's counters, zero before the first launch; shared by all layers."""
    return max_rows * shape.head_blocks


def decode(
    executor: Executor, shape: AttentionShape, q: int, k_layer: int, v_layer: int, out: int, partial: int,
    counters: int, page_prefix: int, positions: int, slots: int, block_tables: int,
    *,
    num_rows: int, table_width: int, num_pages: int, ld_out: int, layer: int = -1, num_blocks: int | None = None,
) -> Launch:  # fmt: skip
    """out[row][h * D + d] (bf16, rows ld_out apart) of decode rows 0..num_rows-1. Every length fits the same launch.

    `num_blocks`: the grid; does not change a bit."""
    padded = shape.padded_dim
    _check_out(shape, ld_out)
    if executor.path == "hopper":
        stages, per_sm = _HOPPER_STAGES[padded]
        warps, pages, q_slots = _DECODE_WARPS + 2, stages, (stages + 1) // 2
    else:
        per_sm = 1 if padded == 256 else 2
        warps, pages, q_slots = _DECODE_WARPS, 1 if padded == 256 else 2, 1
    return Launch(
        module="attention_decode",
        kernel=f"attention_decode_d{padded}",
        grid=(num_blocks or executor.num_multiprocessors * per_sm, 1, 1),
        block=(32 * warps, 1, 1),
        arguments=(
            CommonArgument(Op.ATTENTION, layer), address(q), address(k_layer), address(v_layer), address(out),
            address(partial), address(counters), address(page_prefix), address(positions), address(slots),
            address(block_tables), _i32(table_width), _i32(num_pages), _i32(num_rows), _i32(shape.num_heads),
            _i32(shape.num_kv_heads), _i32(shape.head_dim), _i32(ld_out), shape.scale_log2, _i32(shape.window),
        ),
        shared_bytes=pages * _page_bytes(padded) + _EXCHANGE_BYTES + q_slots * HEAD_BLOCK * _q_row_bytes(padded),
    )  # fmt: skip


def tile_tokens(shape: AttentionShape, path: str) -> int:
    """Most tokens of a prefill tile: with the heads that share a KV head they fill a block's rows."""
    return _PREFILL_ROWS[path][shape.padded_dim] // min(HEAD_BLOCK, shape.group)


def prefill_tiles(chunks: Iterable[tuple[int, int, int]], tokens: int) -> list[tuple[int, int]]:
    """Tiles (first row, number of rows) of chunks (first row, number of rows, position of the first row), each of one
    sequence in ascending positions; `tokens` from tile_tokens. Those with the most keys come first: no long tile
    starts when the others are done."""
    tiles = [
        (position + start, first_row + start, min(tokens, num_rows - start))
        for first_row, num_rows, position in chunks
        for start in range(0, num_rows, tokens)
    ]
    tiles.sort(key=lambda tile: -((tile[0] + tile[2] - 1) // PAGE_TOKENS))  # stable: neighbours share pages in L2
    return [(row, count) for _, row, count in tiles]


def prefill(
    executor: Executor, shape: AttentionShape, q: int, k_layer: int, v_layer: int, out: int, tiles: int,
    positions: int, slots: int, block_tables: int,
    *,
    num_tiles: int, table_width: int, num_pages: int, ld_out: int, layer: int = -1,
) -> Launch:  # fmt: skip
    """out[row][h * D + d] (bf16, rows ld_out apart) of the rows in `tiles` (num_tiles, 2) int32, see prefill_tiles."""
    padded = shape.padded_dim
    _check_out(shape, ld_out)
    rows = _PREFILL_ROWS[executor.path][padded]
    parts = 2 if padded == 256 else 1  # blocks that share the columns of V
    num_blocks, threads = num_tiles * shape.head_blocks * parts, 2 * rows
    if executor.path == "hopper" and padded in _WGMMA_STAGES:
        pages_bytes = _WGMMA_STAGES[padded] * (_page_bytes(padded) + _page_bytes(padded) // parts)
        q_bytes = rows * 2 * padded * (1 if padded == 256 else 2)
        num_blocks, threads = min(num_blocks, executor.num_multiprocessors), _WGMMA_THREADS
    else:
        pages_bytes = (1 if padded == 256 else 2) * _page_bytes(padded)
        q_bytes = rows * _q_row_bytes(padded)
    return Launch(
        module="attention_prefill",
        kernel=f"attention_prefill_d{padded}",
        grid=(num_blocks, 1, 1),
        block=(threads, 1, 1),
        arguments=(
            CommonArgument(Op.ATTENTION, layer), address(q), address(k_layer), address(v_layer), address(out),
            address(tiles), address(positions), address(slots), address(block_tables), _i32(num_tiles),
            _i32(table_width), _i32(num_pages), _i32(shape.num_heads), _i32(shape.num_kv_heads), _i32(shape.head_dim),
            _i32(ld_out), shape.scale_log2, _i32(shape.window),
        ),
        shared_bytes=pages_bytes + q_bytes,
    )  # fmt: skip


def _page_bytes(padded: int) -> int:
    return PAGE_TOKENS * padded * 2


def _q_row_bytes(padded: int) -> int:
    return 2 * padded + 16  # so that eight rows are in different banks


def _check_out(shape: AttentionShape, ld_out: int) -> None:
    if ld_out % 2 or ld_out < shape.num_heads * shape.head_dim:
        raise ValueError(f"ld_out {ld_out} must be even and hold {shape.num_heads} heads of {shape.head_dim}")

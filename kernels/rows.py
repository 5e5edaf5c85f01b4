"""Launches of the kernels between the matrix products: embed, rmsnorm, qkv_post, step_prepare, and those of the load.

Pure functions of shapes and device addresses (int, 0 = null). Layouts, dtypes and mathematics stand at the top of each
.cu file; sizes in kernels/layout.py. All raise ValueError for a shape no kernel takes.
Sizes: T rows (tokens), H hidden, Hq/Hkv heads, D head_dim, Dp its padding (layout.padded_head_dim).
"""

from __future__ import annotations

import numpy as np

from kernels.checksum import BLOCK_BYTES, PARTS, num_blocks
from kernels.launch import CommonArgument, Launch, Op, address
from kernels.layout import PAGE_TOKENS, RowMap, padded_columns, padded_head_dim, round_up

MAX_HIDDEN = 32768
SOURCE_DTYPES = {"BF16": 0, "F16": 1, "F32": 2}
"""safetensors names of what retile and copy_f32 read."""

_i32 = np.int32
# Where bandwidth begins to count more than latency (measured on an H200, kernels/LOG.md)
_FEW_ROWS = 64  # rmsnorm
_FEW_HEADS = 8192  # qkv_post: rows times heads
_LOAD_BLOCK = 256
_MAX_LOAD_BLOCKS = 2112  # 16 a multiprocessor on 132: enough to fill any GPU, and each thread has work left


def embed(
    token_ids: int, slots: int, positions: int, table: int, x: int, *, num_rows: int, hidden: int, vocab_size: int
) -> Launch:
    """x (T, H) fp32 = rows token_ids (T,) of the tiled table (vocab_size, H)."""
    return Launch(
        module="embed",
        kernel="embed",
        grid=(num_rows, 1, 1),
        block=(min(512, _threads(hidden, 8)), 1, 1),
        arguments=(
            CommonArgument(Op.EMBED), address(token_ids), address(slots), address(positions), address(table),
            address(x), _i32(hidden), _i32(padded_columns(hidden)), _i32(vocab_size),
        ),
    )  # fmt: skip


def rmsnorm(
    x: int,
    weight: int,
    out: int,
    *,
    num_rows: int,
    hidden: int,
    ld_out: int,
    eps: float,
    rows: int = 0,
    layer: int = -1,
) -> Launch:
    """out (T, ld_out) bf16 = norm of x's rows (H fp32 each): rows[0..T-1] (int32), or 0..T-1 where rows is null."""
    if hidden > MAX_HIDDEN:
        raise ValueError(f"hidden size {hidden}; rmsnorm takes up to {MAX_HIDDEN}")
    if ld_out % 8 or ld_out < round_up(hidden, 8):
        raise ValueError(f"ld_out {ld_out} must be a multiple of 8 that holds {hidden} columns")
    if hidden % 8 or hidden > 8192:
        kernel, threads = "rmsnorm_any", 1024
    elif hidden <= 4096 and num_rows <= _FEW_ROWS:
        kernel, threads = "rmsnorm_few", _threads(hidden, 4)
    else:
        kernel, threads = "rmsnorm", _threads(hidden, 8)
    return Launch(
        module="rmsnorm",
        kernel=kernel,
        grid=(num_rows, 1, 1),
        block=(threads, 1, 1),
        arguments=(
            CommonArgument(Op.RMSNORM, layer), address(x), address(weight), address(out), address(rows), _i32(hidden),
            _i32(ld_out), np.float32(eps),
        ),
    )  # fmt: skip


def qkv_post(
    qkv: int, cos: int, sin: int, positions: int, slots: int, block_tables: int, q: int, k_layer: int, v_layer: int,
    *,
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, table_width: int, num_pages: int, max_slots: int,
    max_position: int, layer: int, bias: int = 0, q_norm: int = 0, k_norm: int = 0, eps: float = 0.0,
    warps: int = 4, many: bool | None = None,
) -> Launch:  # fmt: skip
    """q (T, Hq, Dp) bf16, and k, v into their pages, from qkv (T, (Hq + 2 Hkv) D) fp32.

    `warps` of a block, and whether a warp takes `many` heads (default: where there are more than a few rows), do not
    change a bit.
    """
    heads, padded = num_heads + 2 * num_kv_heads, padded_head_dim(head_dim)
    if not 1 <= warps <= 8:
        raise ValueError(f"warps {warps} is not in 1..8")
    many = num_rows * heads > _FEW_HEADS if many is None else many
    heads_of_block = warps * ((2 if padded == 256 else 4) if many else 1)
    return Launch(
        module="qkv_post",
        kernel=f"qkv_post_d{padded}{'_many' if many else ''}",
        grid=(num_rows, -(-heads // heads_of_block), 1),
        block=(32 * warps, 1, 1),
        arguments=(
            CommonArgument(Op.ROPE, layer), address(qkv), address(bias), address(q_norm), address(k_norm), address(cos),
            address(sin), address(positions), address(slots), address(block_tables), _i32(table_width),
            _i32(num_pages), _i32(max_slots), address(q), address(k_layer), address(v_layer), _i32(num_heads),
            _i32(num_kv_heads), _i32(head_dim), _i32(max_position), np.float32(eps),
        ),
    )  # fmt: skip


def step_prepare(
    upload: int, token_ids: int, positions: int, slots: int, block_tables: int, tiles: int, logits_rows: int,
    descriptors: int, page_prefix: int, last_token: int,
    *,
    num_rows: int, decode_rows: int, num_logits_rows: int, max_slots: int, table_width: int, num_pages: int,
    vocab_size: int, window: int = 0,
) -> Launch:  # fmt: skip
    """First launch of a step: upload -> arrays (engine/cuda/step_state.py). window 0 = no sliding window."""
    if table_width * PAGE_TOKENS > np.iinfo(np.int32).max:
        raise ValueError(f"table_width {table_width} is too large for int32 positions")
    return Launch(
        module="step_prepare",
        kernel="step_prepare",
        grid=(1, 1, 1),
        block=(1024 if num_rows > 256 else 256, 1, 1),
        arguments=(
            CommonArgument(Op.PREPARE), address(upload), address(token_ids), address(positions), address(slots),
            address(block_tables), address(tiles), address(logits_rows), address(descriptors), address(page_prefix),
            address(last_token),
            _i32(num_rows), _i32(decode_rows), _i32(num_logits_rows), _i32(max_slots), _i32(table_width),
            _i32(num_pages), _i32(window), _i32(vocab_size),
        ),
        dependent=False,  # decode attention copies keys of earlier steps before its predecessors have ended
    )  # fmt: skip


# ---- the load --------------------------------------------------------------------------------------------------------


def retile(
    src: int, dtype: str, tiled: int, overflows: int,
    *, first_element: int, count: int, columns: int, row_map: RowMap = RowMap.PLAIN, row0: int = 0,
) -> Launch:  # fmt: skip
    """Elements first_element .. + count - 1 of a row-major matrix of `columns` columns, staged at src (16-byte aligned)
    as dtype "BF16", "F16" or "F32", into their tiles. `overflows`: a uint32, increased by each finite value that became
    Inf. `row0`: row of the tiled matrix of the matrix's row 0 (RowMap.PLAIN only)."""
    if count < 1 or first_element < 0:
        raise ValueError(f"an empty piece: first_element {first_element}, count {count}")
    if src % 16:
        raise ValueError("the staging buffer must be aligned to 16 bytes")
    if row0 and row_map != RowMap.PLAIN:
        raise ValueError("row0 goes with RowMap.PLAIN only")
    rows = (first_element + count - 1) // columns - first_element // columns + 1
    chunks = rows * -(-columns // 8)
    if chunks > np.iinfo(np.int32).max:
        raise ValueError(f"a piece of {count} elements is too large for one launch")
    return Launch(
        module="retile",
        kernel="retile",
        grid=(_load_blocks(chunks), 1, 1),
        block=(_LOAD_BLOCK, 1, 1),
        arguments=(
            CommonArgument(Op.PREPARE), address(src), _i32(SOURCE_DTYPES[dtype]), address(tiled),
            np.int64(first_element), np.int64(count), _i32(columns), _i32(padded_columns(columns)), _i32(row_map),
            _i32(row0), address(overflows),
        ),
    )  # fmt: skip


def copy_f32(src: int, dtype: str, out: int, *, count: int) -> Launch:
    """out (count,) fp32 = src, exact."""
    return Launch(
        module="retile",
        kernel="copy_f32",
        grid=(_load_blocks(count), 1, 1),
        block=(_LOAD_BLOCK, 1, 1),
        arguments=(
            CommonArgument(Op.PREPARE), address(src), _i32(SOURCE_DTYPES[dtype]), address(out), np.int64(count),
        ),
    )  # fmt: skip


def untile(tiled: int, out: int, *, rows: int, columns: int, row_map: RowMap = RowMap.PLAIN, row0: int = 0) -> Launch:
    """out (rows, columns) bf16 row-major: what retile of the whole matrix was given."""
    return Launch(
        module="retile",
        kernel="untile",
        grid=(_load_blocks(rows * columns), 1, 1),
        block=(_LOAD_BLOCK, 1, 1),
        arguments=(
            CommonArgument(Op.PREPARE), address(tiled), address(out), _i32(rows), _i32(columns),
            _i32(padded_columns(columns)), _i32(row_map), _i32(row0),
        ),
    )  # fmt: skip


def checksum(memory: int, nbytes: int, out: int, *, first_block: int = 0, blocks: int | None = None) -> Launch:
    """Sums of blocks first_block .. + blocks - 1 (default: to the end) of the memory, PARTS uint64 each, to out, those
    of first_block at its beginning.

    kernels/checksum.py:combine makes one value of all of them. A slice of blocks lets other work of the GPU go between.
    """
    if nbytes < 16 or nbytes % 16 or memory % 16:
        raise ValueError(f"memory of {nbytes} bytes at {memory:#x}: both must be multiples of 16")
    blocks = num_blocks(nbytes) - first_block if blocks is None else blocks
    if first_block < 0 or blocks < 1 or first_block + blocks > num_blocks(nbytes):
        raise ValueError(f"blocks {first_block} .. + {blocks} of {num_blocks(nbytes)} ({BLOCK_BYTES} bytes each)")
    return Launch(
        module="checksum",
        kernel="checksum",
        grid=(blocks * PARTS, 1, 1),
        block=(256, 1, 1),
        arguments=(
            CommonArgument(Op.PREPARE), address(memory), np.int64(nbytes // 16), address(out),
            _i32(first_block * PARTS),
        ),
    )  # fmt: skip


def _threads(elements: int, per_thread: int) -> int:
    """Threads for `elements`, in whole warps."""
    return round_up(-(-elements // per_thread), 32)


def _load_blocks(items: int) -> int:
    return min(-(-items // _LOAD_BLOCK), _MAX_LOAD_BLOCKS)

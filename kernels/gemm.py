"""Launches of the matrix products y = x W^T: which kernel, which grid.

Pure functions of shapes and device addresses (int). Mathematics, epilogues and layouts stand at the top of
kernels/gemm_decode.cu (few rows), kernels/gemm_prefill.cu (many rows, sm_90a) and kernels/gemm_portable.cu (any).
All give the same bits for an element of the result, whatever the number of rows: the choice is one of speed alone.
Sizes: M rows of x (tokens), N rows of W, k_pad columns padded to 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from kernels.gemm_prefill import prefill_launch, prefill_plan
from kernels.launch import CommonArgument, Executor, Launch, TensorMap2D, address
from kernels.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS

Epilogue: TypeAlias = Literal["f32", "add", "swiglu"]

DECODE_ROWS = 64
"""The decode kernels take up to so many rows of x."""

_SHARED_BYTES = 180 << 10  # of a block's ring: one block a multiprocessor, room for the small kernels beside it
_FETCHING_WARPS = 4
_BARRIER_BYTES = 16  # of a stage
_i32 = np.int32


@dataclass(frozen=True, slots=True)
class _Variant:
    """One compiled form of gemm_decode.cu (see KERNELS there)."""

    rows: int  # of x
    split: int  # warps of a team
    tiles: int  # of a stage
    max_teams: int

    def stage_bytes(self, teams: int) -> int:
        return self.tiles * (teams * TILE_BYTES + self.rows * TILE_COLUMNS * 2) + _BARRIER_BYTES


_NARROW = (_Variant(8, 1, 4, 3), _Variant(16, 1, 4, 3), _Variant(32, 2, 4, 3), _Variant(64, 2, 2, 4))
_WIDE = (_Variant(8, 1, 2, 8), _Variant(16, 1, 2, 8), _Variant(32, 1, 2, 8), _Variant(64, 2, 2, 4))


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How gemm_decode.cu is launched for one shape. The bits of the result do not depend on it."""

    variant: _Variant
    blocks: int
    teams: int  # row tiles a block works on at a time
    stages: int

    @property
    def threads(self) -> int:
        return (_FETCHING_WARPS + self.teams * self.variant.split) * 32

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.variant.stage_bytes(self.teams)


def gemm_launch(
    executor: Executor,
    epilogue: Epilogue,
    x: int,
    w: int,
    out: int,
    *,
    num_rows: int,
    num_outputs: int,
    k_pad: int,
    ld_x: int,
    ld_out: int,
    op: int,
    layer: int = -1,
) -> Launch:
    """out = epilogue(x W^T). x (M, ld_x) bf16, W tiled bf16 (N, k_pad), out (M, ld_out): fp32 for f32 and add (which
    adds to what is there), bf16 for swiglu (N/2 columns). Raises ValueError for a shape no kernel takes."""
    check_shape(epilogue, num_rows=num_rows, num_outputs=num_outputs, k_pad=k_pad, ld_x=ld_x, ld_out=ld_out)
    shape = {"num_rows": num_rows, "num_outputs": num_outputs, "k_pad": k_pad, "ld_x": ld_x, "ld_out": ld_out}
    if executor.path != "hopper":
        return portable_launch(epilogue, x, w, out, **shape, op=op, layer=layer)
    if num_rows > DECODE_ROWS:
        many = prefill_plan(num_rows, num_outputs, k_pad, executor.num_multiprocessors)
        return prefill_launch(many, epilogue, x, w, out, **shape, op=op, layer=layer)
    plan = decode_plan(num_rows, num_outputs, k_pad, executor.num_multiprocessors)
    return decode_launch(plan, epilogue, x, w, out, **shape, op=op, layer=layer)


def check_shape(epilogue: Epilogue, *, num_rows: int, num_outputs: int, k_pad: int, ld_x: int, ld_out: int) -> None:
    """What every kernel of this file relies on."""
    if num_rows < 1 or num_outputs < 1:
        raise ValueError(f"a product of {num_rows} rows of x and {num_outputs} of W: both must be at least 1")
    if k_pad < TILE_COLUMNS or k_pad % TILE_COLUMNS:
        raise ValueError(f"k_pad {k_pad} must be a positive multiple of {TILE_COLUMNS}")
    if ld_x < k_pad or ld_x % 8:
        raise ValueError(f"ld_x {ld_x} must be a multiple of 8 that holds {k_pad} columns")
    if epilogue == "swiglu" and num_outputs % TILE_ROWS:
        raise ValueError(f"gate_up has {num_outputs} rows; in its interleaved order they are a multiple of {TILE_ROWS}")
    columns = num_outputs // 2 if epilogue == "swiglu" else num_outputs
    if ld_out < columns:
        raise ValueError(f"ld_out {ld_out} does not hold {columns} columns")


def decode_plan(num_rows: int, num_outputs: int, k_pad: int, num_multiprocessors: int) -> DecodePlan:
    """Fill the multiprocessors with one block each, evenly, in one wave. kernels/LOG.md has the measurements."""
    if not 1 <= num_rows <= DECODE_ROWS:
        raise ValueError(f"{num_rows} rows; the decode kernels take 1 to {DECODE_ROWS}")
    tiles = -(-num_outputs // TILE_ROWS)
    share = -(-tiles // num_multiprocessors)  # of the block with most
    narrow, wide = next((n, w) for n, w in zip(_NARROW, _WIDE, strict=True) if num_rows <= n.rows)
    variant = narrow if share <= narrow.max_teams else wide
    teams = -(-share // -(-share // variant.max_teams))
    stages = max(2, _SHARED_BYTES // variant.stage_bytes(teams))
    return DecodePlan(variant, -(-tiles // share), teams, stages)


def decode_launch(
    plan: DecodePlan,
    epilogue: Epilogue,
    x: int,
    w: int,
    out: int,
    *,
    num_rows: int,
    num_outputs: int,
    k_pad: int,
    ld_x: int,
    ld_out: int,
    op: int,
    layer: int = -1,
) -> Launch:
    """gemm_decode.cu as `plan` says. Parameters as gemm_launch."""
    return Launch(
        module="gemm_decode",
        kernel=f"gemm_decode_{epilogue}_m{plan.variant.rows}_t{plan.variant.tiles}",
        grid=(plan.blocks, 1, 1),
        block=(plan.threads, 1, 1),
        arguments=(
            CommonArgument(op, layer), TensorMap2D(x, num_rows, k_pad, ld_x * 2, plan.variant.rows), address(w),
            address(out), _i32(num_rows), _i32(num_outputs), _i32(k_pad), _i32(ld_out), _i32(plan.teams),
            _i32(plan.stages),
        ),
        shared_bytes=plan.shared_bytes,
    )  # fmt: skip


def portable_launch(
    epilogue: Epilogue,
    x: int,
    w: int,
    out: int,
    *,
    num_rows: int,
    num_outputs: int,
    k_pad: int,
    ld_x: int,
    ld_out: int,
    op: int,
    layer: int = -1,
) -> Launch:
    """gemm_portable.cu. Parameters as gemm_launch."""
    tokens, stages = (16, 6) if num_rows <= 16 else (64, 4)
    row_tiles = 4
    return Launch(
        module="gemm_portable",
        kernel=f"gemm_portable_{epilogue}_m{tokens}",
        grid=(-(-num_rows // tokens), -(-num_outputs // (row_tiles * TILE_ROWS)), 1),
        block=(128, 1, 1),
        arguments=(
            CommonArgument(op, layer), address(x), _i32(ld_x), address(w), address(out),
            _i32(num_rows), _i32(num_outputs), _i32(k_pad), _i32(ld_out),
        ),
        shared_bytes=stages * (row_tiles * TILE_BYTES + tokens * TILE_COLUMNS * 2),
    )  # fmt: skip

"""Launches of kernels/gemm_prefill.cu: matrix products with many rows of x, on sm_90a.

Pure functions of shapes and device addresses (int). The choice of tiles is one of speed alone: all give the same bits.
Sizes: M rows of x (tokens), N rows of W, k_pad columns padded to 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from kernels.launch import CommonArgument, Launch, TensorMap2D, TileMap, address
from kernels.layout import TILE_COLUMNS, TILE_ROWS

Epilogue: TypeAlias = Literal["f32", "add", "swiglu"]

TILE_M = 128
WIDTHS = (32, 64, 96, 128, 192, 224, 256)
"""Rows of W in a tile (gemm_prefill.cu:TILE_N)."""
CLUSTERS = (1, 2)

_THREADS = 384
_SHARED_LIMIT = 232448  # gemm_prefill.cu:SHARED_LIMIT, what a block may have on sm_90
_STAGING_BYTES = 32768
_BARRIER_BYTES = 256
_MAX_STAGES = 8
_STORE_ROWS = 16  # of a box of results: a warp's

# A tile's time in units of the tensor cores' for one row of W and 64 columns of K (4 cycles): see kernels/LOG.md.
_STAGE_FLOOR = 64  # a stage takes as long to fetch and hand on as 64 rows of W take to multiply
_TILE_COST = 700  # start, first fetch and last store of a block

_i32 = np.int32


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A variant of the kernel and its grid. The bits of the result do not depend on it."""

    width: int
    cluster: int
    blocks: int

    @property
    def stages(self) -> int:
        fit = (_SHARED_LIMIT - _STAGING_BYTES - _BARRIER_BYTES) // self._stage_bytes
        return min(fit, _MAX_STAGES)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self._stage_bytes + _STAGING_BYTES + _BARRIER_BYTES

    @property
    def _stage_bytes(self) -> int:
        return (TILE_M + self.width) * TILE_COLUMNS * 2


def prefill_plan(num_rows: int, num_outputs: int, k_pad: int, num_multiprocessors: int) -> PrefillPlan:
    """The variant with the shortest predicted time: waves of tiles over the multiprocessors."""
    candidates = [
        variant_plan(width, cluster, num_rows, num_outputs, num_multiprocessors)
        for width in WIDTHS
        for cluster in CLUSTERS
    ]
    return min(candidates, key=lambda plan: _predicted_cost(plan, num_rows, num_outputs, k_pad))


def variant_plan(width: int, cluster: int, num_rows: int, num_outputs: int, num_multiprocessors: int) -> PrefillPlan:
    """One variant, with a block for each multiprocessor or each tile, whichever are fewer."""
    tiles = _round_up(_ceil(num_rows, TILE_M), cluster) * _ceil(num_outputs, width)
    return PrefillPlan(width, cluster, min(tiles, num_multiprocessors // cluster * cluster))


def _predicted_cost(plan: PrefillPlan, num_rows: int, num_outputs: int, k_pad: int) -> float:
    tiles = _round_up(_ceil(num_rows, TILE_M), plan.cluster) * _ceil(num_outputs, plan.width)
    waves = _ceil(tiles, plan.blocks)
    stage = max(plan.width, _STAGE_FLOOR)
    return waves * (k_pad // TILE_COLUMNS) * stage + _TILE_COST * waves - plan.cluster  # ties: the larger cluster


def prefill_launch(
    plan: PrefillPlan,
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
    adds to what is there), bf16 for swiglu (N/2 columns). All addresses and the rows of x and of bf16 out are 16-byte
    aligned. Raises ValueError for rows of W that are no gate and up pairs."""
    swiglu = epilogue == "swiglu"
    if swiglu and (num_outputs % TILE_ROWS or ld_out % 8 or ld_out < num_outputs // 2):
        raise ValueError(
            f"swiglu of {num_outputs} rows of W into rows of {ld_out}: the first must be a multiple of {TILE_ROWS}, "
            f"the second one of 8 that holds half as many"
        )
    x_map = TensorMap2D(x, num_rows, k_pad, ld_x * 2, TILE_M)
    w_map = TileMap(w, _ceil(num_outputs, TILE_ROWS), k_pad // TILE_COLUMNS, plan.width // TILE_ROWS // plan.cluster)
    out_map = x_map  # not used
    if not swiglu and (num_outputs | ld_out) % 4 == 0:  # a TMA store; its map counts bf16, two for each float
        out_map = TensorMap2D(out, num_rows, 2 * num_outputs, ld_out * 4, _STORE_ROWS)
    return Launch(
        module="gemm_prefill",
        kernel=f"gemm_prefill_{epilogue}_n{plan.width}" + (f"_c{plan.cluster}" if plan.cluster > 1 else ""),
        grid=(plan.blocks, 1, 1),
        block=(_THREADS, 1, 1),
        arguments=(
            CommonArgument(op, layer), x_map, w_map, out_map, address(out), _i32(num_rows), _i32(num_outputs),
            _i32(k_pad), _i32(ld_out),
        ),
        shared_bytes=plan.shared_bytes,
        cluster=plan.cluster,
    )  # fmt: skip


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil(a, b) * b

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

_THREADS = 384
_SHARED_LIMIT = 232448  # gemm_prefill.cu:SHARED_LIMIT, what a block may have on sm_90
_STAGING_BYTES = 32768
_BARRIER_BYTES = 256
_MAX_STAGES = 8
_STORE_ROWS = 16  # of a box of results: a warp's

_i32 = np.int32


@dataclass(frozen=True, slots=True)
class Variant:
    """A tile of 128 rows of x and `width` rows of W, in clusters of `share_w` blocks with the same rows of W or of
    `share_x` with the same rows of x."""

    width: int
    share_w: int = 1
    share_x: int = 1

    @property
    def cluster(self) -> int:
        return self.share_w * self.share_x

    @property
    def suffix(self) -> str:
        """Of the kernel's name."""
        w = f"_w{self.share_w}" if self.share_w > 1 else ""
        x = f"_x{self.share_x}" if self.share_x > 1 else ""
        return f"n{self.width}{w}{x}"

    @property
    def stage_bytes(self) -> int:
        return (TILE_M + self.width) * TILE_COLUMNS * 2

    @property
    def shared_bytes(self) -> int:
        stages = min((_SHARED_LIMIT - _STAGING_BYTES - _BARRIER_BYTES) // self.stage_bytes, _MAX_STAGES)
        return stages * self.stage_bytes + _STAGING_BYTES + _BARRIER_BYTES

    def tiles(self, num_rows: int, num_outputs: int) -> int:
        """Tiles of a product, whole clusters."""
        rows, columns = _ceil(num_rows, TILE_M * self.share_w), _ceil(num_outputs, self.width * self.share_x)
        return rows * columns * self.cluster


VARIANTS = (
    Variant(32, share_x=2), Variant(64, share_x=2), Variant(64, share_x=4), Variant(96), Variant(128), Variant(192),
    Variant(224), Variant(256), Variant(128, share_w=2), Variant(192, share_w=2), Variant(224, share_w=2),
    Variant(256, share_w=2),
)  # fmt: skip
"""What gemm_prefill.cu is compiled for."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A variant of the kernel and its grid. The bits of the result do not depend on it."""

    variant: Variant
    blocks: int


def prefill_plan(num_rows: int, num_outputs: int, k_pad: int, num_multiprocessors: int) -> PrefillPlan:
    """The variant with the shortest predicted time: waves of tiles over the multiprocessors."""
    plans = [variant_plan(variant, num_rows, num_outputs, num_multiprocessors) for variant in VARIANTS]
    return min(plans, key=lambda plan: _predicted_cycles(plan, num_rows, num_outputs, k_pad))


def variant_plan(variant: Variant, num_rows: int, num_outputs: int, num_multiprocessors: int) -> PrefillPlan:
    """One variant, with a block for each multiprocessor or each tile, whichever are fewer."""
    most = num_multiprocessors // variant.cluster * variant.cluster
    return PrefillPlan(variant, min(variant.tiles(num_rows, num_outputs), most))


def _predicted_cycles(plan: PrefillPlan, num_rows: int, num_outputs: int, k_pad: int) -> float:
    variant = plan.variant
    waves = _ceil(variant.tiles(num_rows, num_outputs), plan.blocks)
    stage = max(variant.width, 64) * 4
    return waves * (k_pad // TILE_COLUMNS * stage + 3000) - variant.share_w


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
    variant = plan.variant
    x_map = TensorMap2D(x, num_rows, k_pad, ld_x * 2, TILE_M // variant.share_x)
    row_tiles, k_tiles = _ceil(num_outputs, TILE_ROWS), k_pad // TILE_COLUMNS
    w_map = TileMap(w, row_tiles, k_tiles, variant.width // TILE_ROWS // variant.share_w)
    out_map = x_map  # not used
    if not swiglu and (num_outputs | ld_out) % 4 == 0:  # a TMA store; its map counts bf16, two for each float
        out_map = TensorMap2D(out, num_rows, 2 * num_outputs, ld_out * 4, _STORE_ROWS)
    return Launch(
        module="gemm_prefill",
        kernel=f"gemm_prefill_{epilogue}_{variant.suffix}",
        grid=(plan.blocks, 1, 1),
        block=(_THREADS, 1, 1),
        arguments=(
            CommonArgument(op, layer), x_map, w_map, out_map, address(out), _i32(num_rows), _i32(num_outputs),
            _i32(k_pad), _i32(ld_out),
        ),
        shared_bytes=variant.shared_bytes,
        cluster=variant.cluster,
    )  # fmt: skip


def _ceil(a: int, b: int) -> int:
    return -(-a // b)

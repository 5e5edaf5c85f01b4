"""A kernel launch as data: what the wrappers beside the kernels return, and what an executor runs.

Wrappers are pure functions of shapes and addresses; they know grids, shared memory and argument order. An executor is
engine/cuda (a stream or a graph being captured) or, in tests, the emulator on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias

import numpy as np


class Op(IntEnum):
    """kernels/common.cuh:OpId: which op of a layer a launch is, in error reports and traces."""

    PREPARE = 0
    EMBED = 1
    RMSNORM = 2
    QKV = 3
    ROPE = 4
    ATTENTION = 5
    O = 6
    GATE_UP = 7
    DOWN = 8
    LM_HEAD = 9
    SAMPLER = 10


@dataclass(frozen=True, slots=True)
class TensorMap2D:
    """A TMA descriptor to be encoded: bf16 (rows, columns) at `address`, row-major, `row_bytes` apart (a multiple of
    16), read in boxes of `box_rows` x 64 columns in 128-byte swizzle; outside the tensor reads as zero.
    CUDA driver API, cuTensorMapEncodeTiled."""

    address: int
    rows: int
    columns: int
    row_bytes: int
    box_rows: int


@dataclass(frozen=True, slots=True)
class TileMap:
    """A TMA descriptor over a tiled weight matrix (common.cuh, "layouts") at `address`, 16-byte aligned: `row_tiles` x
    `k_tiles` tiles of 2 KB, read in boxes of `box_tiles` tiles below each other; outside the matrix reads as zero.
    cuTensorMapEncodeTiled with 8-byte elements: dimensions (256, k_tiles, row_tiles), strides 2048 and k_tiles * 2048
    bytes, box (256, 1, box_tiles), no swizzle (the tiles are swizzled already)."""

    address: int
    row_tiles: int
    k_tiles: int
    box_tiles: int


@dataclass(frozen=True, slots=True)
class CommonArgument:
    """kernels/common.cuh:Common, filled in by the executor (rings, trace) with these."""

    op: int
    layer: int = -1


Argument: TypeAlias = np.generic | TensorMap2D | TileMap | CommonArgument
"""Scalars carry their C type (np.int32, np.int64, np.float32, np.uint64 for an address)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. `module`: the .cu file's stem; `kernel`: its extern "C" name."""

    module: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0  # dynamic
    cluster: int = 1  # blocks along x
    dependent: bool = True  # may begin while the kernel before it ends (the kernel calls ptx::wait_for_previous)


class Executor(Protocol):
    """Runs launches in order, as a CUDA stream does."""

    path: str  # "hopper" (sm_90a) or "portable": which kernels a wrapper chooses
    num_multiprocessors: int

    def run(self, launch: Launch) -> None: ...


def address(value: int) -> np.uint64:
    return np.uint64(value)

"""Kernel arguments as bytes, as the CUDA driver's void** kernelParams, checked against the kernel's parameters."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from kernels.launch import Argument, CommonArgument, Launch, TensorMap2D, TileMap

KINDS = {"i": "i", "u": "i", "f": "f", "b": "i", "V": "s"}


def pack(launch: Launch, signature: list[str], common: bytes) -> list[Any]:
    """ctypes buffers, one per argument. `signature`: cuda_export.h:describe of each parameter; `common`: the 40 bytes
    that stand for the CommonArgument. ValueError when they do not fit."""
    if len(launch.arguments) != len(signature):
        count = len(launch.arguments)
        raise ValueError(f"{launch.kernel} takes {len(signature)} arguments ({' '.join(signature)}), not {count}")
    packed = []
    for index, (argument, expected) in enumerate(zip(launch.arguments, signature, strict=True)):
        data, given = (common, "s40") if isinstance(argument, CommonArgument) else _encode(argument)
        if given != expected and (given, expected) != ("i8", "p8"):
            what = f"{launch.kernel}, argument {index}: {argument!r}"
            raise ValueError(f"{what} is {given}, the kernel takes {expected}")
        packed.append(_aligned_buffer(data))
    return packed


def _encode(argument: Argument) -> tuple[bytes, str]:
    """Bytes, and kind and size as cuda_export.h:describe."""
    if isinstance(argument, TensorMap2D):
        return _encode_tensor_map(argument), "s128"
    if isinstance(argument, TileMap):
        return _encode_tile_map(argument), "s128"
    if not isinstance(argument, np.generic):
        raise ValueError(f"argument {argument!r}: not a numpy scalar, CommonArgument, TensorMap2D or TileMap")
    return argument.tobytes(), f"{KINDS[argument.dtype.kind]}{argument.dtype.itemsize}"


def _encode_tensor_map(tensor: TensorMap2D) -> bytes:
    """runtime.h:TensorMap. Refuses what cuTensorMapEncodeTiled refuses."""
    if tensor.address % 16 or tensor.row_bytes % 16 or tensor.address == 0:
        raise ValueError(f"{tensor}: address and row_bytes must be multiples of 16")
    if not 1 <= tensor.box_rows <= 256 or not 1 <= tensor.rows <= 2**32 or not 1 <= tensor.columns <= 2**32:
        raise ValueError(f"{tensor}: box_rows must be 1 to 256, rows and columns 1 to 2^32")
    if tensor.row_bytes >= 2**40:
        raise ValueError(f"{tensor}: row_bytes must be below 2^40")
    fields = (tensor.address, tensor.rows, tensor.columns, tensor.row_bytes, tensor.box_rows)
    return struct.pack("<Qqqqi84x", *fields)


def _encode_tile_map(tiles: TileMap) -> bytes:
    if tiles.address % 16 or not 1 <= tiles.box_tiles <= 16:
        raise ValueError(f"{tiles}: the address must be a multiple of 16, box_tiles 1 to 16")
    fields = (tiles.address, tiles.row_tiles, tiles.k_tiles, tiles.k_tiles * 2048, tiles.box_tiles, 1)
    return struct.pack("<Qqqqii80x", *fields)


def _aligned_buffer(data: bytes) -> Any:
    """A ctypes buffer aligned to 64 bytes, as a TensorMap must be."""
    whole = ctypes.create_string_buffer(len(data) + 64)
    offset = -ctypes.addressof(whole) % 64
    view = (ctypes.c_char * len(data)).from_buffer(whole, offset)
    view.raw = data
    return view

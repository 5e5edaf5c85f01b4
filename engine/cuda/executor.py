"""Runs launches (kernels/launch.py) on a CUDA stream, or into the graph being captured on it.

`prepare` does all Python work of a launch once: it packs the arguments in the layout the driver wants and fills the
launch configuration. `launch` of what was prepared is one driver call. `run` does both.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cuda.errors import check, failure
from kernels.launch import CommonArgument, Launch, TensorMap2D, TileMap
from kernels.layout import TILE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.cuda.context import DeviceContext
    from engine.cuda.module import Kernels

_COMMON = struct.Struct("<QQQiiII")  # kernels/common.cuh:Common
_DEFAULT_SHARED_BYTES = 48 << 10  # what a block may have without asking
_TENSOR_MAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class Reports:
    """Device addresses that every kernel gets in `Common`: the error ring (mapped host memory, errors.RING_BYTES),
    slot_errors (uint32, max_slots + 1), and trace (uint64, one a launch of a step) or 0."""

    errors: int
    slot_errors: int
    trace: int = 0


class Prepared:
    """A launch ready to go, any number of times. Holds no device resource; its addresses must stay valid."""

    __slots__ = ("_arguments", "_pointers", "config", "function", "name", "parameters")

    def __init__(self, name: str, function: Any, config: Any, arguments: Any, pointers: Any) -> None:
        self.name, self.function, self.config = name, function, config
        self._arguments, self._pointers = arguments, pointers  # kept alive: `parameters` points into them
        self.parameters = ctypes.addressof(pointers)


class CudaExecutor:
    """kernels.launch.Executor on one stream. One thread at a time.

    stream: a PyCUDA stream (default: context.compute). trace_index: place in `reports.trace` of the next launch that is
    prepared; the caller sets it to 0 at the first launch of a step.
    """

    def __init__(self, context: DeviceContext, kernels: Kernels, reports: Reports, stream: Any = None) -> None:
        self._api = context.api
        self._kernels = kernels
        self._reports = reports
        self.stream = context.compute if stream is None else stream
        self._stream_handle = context.api.CUstream(self.stream.handle)
        self.path = kernels.path
        self.num_multiprocessors = context.info.num_multiprocessors
        self.trace_index = 0
        self._dependent_launch = kernels.path == "hopper"  # PTX of compute_80 knows no ptx::wait_for_previous
        self._max_shared_bytes = context.info.max_shared_bytes
        self._shared_bytes: dict[tuple[str, str], int] = {}  # dynamic shared memory a function was allowed
        self._tensor_maps: dict[TensorMap2D | TileMap, bytes] = {}
        self._launch = context.api.cuLaunchKernelEx

    def run(self, launch: Launch) -> None:
        self.launch(self.prepare(launch))

    def launch(self, prepared: Prepared) -> None:
        """Queue it. Errors of the kernel itself come later, from whoever waits for the stream."""
        result = self._launch(prepared.config, prepared.function, prepared.parameters, 0)
        if int(result[0]) != 0:
            raise failure(int(result[0]), f"launching {prepared.name}")

    def launch_all(self, prepared: Iterable[Prepared]) -> None:
        for one in prepared:
            self.launch(one)

    def prepare(self, launch: Launch) -> Prepared:
        """Pack arguments and attributes. Raises CudaCallError (unknown kernel, too much shared memory, bad tensor map)
        or ConfigError (no such module)."""
        function = self._kernels.function(launch.module, launch.kernel)
        if launch.shared_bytes > _DEFAULT_SHARED_BYTES:
            self._allow_shared(launch, function)
        arguments, pointers = self._pack(launch)
        self.trace_index += 1
        return Prepared(launch.kernel, function, self._config(launch), arguments, pointers)

    def _config(self, launch: Launch) -> Any:
        config = self._api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.shared_bytes
        config.hStream = self._stream_handle
        attributes = []
        if launch.dependent and self._dependent_launch:
            attribute = self._api.CUlaunchAttribute()
            attribute.id = self._api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if launch.cluster > 1:
            attribute = self._api.CUlaunchAttribute()
            attribute.id = self._api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape = attribute.value.clusterDim
            shape.x, shape.y, shape.z = launch.cluster, 1, 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def _pack(self, launch: Launch) -> tuple[Any, Any]:
        """(argument bytes, array of pointers to each) for kernelParams; every argument at a multiple of 64 bytes."""
        parts = [self._bytes(argument) for argument in launch.arguments]
        offsets, size = [], 0
        for part in parts:
            offsets.append(size)
            size += -(-len(part) // 64) * 64
        raw = (ctypes.c_uint8 * (size + 64))()
        base = -(-ctypes.addressof(raw) // 64) * 64
        for part, offset in zip(parts, offsets, strict=True):
            ctypes.memmove(base + offset, part, len(part))
        return raw, (ctypes.c_void_p * max(len(parts), 1))(*(base + offset for offset in offsets))

    def _bytes(self, argument: Any) -> bytes:
        if isinstance(argument, np.generic):
            return argument.tobytes()
        if isinstance(argument, CommonArgument):
            reports = self._reports
            return _COMMON.pack(
                reports.errors, reports.slot_errors, reports.trace, self.trace_index, argument.layer, argument.op, 0
            )
        if isinstance(argument, TensorMap2D | TileMap):
            return self._tensor_map(argument)
        raise TypeError(f"a kernel argument is a {type(argument).__name__}; wanted a numpy scalar")

    def _tensor_map(self, wanted: TensorMap2D | TileMap) -> bytes:
        """CUtensorMap for it, encoded once. CUDA driver API, cuTensorMapEncodeTiled."""
        encoded = self._tensor_maps.get(wanted)
        if encoded is None:
            api = self._api
            types, swizzles = api.CUtensorMapDataType, api.CUtensorMapSwizzle
            if isinstance(wanted, TileMap):
                kind, swizzle = types.CU_TENSOR_MAP_DATA_TYPE_UINT64, swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
                shape, box = [256, wanted.k_tiles, wanted.row_tiles], [256, 1, wanted.box_tiles]
                strides = [TILE_BYTES, wanted.k_tiles * TILE_BYTES]
            else:
                kind, swizzle = types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, swizzles.CU_TENSOR_MAP_SWIZZLE_128B
                shape, box, strides = [wanted.columns, wanted.rows], [64, wanted.box_rows], [wanted.row_bytes]
            encode = api.cuTensorMapEncodeTiled(
                kind, len(shape), wanted.address,
                [api.cuuint64_t(n) for n in shape], [api.cuuint64_t(n) for n in strides],
                [api.cuuint32_t(n) for n in box], [api.cuuint32_t(1)] * len(shape),
                api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )  # fmt: skip
            opaque = check(encode, f"encoding {wanted}")
            encoded = ctypes.string_at(opaque.getPtr(), _TENSOR_MAP_BYTES)
            self._tensor_maps[wanted] = encoded
        return encoded

    def _allow_shared(self, launch: Launch, function: Any) -> None:
        key = launch.module, launch.kernel
        if self._shared_bytes.get(key, 0) >= launch.shared_bytes:
            return
        attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        result = self._api.cuFuncSetAttribute(function, attribute, launch.shared_bytes)
        check(result, f"allowing {launch.kernel} {launch.shared_bytes} bytes of shared memory "
                      f"(this GPU has {self._max_shared_bytes})")  # fmt: skip
        self._shared_bytes[key] = launch.shared_bytes

"""The GPU of the tests: the engine's own device layer, and memory that notices writes beyond its end.

`GpuDevice` is the `Device` of tests/kernels/cases_*.py: the same test bodies run here and on the emulator.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.cuda.context import DeviceContext
from engine.cuda.errors import RING_BYTES, RING_ENTRIES
from engine.cuda.executor import CudaExecutor, Reports
from engine.cuda.memory import PinnedBuffer, copy_to_device, copy_to_host
from engine.cuda.module import Kernels
from engine.errors import ConfigError
from kernels.build import BuildError, build
from kernels.launch import Launch
from kernels.manifest import FATBIN_DIR, ManifestError, read_manifest

Array = npt.NDArray[Any]

GUARD_BYTES = 1024
GUARD = 0xA5
MAX_SLOTS = 4096
PROBE_DIR = Path(__file__).resolve().parent / "probe"

ENTRY = np.dtype([(n, "<u4" if n in ("code", "op", "sm") else "<i4") for n in
                  ("code", "op", "layer", "head", "slot", "position", "value", "sm")])  # fmt: skip


class GpuBuffer:
    """An array on the device between two guards (none on an `exact` device: the sanitizer watches the allocation)."""

    def __init__(self, device: GpuDevice, array: Array) -> None:
        self._device = device
        self._guard = guard = 0 if device.exact else GUARD_BYTES
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        padded = -(-self.nbytes // 16) * 16  # the bytes up to the next 16 belong to the guard
        host = np.full(max(2 * guard + padded, 16), GUARD, np.uint8)
        host[guard : guard + self.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._allocation = device.context.cuda.mem_alloc(host.nbytes)
        self.address = int(self._allocation) + guard
        self._total = host.nbytes
        copy_to_device(device.context, int(self._allocation), host, device.context.compute)
        device.context.compute.synchronize()

    def read(self) -> Array:
        """What is there now, after everything launched before. Fails if a guard was overwritten."""
        host = np.empty(self._total, np.uint8)
        copy_to_host(self._device.context, host, int(self._allocation), self._device.context.compute)
        self._device.context.compute.synchronize()
        guard = self._guard
        before, after = host[:guard], host[guard + self.nbytes :]
        assert (before == GUARD).all() and (after == GUARD).all(), "a kernel wrote outside its array"
        inner = host[guard : guard + self.nbytes].copy()
        return inner.view(self.dtype).reshape(self.shape)

    def write(self, array: Array) -> None:
        """Replace the contents by an array of the same size."""
        assert array.nbytes == self.nbytes
        copy_to_device(self._device.context, self.address, np.ascontiguousarray(array), self._device.context.compute)
        self._device.context.compute.synchronize()

    def free(self) -> None:
        self._allocation.free()


class Gpu:
    """One context for all tests of a session."""

    def __init__(self, fatbins: Path = FATBIN_DIR) -> None:
        self.context = DeviceContext(0)
        try:
            self.kernels = Kernels(self.context, fatbins)
        except ConfigError:
            self.context.close()
            raise
        self.ring = PinnedBuffer(self.context, RING_BYTES, mapped=True)
        self.slot_errors = self.context.cuda.mem_alloc(4 * (MAX_SLOTS + 1))
        self.context.cuda.memset_d8(self.slot_errors, 0, 4 * (MAX_SLOTS + 1))
        self.reports = Reports(self.ring.device_address, int(self.slot_errors))
        self.executor = CudaExecutor(self.context, self.kernels, self.reports)

    @cached_property
    def probe(self) -> CudaExecutor | str:
        """Runs the kernels of tests/gpu/probe, which are compiled if they have to be; or why it cannot."""
        out = PROBE_DIR / "fatbin"
        try:
            read_manifest(out)
        except ManifestError:
            try:
                build(PROBE_DIR, out)
            except BuildError as error:
                return str(error)
        return CudaExecutor(self.context, Kernels(self.context, out), self.reports)

    def close(self) -> None:
        self.slot_errors.free()
        self.context.close()


class GpuDevice:
    """Memory and launches of one test; everything is freed at its end."""

    def __init__(self, gpu: Gpu, executor: CudaExecutor | None = None, *, exact: bool = False) -> None:
        self.exact = exact
        self.gpu, self.context = gpu, gpu.context
        self.executor = executor or gpu.executor
        self.path = self.executor.path
        self._buffers: list[GpuBuffer] = []

    def put(self, array: Array) -> GpuBuffer:
        """A copy of the array on the device, 1024-byte aligned."""
        buffer = GpuBuffer(self, array)
        self._buffers.append(buffer)
        return buffer

    def run(self, launch: Launch) -> None:
        """Queue it; errors of the kernel show at the next `read`, `take_errors` or `synchronize`."""
        self.executor.run(launch)

    def synchronize(self) -> None:
        self.context.synchronize()

    def take_errors(self) -> list[dict[str, int]]:
        """The reports since the last call, as common.cuh:ErrorEntry; slot_errors are compared with them and cleared."""
        self.synchronize()
        ring, slots = self.gpu.ring.array, np.zeros(MAX_SLOTS + 1, np.uint32)
        copy_to_host(self.context, slots, int(self.gpu.slot_errors), self.context.compute)
        self.synchronize()
        count = int(ring[:4].view(np.uint32)[0])
        entries = ring[32:].view(ENTRY)[: min(count, RING_ENTRIES)].copy()
        if count <= RING_ENTRIES:
            assert set(entries["slot"].tolist()) == set(np.flatnonzero(slots).tolist())
        ring[:] = 0
        self.context.cuda.memset_d8(self.gpu.slot_errors, 0, slots.nbytes)
        return [{name: int(entry[name]) for name in ENTRY.names or ()} for entry in entries]

    def free(self) -> None:
        self.synchronize()
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()

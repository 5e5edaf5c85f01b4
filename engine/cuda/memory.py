"""All memory of the engine: three allocations on the device made once from a printed plan, and pinned host memory.

This is the only place that allocates. plan_memory (pure) decides, DeviceMemory takes: the weight arena, the KV pool,
and the workspace (activations, rope table, step metadata, logits, results ...), cut by bumping an offset. Everything
starts as zeros. Nothing is allocated in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cuda.errors import check, pycuda_calls
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from engine.cuda.context import DeviceContext

ALIGNMENT = 1024
"""Of every buffer, in bytes: a TMA box in 128-byte swizzle and a wgmma tile want 1024."""

RESERVE_BYTES = 640 << 20
"""Kept free inside our share, for what the driver takes beside our allocations: context, code of the kernels, graphs,
local memory. Measured on H200 with driver 580: see tests/gpu/test_device.py."""

MIB = 1 << 20


def aligned(nbytes: int) -> int:
    """Rounded up to ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What takes how much of the GPU, in bytes. `pool_bytes` is (num_pages + 1) pages, or the loader's staging where
    that is more."""

    total_bytes: int  # of the card
    budget_bytes: int  # our share of it
    weights_bytes: int
    workspace: Mapping[str, int]  # buffer -> bytes, each aligned
    page_bytes: int
    num_pages: int  # that sequences can use; one more is the dummy page
    pool_bytes: int

    @property
    def workspace_bytes(self) -> int:
        return sum(self.workspace.values())

    @property
    def taken_bytes(self) -> int:
        return self.weights_bytes + self.workspace_bytes + self.pool_bytes

    def table(self) -> str:
        """The plan for people: one line a part."""
        rows = [("weight arena", self.weights_bytes, "")]
        pages = f"{self.num_pages} pages of {self.page_bytes} bytes, and the dummy page"
        rows.append(("KV pool", self.pool_bytes, pages))
        rows += [(name, size, "") for name, size in self.workspace.items()]
        rows.append(("driver, context, code (kept free)", RESERVE_BYTES, ""))
        rows.append(("left over", self.budget_bytes - self.taken_bytes - RESERVE_BYTES, ""))
        share = f"{self.budget_bytes / self.total_bytes:.1%} of the card's {self.total_bytes / MIB:,.0f} MiB"
        rows.append(("share of this engine", self.budget_bytes, share))
        return "\n".join(f"{name:<36}{size / MIB:>12,.1f} MiB  {note}".rstrip() for name, size, note in rows)


def plan_memory(
    *,
    total_bytes: int,
    free_bytes: int,
    fraction: float,
    weights_bytes: int,
    workspace: Mapping[str, int],
    page_bytes: int,
    min_pages: int = 1,
    max_pages: int | None = None,
    staging_bytes: int = 0,
) -> MemoryPlan:
    """Divide `fraction` of the card, or what is free of it if that is less: weights and workspace as asked, pages from
    what is left.

    total_bytes, free_bytes: of the GPU now (DeviceContext.memory_info). page_bytes: a KV page over all layers, K and V.
    min_pages, max_pages: usable pages, without the dummy page. staging_bytes: least size of the pool, which the loader
    uses before there are pages (WeightLoader.staging_bytes). Pure. ConfigError with the numbers when it does not fit.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"gpu_memory_fraction is {fraction}; it must be over 0 and at most 1")
    sizes = {name: aligned(size) for name, size in workspace.items()}
    weights_bytes, workspace_bytes = aligned(weights_bytes), sum(sizes.values())
    budget = min(int(total_bytes * fraction), free_bytes)
    room = budget - RESERVE_BYTES - weights_bytes - workspace_bytes
    fits = room // page_bytes - 1  # one is the dummy page
    if fits < min_pages or room < staging_bytes:
        needed = RESERVE_BYTES + weights_bytes + workspace_bytes + max((min_pages + 1) * page_bytes, staging_bytes)
        raise ConfigError(
            f"the model does not fit into this engine's share of the GPU: {needed / MIB:,.0f} MiB are needed (weights "
            f"{weights_bytes / MIB:,.0f}, workspace {workspace_bytes / MIB:,.0f}, {min_pages + 1} KV pages "
            f"{(min_pages + 1) * page_bytes / MIB:,.0f}, driver {RESERVE_BYTES / MIB:,.0f}), the share is "
            f"{budget / MIB:,.0f} MiB (gpu_memory_fraction {fraction:g} of {total_bytes / MIB:,.0f} MiB, of which "
            f"{free_bytes / MIB:,.0f} are free)",
            hint="Raise --gpu-memory-fraction, free the GPU (nvidia-smi lists who uses it), lower --max-model-len or "
            "--max-batch-tokens, or use a smaller model.",
        )
    num_pages = fits if max_pages is None else min(fits, max_pages)
    pool_bytes = aligned(max((num_pages + 1) * page_bytes, staging_bytes))
    return MemoryPlan(total_bytes, budget, weights_bytes, sizes, page_bytes, num_pages, pool_bytes)


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """A piece of device memory; `address` is a multiple of ALIGNMENT."""

    name: str
    address: int
    nbytes: int


class DeviceMemory:
    """The three allocations of a plan, zeroed. Closed with the context.

    `weights` and `pool` are whole allocations; `workspace[name]` are the plan's buffers. CudaCallError (out of memory)
    if another process took the memory since it was counted.
    """

    def __init__(self, context: DeviceContext, plan: MemoryPlan) -> None:
        self._context = context
        self.plan = plan
        self._allocations: list[Any] = []
        context.on_close("device memory", self._free)
        self.weights = self._allocate("weights", plan.weights_bytes)
        self.pool = self._allocate("KV pool", plan.pool_bytes)
        block = self._allocate("workspace", plan.workspace_bytes)
        self.workspace: dict[str, DeviceBuffer] = {}
        position = block.address
        for name, nbytes in plan.workspace.items():
            self.workspace[name] = DeviceBuffer(name, position, nbytes)
            position += nbytes
        context.synchronize()

    def zero(self, buffer: DeviceBuffer, stream: Any) -> None:
        """Set all bytes to 0, in stream order."""
        api = self._context.api
        check(api.cuMemsetD8Async(buffer.address, 0, buffer.nbytes, stream.handle), "cuMemsetD8Async")

    def _allocate(self, name: str, nbytes: int) -> DeviceBuffer:
        with pycuda_calls(f"allocating {nbytes / MIB:,.0f} MiB for the {name}"):
            allocation = self._context.cuda.mem_alloc(max(nbytes, ALIGNMENT))
        self._allocations.append(allocation)
        buffer = DeviceBuffer(name, int(allocation), nbytes)
        if nbytes:
            self.zero(buffer, self._context.compute)
        return buffer

    def _free(self) -> None:
        with pycuda_calls("freeing device memory"):
            while self._allocations:
                self._allocations.pop().free()


class PinnedBuffer:
    """Page-locked host memory. `array`: uint8 view of all of it, zeroed. `address`: on the host.

    `device_address`: where kernels see it, if it was made with `mapped`. No view may be used after the context closed.
    """

    def __init__(
        self, context: DeviceContext, nbytes: int, *, mapped: bool = False, write_combined: bool = False
    ) -> None:
        flags = context.cuda.host_alloc_flags
        chosen = (flags.DEVICEMAP if mapped else 0) | (flags.WRITECOMBINED if write_combined else 0)
        with pycuda_calls(f"allocating {nbytes / MIB:,.1f} MiB of pinned host memory"):
            array = context.cuda.pagelocked_empty(max(nbytes, 1), np.uint8, mem_flags=chosen)
            base: Any = array.base
            self.device_address = int(base.get_device_pointer()) if mapped else 0
        self.array: npt.NDArray[np.uint8] = array
        self.array[:] = 0
        self.address = int(self.array.ctypes.data)
        self._base = base
        self._freed = False
        context.on_close("pinned memory", self.free)

    def free(self) -> None:
        """Give it back now; otherwise the context does. Views of `array` are then invalid."""
        if not self._freed:
            self._freed = True
            with pycuda_calls("freeing pinned host memory"):
                self._base.free()


def copy_to_device(context: DeviceContext, destination: int, source: npt.NDArray[Any], stream: Any) -> None:
    """Start copying a contiguous array to `destination`. From pinned memory it runs beside the host, and the array must
    stay as it is until the stream has passed; from pageable memory the driver has taken the bytes when this returns."""
    if not source.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    result = context.api.cuMemcpyHtoDAsync(destination, source.ctypes.data, source.nbytes, stream.handle)
    check(result, "cuMemcpyHtoDAsync")


def copy_to_host(context: DeviceContext, destination: npt.NDArray[Any], source: int, stream: Any) -> None:
    """Start filling a contiguous array from device address `source`; it is there when the stream has passed."""
    if not destination.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    result = context.api.cuMemcpyDtoHAsync(destination.ctypes.data, source, destination.nbytes, stream.handle)
    check(result, "cuMemcpyDtoHAsync")

"""Runs launches (kernels/launch.py) on the CPU, with numpy arrays as the device's memory."""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.launch import CommonArgument, Launch
from tests.kernels.emulator.arguments import pack
from tests.kernels.emulator.build import KERNELS, CompileError, build
from tests.kernels.emulator.memory import Region, guarded_array, regions

ERROR_RING_ENTRIES = 256
ERROR_ENTRY = np.dtype(
    [
        *((name, "<u4") for name in ("code", "op")),
        *((name, "<i4") for name in ("layer", "head", "slot", "position", "value")),
        ("sm", "<u4"),
    ]
)  # kernels/common.cuh:ErrorEntry
ORDERS = {"forward": 0, "reverse": 1, "shuffled": 2}
DELIVERIES = {"late": 0, "early": 1, "random": 2}


class EmulationError(Exception):
    """A kernel did what it must not do: deadlock, access outside its memory, misuse of a barrier ..."""


class _RegionRecord(ctypes.Structure):  # internal.h:Region
    _fields_ = [
        ("start", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("written", ctypes.c_uint32),
        ("written_now", ctypes.c_uint32),
    ]


class _LaunchRecord(ctypes.Structure):  # internal.h:Launch
    _fields_ = [
        ("invoke", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("delivery", ctypes.c_uint32),
        ("num_multiprocessors", ctypes.c_uint32),
        ("dependent", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("regions", ctypes.c_void_p),
        ("num_regions", ctypes.c_uint32),
        ("begins_late", ctypes.c_uint32),
        ("stacks", ctypes.c_void_p),
    ]


_one_launch = threading.Lock()  # all libraries use the same stacks
_stacks = (ctypes.c_void_p * 16)()  # of each block of a cluster; memory.cpp allocates them


class _Library:
    """One compiled kernel file."""

    def __init__(self, source: Path, hopper: bool, includes: Sequence[Path]) -> None:
        path, self.kernels = build(source, hopper, includes)
        self.name = source.name
        self.handle = ctypes.CDLL(str(path))
        self.handle.emulator_message.restype = ctypes.c_char_p

    def signature(self, kernel: str) -> list[str]:
        function = getattr(self.handle, f"{kernel}__signature")
        function.restype = ctypes.c_char_p
        return str(function().decode()).split()

    def max_threads(self, kernel: str) -> int:
        return int(getattr(self.handle, f"{kernel}__max_threads")())

    def run(self, kernel: str, record: _LaunchRecord) -> None:
        record.invoke = ctypes.cast(getattr(self.handle, f"{kernel}__invoke"), ctypes.c_void_p).value
        record.stacks = ctypes.addressof(_stacks)
        with _one_launch:
            if self.handle.emulator_run(ctypes.byref(record)):
                raise EmulationError(f"{kernel}: {self.handle.emulator_message().decode()}")


_libraries: dict[tuple[Path, bool, tuple[Path, ...]], _Library] = {}


class EmulatedExecutor:
    """kernels/launch.py:Executor on the CPU.

    `path`: "hopper" (HAS_SM90, HAS_WGMMA) or "portable". `seed` chooses an order of blocks and threads and when
    asynchronous copies arrive: 0 first to last, as late as allowed; 1 last to first, at once; others shuffled. A
    correct kernel gives the same bits under every seed. `order` and `delivery` override the seed's choice. `sources`:
    folders that are searched for <module>.cu, before kernels/.
    """

    def __init__(
        self,
        path: str = "hopper",
        seed: int = 0,
        *,
        max_slots: int = 255,
        num_multiprocessors: int = 4,
        order: str | None = None,
        delivery: str | None = None,
        sources: Sequence[Path] = (),
    ) -> None:
        if path not in ("hopper", "portable"):
            raise ValueError(f"path {path!r}: must be hopper or portable")
        self.path = path
        self.num_multiprocessors = num_multiprocessors
        self.seed = seed
        self.order = order or ("forward", "reverse")[seed] if seed < 2 else order or "shuffled"
        self.delivery = delivery or ("late", "early")[seed] if seed < 2 else delivery or ("random", "late")[seed % 2]
        self.sources = (*map(Path, sources), KERNELS)
        self.slot_errors = np.zeros(max_slots + 1, np.uint32)
        self.trace: npt.NDArray[np.uint64] | None = None  # set it to an array to stamp the start of each launch
        self.trace_index = 0
        self._written: weakref.WeakSet[Region] = weakref.WeakSet()  # by launches that may still run
        self._ring = np.zeros(8 + ERROR_RING_ENTRIES * 8, np.uint32)

    @property
    def error_entries(self) -> npt.NDArray[Any]:
        """Reports of kernels since clear_errors, oldest first; fields as kernels/common.cuh:ErrorEntry."""
        written = int(self._ring[0])
        entries = self._ring[8:].view(ERROR_ENTRY)
        first = max(0, written - ERROR_RING_ENTRIES)
        return entries[np.arange(first, written) % ERROR_RING_ENTRIES]

    def clear_errors(self) -> None:
        self._ring[:] = 0
        self.slot_errors[:] = 0

    def array(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, fill: int | None = None) -> npt.NDArray[Any]:
        """Device memory: see guarded_array."""
        return guarded_array(shape, dtype, fill)

    def run(self, launch: Launch) -> None:
        """Raises EmulationError for what a kernel does wrong, CompileError, and ValueError for a launch that does not
        fit the kernel's parameters or launch bounds."""
        library = self._library(launch.module)
        if launch.kernel not in library.kernels:
            known = ", ".join(sorted(library.kernels))
            raise ValueError(f"{library.name} has no kernel {launch.kernel!r}: it has {known}")
        packed = pack(launch, library.signature(launch.kernel), self._common(launch))
        _check_shape(launch, library.max_threads(launch.kernel))
        pointers = (ctypes.c_void_p * len(packed))(*(ctypes.addressof(item) for item in packed))
        record = _LaunchRecord(
            arguments=ctypes.addressof(pointers),
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared_bytes,
            cluster=launch.cluster,
            order=ORDERS[self.order],
            delivery=DELIVERIES[self.delivery],
            num_multiprocessors=self.num_multiprocessors,
            seed=self.seed & (2**64 - 1),
            dependent=launch.dependent and self.path == "hopper",
        )
        self._run_on_regions(library, launch.kernel, record)

    def synchronize(self) -> None:
        """All launches so far have ended, as after cuStreamSynchronize: later ones may read what they wrote before
        ptx::wait_for_previous."""
        self._written.clear()

    def _run_on_regions(self, library: _Library, kernel: str, record: _LaunchRecord) -> None:
        """See dependent.cpp. Only memory from guarded_array is watched; the trace is written at the very start."""
        watched = [region for region in regions() if self.trace is None or not region.holds(self.trace.ctypes.data)]
        if not record.dependent:
            self._written.clear()
        table = (_RegionRecord * max(1, len(watched)))()
        for row, region in zip(table, watched, strict=False):
            row.start, row.bytes, row.written = region.start, region.nbytes, region in self._written
        record.regions, record.num_regions = ctypes.addressof(table), len(watched)
        library.run(kernel, record)
        now = [region for row, region in zip(table, watched, strict=False) if row.written_now]
        before = () if record.begins_late else tuple(self._written)
        self._written = weakref.WeakSet((*before, *now))

    def _library(self, module: str) -> _Library:
        source = next((folder / f"{module}.cu" for folder in self.sources if (folder / f"{module}.cu").exists()), None)
        if source is None:
            raise CompileError(f"no {module}.cu in {', '.join(map(str, self.sources))}")
        key = (source, self.path == "hopper", self.sources)
        if key not in _libraries:
            _libraries[key] = _Library(source, self.path == "hopper", self.sources)
        return _libraries[key]

    def _common(self, launch: Launch) -> bytes:
        """kernels/common.cuh:Common for this launch; a traced one takes the next place in the trace."""
        own = next((item for item in launch.arguments if isinstance(item, CommonArgument)), CommonArgument(0))
        trace = 0 if self.trace is None else self.trace.ctypes.data
        ring, slots = self._ring.ctypes.data, self.slot_errors.ctypes.data
        data = struct.pack("<QQQiiII", ring, slots, trace, self.trace_index, own.layer, own.op, 0)
        self.trace_index += self.trace is not None
        return data


def _check_shape(launch: Launch, max_threads: int) -> None:
    """What cuLaunchKernelEx refuses; `max_threads` is of __launch_bounds__, or 0."""
    threads = int(np.prod(launch.block))
    if max_threads and threads > max_threads:
        raise ValueError(f"{launch.kernel}: {threads} threads are more than its __launch_bounds__({max_threads})")
    if any(extent < 1 for extent in (*launch.grid, *launch.block)) or max(launch.grid[1:]) > 65535:
        raise ValueError(f"{launch.kernel}: grid {launch.grid}, block {launch.block}")
    if launch.grid[0] % launch.cluster:
        raise ValueError(f"{launch.kernel}: grid {launch.grid} is not a multiple of the cluster of {launch.cluster}")

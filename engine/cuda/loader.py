"""Fills the weight arena on the device: page cache -> pinned ring -> device staging -> tiles, all overlapped.

Call order: WeightLoader (opens the checkpoint, plans: sizes for the memory plan) -> `load` -> DeviceArena as the
Destination of engine.loader.execute_plan -> device checksum -> DeviceWeights. Several threads read into free pinned
buffers; whoever has read one starts its copy, the kernel that converts it into tiles, and an event after both; the
buffer is free again when the event has passed.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from engine.checkpoint import Checkpoint
from engine.cuda.errors import check
from engine.cuda.events import Event
from engine.cuda.executor import CudaExecutor, Reports
from engine.cuda.load_plan import DeviceLoadPlan, plan_device_load
from engine.cuda.memory import DeviceBuffer, PinnedBuffer, aligned, copy_to_host
from engine.errors import CheckpointError
from engine.loader import execute_plan, tied_head_notes
from engine.log import log_event
from kernels import checksum as checksums
from kernels import rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine.config import ModelConfig
    from engine.cuda.context import DeviceContext
    from engine.cuda.memory import DeviceMemory
    from engine.cuda.module import Kernels
    from kernels.layout import ArenaSlot

log = logging.getLogger("appliance.cuda")

MAX_THREADS = 12
NUM_STREAMS = 3
"""Copies of one stream wait for its kernels; with three the bus always has the next copy."""


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """The weights of a model on the device. `addresses` and `slots` by canonical name (engine/params.py); a tied
    lm_head is the embedding. `checksum`: kernels/checksum.py over the arena."""

    addresses: Mapping[str, int]
    slots: Mapping[str, ArenaSlot]
    arena: DeviceBuffer
    checksum: str
    notes: tuple[str, ...]

    @property
    def arena_bytes(self) -> int:
        return self.arena.nbytes


class WeightLoader:
    """A model directory, checked and planned; use it as a context manager.

    Raises CheckpointError naming file and tensor. `arena_bytes` and `staging_bytes` go into plan_memory.
    """

    def __init__(self, path: str | Path, config: ModelConfig, *, num_threads: int | None = None) -> None:
        self._config = config
        self._checkpoint = Checkpoint.open(path)
        try:
            self.plan: DeviceLoadPlan = plan_device_load(self._checkpoint, config)
        except BaseException:
            self._checkpoint.close()
            raise
        wanted = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self.num_threads = max(1, min(wanted, len(self.plan.ops)))
        self._num_slots = self.num_threads + NUM_STREAMS + 1
        self._slot_bytes = aligned(max(op.nbytes for op in self.plan.ops))

    def __enter__(self) -> WeightLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoint.close()

    @property
    def arena_bytes(self) -> int:
        return self.plan.arena_bytes

    @property
    def staging_bytes(self) -> int:
        """Device memory the load uses beside the arena: a staging buffer for each pinned one, counters, checksums."""
        sums = checksum_scratch_bytes(self.plan.arena_bytes)
        return self._num_slots * self._slot_bytes + aligned(max(4 * len(self.plan.tensors), sums))

    def load(
        self,
        context: DeviceContext,
        kernels: Kernels,
        memory: DeviceMemory,
        reports: Reports,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> DeviceWeights:
        """Fill memory.weights, using the beginning of memory.pool as staging (zeroed again after).

        progress(done, total): bytes read, called in the calling thread. Raises CheckpointError for a damaged file or a
        finite value that bf16 cannot hold, DeviceLost.
        """
        started = time.monotonic()
        arena = DeviceArena(context, kernels, reports, self.plan, memory, self._num_slots, self._slot_bytes)
        try:
            execute_plan(self._checkpoint, self.plan, arena, progress=progress, num_threads=self.num_threads)
            arena.finish()
        finally:
            arena.close()
        notes = self.plan.notes + tied_head_notes(self._checkpoint, self._config)
        for file in self._checkpoint.files:
            file.check_unchanged()
        read = time.monotonic()
        executor = CudaExecutor(context, kernels, reports)
        arena_buffer = DeviceBuffer("weights", memory.weights.address, self.plan.arena_bytes)
        checksum = device_checksum(context, executor, arena_buffer, memory.pool.address)
        memory.zero(DeviceBuffer("staging", memory.pool.address, self.staging_bytes), context.compute)
        context.synchronize()
        addresses = {name: memory.weights.address + slot.offset for name, slot in self.plan.slots.items()}
        slots = dict(self.plan.slots)
        if self._config.tie_embeddings:
            addresses["lm_head"], slots["lm_head"] = addresses["embed"], slots["embed"]
        log_event(
            log, logging.INFO, "weights_on_device", bytes=self.plan.read_bytes, seconds=round(read - started, 3),
            gb_per_second=round(self.plan.read_bytes / (read - started) / 1e9, 1), threads=self.num_threads,
            checksum_seconds=round(time.monotonic() - read, 4),
        )  # fmt: skip
        return DeviceWeights(MappingProxyType(addresses), MappingProxyType(slots), arena_buffer, checksum, notes)


@dataclass(slots=True)
class _Slot:
    """A pinned buffer and its twin on the device; `event` has passed when both are free again."""

    view: memoryview
    host: int
    device: int
    executor: CudaExecutor
    event: Event


class DeviceArena:
    """engine.loader.Destination on the device. `offset` is the op's index. There must be more slots than threads."""

    def __init__(
        self,
        context: DeviceContext,
        kernels: Kernels,
        reports: Reports,
        plan: DeviceLoadPlan,
        memory: DeviceMemory,
        num_slots: int,
        slot_bytes: int,
    ) -> None:
        self._context, self._plan = context, plan
        self._arena = memory.weights.address
        self._overflows = memory.pool.address + num_slots * slot_bytes
        self._pinned = PinnedBuffer(context, num_slots * slot_bytes)
        self._streams = [context.stream() for _ in range(NUM_STREAMS)]
        executors = [CudaExecutor(context, kernels, reports, stream) for stream in self._streams]
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._events: list[Event] = []
        whole = self._pinned.array.data
        for i in range(num_slots):
            event = Event(context, timing=False, blocking=True)  # waiting must not take a core from reading
            self._events.append(event)
            start = i * slot_bytes
            self._free.put(
                _Slot(
                    whole[start : start + slot_bytes], self._pinned.address + start, memory.pool.address + start,
                    executors[i % NUM_STREAMS], event,
                )
            )  # fmt: skip
        self._held: dict[int, _Slot] = {}
        self._bound = threading.local()
        self._lock = threading.Lock()

    def reserve(self, offset: int, nbytes: int) -> memoryview:
        if not getattr(self._bound, "done", False):
            self._context.bind_thread()
            self._bound.done = True
        slot = self._free.get()  # in order of use: the one whose work was started first
        slot.event.wait()
        self._held[offset] = slot
        return slot.view[:nbytes]

    def commit(self, offset: int, buffer: memoryview) -> None:
        slot = self._held.pop(offset)
        op = self._plan.ops[offset]
        launch = self._plan.launch(op, slot.device, self._arena, self._overflows)
        stream = slot.executor.stream
        with self._lock:  # an executor serves one thread at a time, and copies should start in the order of the file
            copy = self._context.api.cuMemcpyHtoDAsync(slot.device, slot.host, op.nbytes, stream.handle)
            check(copy, "copying weights to the device")
            slot.executor.run(launch)
            slot.event.record(stream)
        self._free.put(slot)

    def finish(self) -> None:
        """Wait for everything; CheckpointError if a tensor held finite values beyond bf16."""
        self._context.synchronize()
        counts = np.zeros(len(self._plan.tensors), np.uint32)
        copy_to_host(self._context, counts, self._overflows, self._context.compute)
        self._context.synchronize()
        for index in np.flatnonzero(counts)[:1]:
            raise CheckpointError(
                f"tensor {self._plan.tensors[index].name} holds {counts[index]} finite values too large for bfloat16",
                hint="The CUDA engine computes with bfloat16 weights; this checkpoint cannot be served by it.",
            )

    def close(self) -> None:
        """Give ring, events and streams back; waits for what is in flight."""
        self._context.synchronize()
        while not self._free.empty():
            self._free.get().view.release()
        for event in self._events:
            event.destroy()
        self._streams.clear()
        self._pinned.free()


def checksum_scratch_bytes(nbytes: int) -> int:
    """Device memory that device_checksum of `nbytes` needs."""
    return aligned(checksums.num_blocks(nbytes) * checksums.PARTS * 8)


def device_checksum(context: DeviceContext, executor: CudaExecutor, memory: DeviceBuffer, scratch: int) -> str:
    """The checksum of device memory (kernels/checksum.py), about nbytes / 4 TB/s. Waits for the executor's stream.

    scratch: address of checksum_scratch_bytes(memory.nbytes) of device memory.
    """
    executor.run(rows.checksum(memory.address, memory.nbytes, scratch))
    parts = np.zeros(checksums.num_blocks(memory.nbytes) * checksums.PARTS, np.uint64)
    copy_to_host(context, parts, scratch, executor.stream)
    check(context.api.cuStreamSynchronize(executor.stream.handle), "cuStreamSynchronize")
    return checksums.combine(parts, memory.nbytes)

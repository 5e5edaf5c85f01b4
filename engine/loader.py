"""Fills the weight arena from a checkpoint: plan (pure, from headers only), then execute against a destination.

Call order: load_weights -> Checkpoint.open -> plan_load -> HostArena -> execute_plan -> arena_checksum -> Weights.
The plan knows nothing of memory: a device backend runs the same plan into a ring of pinned buffers (see Destination).
Nothing is allocated before every name, shape and dtype has been checked against the config.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engine.checkpoint import Checkpoint
from engine.convert import BfloatOverflow, convert
from engine.errors import CheckpointError, ConfigError
from engine.host_memory import available_bytes
from engine.load_plan import CHUNK_BYTES, CheckpointSummary, DType, LoadPlan, checkpoint_summary, plan_load
from engine.params import EMBED_SOURCE, LM_HEAD_SOURCE
from engine.types import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from engine.config import ModelConfig

__all__ = [
    "CheckpointSummary", "Destination", "HostArena", "LoadPlan", "arena_checksum", "arena_views", "checkpoint_summary",
    "execute_plan", "load_weights", "plan_load", "tied_head_notes",
]  # fmt: skip

HASH_BLOCK_BYTES = 16 << 20

_MEMORY_HINT = "Use a smaller model or dtype, or a machine (or MemoryMax) with more memory."


class Destination(Protocol):
    """Memory a plan is executed into. Both methods are called from several threads at once.

    HostArena returns the final place, so data of the right dtype goes from the page cache to it in one copy. A device
    destination returns a free buffer of its pinned ring from `reserve` (waiting for one) and starts the copy to the
    device in `commit`.
    """

    def reserve(self, offset: int, nbytes: int) -> memoryview: ...

    def commit(self, offset: int, buffer: memoryview) -> None: ...


class HostArena:
    """One anonymous mapping, zero-filled, page-aligned, huge pages where the kernel gives them.

    Raises ConfigError if the memory cannot be had. Freed when the last view is gone.
    """

    def __init__(self, nbytes: int) -> None:
        available = available_bytes()
        if available is not None and nbytes > available:  # mmap itself would promise more than there is
            raise ConfigError(
                f"the weights need {nbytes} bytes of memory, {available} are available", hint=_MEMORY_HINT
            )
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as exc:
            raise ConfigError(
                f"cannot reserve {nbytes} bytes of memory for the weights: {exc}", hint=_MEMORY_HINT
            ) from exc
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, AttributeError):
            pass  # a kernel without huge pages: slower first touch, same bytes
        self.buffer = memoryview(self._map)[:nbytes]

    def reserve(self, offset: int, nbytes: int) -> memoryview:
        return self.buffer[offset : offset + nbytes]

    def commit(self, offset: int, buffer: memoryview) -> None:
        pass  # already in place


class ReadOp(Protocol):
    """What a plan of any kind has to say of one copy (load_plan.CopyOp, cuda.load_plan.DeviceOp). `offset` is for the
    destination alone: a place in the arena, or whatever tells it what to do with the bytes."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> int: ...
    @property
    def source_offset(self) -> int: ...
    @property
    def source_dtype(self) -> str: ...
    @property
    def source_bytes(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class ReadPlan(Protocol):
    @property
    def ops(self) -> Sequence[ReadOp]: ...
    @property
    def read_bytes(self) -> int: ...


def load_weights(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: DType = "auto",
    progress: Callable[[int, int], None] | None = None,
    checksum_progress: Callable[[int, int], None] | None = None,
    num_threads: int | None = None,
) -> Weights:
    """Load a model directory into host memory.

    dtype: of the matrices; "auto" is float32 if the checkpoint holds a float32 or float16 matrix, else bfloat16.
    progress(done, total): bytes read, called in the calling thread; checksum_progress: bytes hashed, after that.
    num_threads: at most 8, the CPUs allowed here.
    Raises CheckpointError naming file and tensor, ConfigError if the memory is not there.
    """
    with Checkpoint.open(path) as checkpoint:
        plan = plan_load(checkpoint, config, dtype)
        threads = num_threads or min(8, len(os.sched_getaffinity(0)))
        arena = HostArena(plan.arena_bytes)
        execute_plan(checkpoint, plan, arena, progress=progress, num_threads=threads)
        notes = plan.notes + tied_head_notes(checkpoint, config)
        for file in checkpoint.files:
            file.check_unchanged()
    checksum = arena_checksum(arena.buffer, num_threads=threads, progress=checksum_progress)
    tensors = arena_views(plan, arena.buffer)
    if config.tie_embeddings:
        tensors["lm_head"] = tensors["embed"]
    return Weights(MappingProxyType(tensors), plan.dtype, plan.arena_bytes, checksum, arena.buffer, notes)


def execute_plan(
    checkpoint: Checkpoint,
    plan: ReadPlan,
    destination: Destination,
    *,
    progress: Callable[[int, int], None] | None = None,
    num_threads: int = 1,
) -> None:
    """Run all copies of a plan on a small pool of threads. The first error stops the others and is raised."""
    for file in checkpoint.files:
        file.read_ahead()
    worker = _Worker(checkpoint, plan.ops, destination)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
        futures = [pool.submit(worker.run) for _ in range(num_threads)]
        try:
            pending = set(futures)
            while pending:
                finished, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
                if progress is not None:
                    progress(worker.done_bytes, plan.read_bytes)
                for future in finished:
                    future.result()
        finally:
            worker.stop()  # an error, or an exception of `progress` (Ctrl-C): do not copy the rest first


class _Bounce:
    """Where one thread puts what has to be converted; taken when first needed."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def view(self, nbytes: int) -> memoryview:
        if self._buffer is None:
            self._buffer = memoryview(bytearray(2 * CHUNK_BYTES))  # float32 read for a bfloat16 chunk is the largest
        return self._buffer[:nbytes]


class _Worker:
    """Threads take the next copy from one shared list, so that a slow file or conversion holds up nobody else."""

    def __init__(self, checkpoint: Checkpoint, ops: Sequence[ReadOp], destination: Destination) -> None:
        self._files = checkpoint.files
        self._ops = ops
        self._destination = destination
        self._next = 0
        self._lock = threading.Lock()
        self.done_bytes = 0

    def stop(self) -> None:
        with self._lock:
            self._next = len(self._ops)

    def run(self) -> None:
        bounce = _Bounce()
        try:
            while (op := self._take()) is not None:
                self._copy(op, bounce)
                with self._lock:
                    self.done_bytes += op.source_bytes
        except BaseException:
            self.stop()
            raise

    def _take(self) -> ReadOp | None:
        with self._lock:
            if self._next >= len(self._ops):
                return None
            self._next += 1
            return self._ops[self._next - 1]

    def _copy(self, op: ReadOp, bounce: _Bounce) -> None:
        file = self._files[op.file]
        buffer = self._destination.reserve(op.offset, op.nbytes)
        if op.source_dtype == op.dtype:
            file.read_into(op.source_offset, buffer)
        else:
            source = bounce.view(op.source_bytes)
            file.read_into(op.source_offset, source)
            try:
                convert(source, op.source_dtype, buffer, op.dtype)
            except BfloatOverflow:
                raise CheckpointError(
                    f"{file.path}: tensor {op.name} holds finite values too large for bfloat16",
                    hint="Load with dtype float32.",
                ) from None
        self._destination.commit(op.offset, buffer)


def arena_views(plan: LoadPlan, buffer: memoryview) -> dict[str, np.ndarray[Any, Any]]:
    """Canonical name -> read-only array over `buffer`; bfloat16 as uint16 bits."""
    views: dict[str, np.ndarray[Any, Any]] = {}
    for name, slot in plan.slots.items():
        numpy_dtype = np.dtype(np.float32 if slot.dtype == "F32" else np.uint16)
        view = np.frombuffer(buffer, numpy_dtype, math.prod(slot.shape), slot.offset).reshape(slot.shape)
        view.flags.writeable = False
        views[name] = view
    return views


def arena_checksum(
    buffer: memoryview, *, num_threads: int = 1, progress: Callable[[int, int], None] | None = None
) -> str:
    """SHA-256 (hex) of the SHA-256 digests of the arena's blocks of HASH_BLOCK_BYTES, in order.

    Two levels because plain SHA-256 is sequential: 15 GB would take 10 s on one core, longer than the load itself.
    The result does not depend on num_threads.
    """

    digests = []
    with ThreadPoolExecutor(num_threads, thread_name_prefix="hash") as pool:
        for digest in pool.map(lambda start: block_digest(buffer, start), block_starts(buffer)):
            digests.append(digest)
            if progress is not None:
                progress(min(len(digests) * HASH_BLOCK_BYTES, len(buffer)), len(buffer))
    return combine_digests(digests)


def block_starts(buffer: memoryview) -> range:
    return range(0, len(buffer), HASH_BLOCK_BYTES)


def block_digest(buffer: memoryview, start: int) -> bytes:
    return hashlib.sha256(buffer[start : start + HASH_BLOCK_BYTES]).digest()


def combine_digests(digests: Iterable[bytes]) -> str:
    """The checksum, from the digests of all blocks in order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def tied_head_notes(checkpoint: Checkpoint, config: ModelConfig) -> tuple[str, ...]:
    """Some tied checkpoints still carry lm_head. It is not used; say so if it is not the embedding."""
    if not config.tie_embeddings or LM_HEAD_SOURCE not in checkpoint.tensors:
        return ()
    (file_a, head), (file_b, embed) = checkpoint.tensors[LM_HEAD_SOURCE], checkpoint.tensors[EMBED_SOURCE]
    same = (head.shape, head.dtype) == (embed.shape, embed.dtype)
    a, b = memoryview(bytearray(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
    position = 0
    while same and position < head.nbytes:
        count = min(CHUNK_BYTES, head.nbytes - position)
        checkpoint.files[file_a].read_into(head.offset + position, a[:count])
        checkpoint.files[file_b].read_into(embed.offset + position, b[:count])
        same = np.array_equal(a[:count], b[:count])
        position += count
    if same:
        return ()
    return (f"{LM_HEAD_SOURCE} differs from {EMBED_SOURCE} and is ignored, as config.json ties them",)

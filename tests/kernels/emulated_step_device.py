"""A StepDevice (engine/cuda/step_device.py) whose memory is numpy arrays and whose GPU is the emulator: the whole CUDA
runner on the CPU. Every call does its work at once; buffers end at an unreadable page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig
from engine.cuda.errors import CODES, OPS, DeviceFault
from engine.cuda.program import StepSizes, workspace
from engine.cuda.runner import CudaRunner
from engine.cuda.step_device import StepEvent
from engine.params import parameters
from engine.types import DeviceId, Weights
from kernels import checksum
from kernels.launch import Launch
from kernels.layout import arena_slots, interleave_gate_up, kv_pool_bytes, tile
from tests.kernels.emulator import EmulatedExecutor, guarded_array


class EmulatedEvent:
    def __init__(self) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = time.monotonic_ns()

    def wait(self) -> None:
        assert self.at, "waited for an event that was never recorded"

    def nanoseconds_until(self, later: StepEvent) -> int:
        assert isinstance(later, EmulatedEvent)
        return later.at - self.at


@dataclass
class Prepared:
    launch: Launch
    trace_index: int


class EmulatedStepDevice:
    """`launched` counts kernels by name, `replayed` the graphs by key."""

    def __init__(self, buffers: dict[str, npt.NDArray[np.uint8]], *, path: str, seed: int, max_slots: int) -> None:
        self.executor = EmulatedExecutor(path, seed, max_slots=max_slots)
        self.buffers = buffers
        self.executor.slot_errors = buffers["results"][: 4 * (max_slots + 1)].view(np.uint32)
        self._seen = 0
        self.launched: dict[str, int] = {}
        self.replayed: dict[str, int] = {}
        self.profile = False
        self.closed = False

    def address(self, buffer: str) -> int:
        return int(self.buffers[buffer].ctypes.data)

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return guarded_array(nbytes, np.uint8)

    def upload(self, address: int, source: npt.NDArray[Any]) -> None:
        assert source.flags.c_contiguous
        self._at(address, source.nbytes)[:] = source.view(np.uint8).reshape(-1)

    def download(self, destination: npt.NDArray[Any], address: int) -> None:
        assert destination.flags.c_contiguous
        destination.view(np.uint8).reshape(-1)[:] = self._at(address, destination.nbytes)

    def _at(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The bytes, which must lie in one buffer."""
        for buffer in self.buffers.values():
            offset = address - int(buffer.ctypes.data)
            if offset >= 0 and offset + nbytes <= len(buffer):
                return buffer[offset : offset + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} are in no buffer")

    def prepare(self, launch: Launch, trace_index: int) -> Prepared:
        return Prepared(launch, trace_index)

    def run(self, prepared: Sequence[Prepared]) -> None:
        for one in prepared:
            self.launched[one.launch.kernel] = self.launched.get(one.launch.kernel, 0) + 1
            if self.profile:
                self.executor.trace = self.buffers["trace"].view(np.uint64)
                self.executor.trace_index = one.trace_index
            self.executor.run(one.launch)

    def capture(self, key: str, prepared: Sequence[Prepared]) -> Callable[[], None]:
        kept = list(prepared)

        def replay() -> None:
            self.replayed[key] = self.replayed.get(key, 0) + 1
            self.run(kept)

        return replay

    def event(self) -> EmulatedEvent:
        return EmulatedEvent()

    def synchronize(self) -> None:
        pass

    def take_faults(self) -> list[DeviceFault]:
        entries = self.executor.error_entries[self._seen :]
        self._seen += len(entries)
        return [
            DeviceFault(
                CODES[entry["code"]], OPS[entry["op"]],
                **{name: int(entry[name]) for name in ("layer", "head", "slot", "position", "value", "sm")},
            )
            for entry in entries
        ]  # fmt: skip

    def close(self) -> None:
        self.closed = True


def to_bf16(matrix: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """float32 to bf16 bits, nearest even; bf16 bits pass."""
    if matrix.dtype == np.uint16:
        return matrix
    bits = np.ascontiguousarray(matrix, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(matrix), np.uint16(0x7FC0), rounded)


def device_weights(model: ModelConfig, weights: Weights) -> tuple[npt.NDArray[np.uint8], dict[str, int]]:
    """(arena, address of each parameter) as engine/cuda/loader.py leaves them, by kernels/layout.py."""
    slots, nbytes = arena_slots((param.name, param.shape) for param in parameters(model))
    arena = guarded_array(nbytes, np.uint8)
    for name, slot in slots.items():
        tensor = weights.tensors[name]
        if tensor.ndim == 2:
            bits = to_bf16(tensor)
            if name.endswith("gate_up"):
                bits = interleave_gate_up(*np.split(bits, 2))
            data: npt.NDArray[Any] = tile(bits)
        else:
            data = np.ascontiguousarray(tensor, np.float32)
        arena[slot.offset : slot.offset + slot.nbytes] = data.view(np.uint8)
    addresses = {name: int(arena.ctypes.data) + slot.offset for name, slot in slots.items()}
    addresses.setdefault("lm_head", addresses["embed"])
    return arena, addresses


def emulated_runner(
    model: ModelConfig,
    weights: Weights,
    *,
    num_pages: int,
    max_batch_seqs: int = 4,
    max_batch_tokens: int = 256,
    max_model_len: int | None = None,
    probe_slots: int = 1,
    path: str = "portable",
    seed: int = 0,
    **options: Any,
) -> CudaRunner:
    """The CUDA runner over host memory. Page contents are NaN at first: whatever reads an unwritten slot shows."""
    sizes = StepSizes(max_batch_seqs, max_batch_tokens, max_model_len or model.max_position, probe_slots)
    buffers = {name: guarded_array(max(nbytes, 16), np.uint8) for name, nbytes in workspace(model, sizes).items()}
    pool = kv_pool_bytes(model.num_layers, num_pages, model.num_kv_heads, model.head_dim)
    buffers["pool"] = guarded_array(pool, np.uint8, fill=0xFF)
    arena, addresses = device_weights(model, weights)
    buffers["weights"] = arena
    buffers["scratch"] = guarded_array(checksum.num_blocks(len(arena)) * checksum.PARTS * 8, np.uint8)
    device = EmulatedStepDevice(buffers, path=path, seed=seed, max_slots=max_batch_seqs + probe_slots)
    device.profile = bool(options.get("profile"))
    return CudaRunner(
        device,
        model,
        sizes,
        device_id=DeviceId("cuda", "GPU-00000000-0000-0000-0000-000000000000", "emulated"),
        num_pages=num_pages,
        weights=addresses,
        buffers={name: device.address(name) for name in buffers},
        arena_bytes=len(arena),
        weights_checksum="0" * 16,
        **options,
    )

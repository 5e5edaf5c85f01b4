"""The plan of a load onto the device: which bytes of which file become which part of the arena, from headers alone.

As engine/load_plan.py for the host, with three differences: matrices are always bf16 in tiles (kernels/layout.py), the
bytes travel as they are in the file and are converted on the device, and a piece may begin and end inside a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from engine.load_plan import match_tensors
from engine.params import parameters
from engine.safetensors import DTYPE_BYTES
from kernels import rows
from kernels.layout import ArenaSlot, RowMap, arena_slots

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.checkpoint import Checkpoint
    from engine.config import ModelConfig
    from kernels.launch import Launch

CHUNK_BYTES = 16 << 20
"""Most bytes of one copy: at 55 GB/s 300 us, long beside what Python does for it (some 50 us)."""


@dataclass(frozen=True, slots=True)
class DeviceOp:
    """Bytes of one tensor: elements first_element .. first_element + count - 1 of checkpoint tensor `name`, row-major.
    As engine.loader.ReadOp; `offset` is the op's index in the plan."""

    offset: int
    name: str
    tensor: int  # index of the tensor in DeviceLoadPlan.tensors
    file: int
    source_offset: int
    source_dtype: str
    first_element: int
    count: int

    @property
    def source_bytes(self) -> int:
        return self.count * DTYPE_BYTES[self.source_dtype]

    @property
    def dtype(self) -> str:  # what is staged is what was read
        return self.source_dtype

    @property
    def nbytes(self) -> int:
        return self.source_bytes


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """Where a checkpoint tensor goes. `row`: of the parameter; with row_map GATE or UP 0, as retile wants it."""

    name: str
    param: str
    row: int
    row_map: RowMap


@dataclass(frozen=True, slots=True)
class DeviceLoadPlan:
    """Everything a load does, decided before the first byte is copied. `ops` are in file order."""

    slots: Mapping[str, ArenaSlot]  # canonical parameter -> place
    tensors: tuple[DeviceTensor, ...]
    ops: tuple[DeviceOp, ...]
    arena_bytes: int
    read_bytes: int
    notes: tuple[str, ...]

    def launch(self, op: DeviceOp, source: int, arena: int, overflows: int) -> Launch:
        """The kernel that puts a staged piece into the arena. source, arena: addresses of the staged bytes (16-byte
        aligned) and of the arena. overflows: address of a uint32 for each tensor."""
        tensor = self.tensors[op.tensor]
        slot = self.slots[tensor.param]
        if not slot.is_matrix:
            to = arena + slot.offset + 4 * (tensor.row + op.first_element)
            return rows.copy_f32(source, op.source_dtype, to, count=op.count)
        return rows.retile(
            source, op.source_dtype, arena + slot.offset, overflows + 4 * op.tensor, first_element=op.first_element,
            count=op.count, columns=slot.columns, row_map=tensor.row_map, row0=tensor.row,
        )  # fmt: skip


def plan_device_load(checkpoint: Checkpoint, config: ModelConfig, chunk_bytes: int = CHUNK_BYTES) -> DeviceLoadPlan:
    """Pure: reads nothing but the headers already parsed. Raises CheckpointError as engine.load_plan.plan_load does."""
    wanted = match_tensors(checkpoint, config)
    slots, arena_bytes = arena_slots((param.name, param.shape) for param in parameters(config))
    tensors: list[DeviceTensor] = []
    pieces: list[tuple[int, int, int, str, int, int]] = []  # file, source offset, tensor, dtype, first element, count
    for name, target in wanted.items():
        file, info = checkpoint.tensors[name]
        row_map, row = RowMap.PLAIN, target.row
        if target.param.endswith("gate_up"):
            row_map, row = (RowMap.UP, 0) if target.row else (RowMap.GATE, 0)
        size = DTYPE_BYTES[info.dtype]
        step = chunk_bytes // size
        for first in range(0, info.numel, step):
            count = min(step, info.numel - first)
            pieces.append((file, info.offset + first * size, len(tensors), info.dtype, first, count))
        tensors.append(DeviceTensor(name, target.param, row, row_map))
    ops = tuple(
        DeviceOp(index, tensors[tensor].name, tensor, file, offset, dtype, first, count)
        for index, (file, offset, tensor, dtype, first, count) in enumerate(sorted(pieces))
    )
    read_bytes = sum(op.source_bytes for op in ops)
    return DeviceLoadPlan(MappingProxyType(slots), tuple(tensors), ops, arena_bytes, read_bytes, checkpoint.notes)

"""The plan of a load: which bytes of which file go where in the arena, decided from headers alone.

Nothing here reads weights or allocates memory for them: every name, shape and dtype is checked against the config
first. The plan is the same for host and device (engine/loader.py executes it).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from engine.checkpoint import Checkpoint
from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.jsonfile import shown
from engine.params import ALIGNMENT, LM_HEAD_SOURCE, Param, Target, is_ignorable, parameters, targets
from engine.safetensors import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from engine.safetensors import TensorInfo

DType = Literal["auto", "float32", "bfloat16"]

CHUNK_BYTES = 8 << 20
"""Most bytes of the destination that one copy fills: small enough to spread, large enough that Python costs nothing."""

_LOADABLE = {"F16", "BF16", "F32"}
_ARENA_DTYPE = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class CopyOp:
    """Read `count` elements of `source_dtype` at `source_offset` of file `file` and leave them as `dtype` at
    `offset` of the arena. dtypes are safetensors names; never more than CHUNK_BYTES of destination."""

    name: str  # of the checkpoint tensor, for errors
    file: int
    source_offset: int
    source_dtype: str
    offset: int
    dtype: str
    count: int

    @property
    def source_bytes(self) -> int:
        return self.count * DTYPE_BYTES[self.source_dtype]

    @property
    def nbytes(self) -> int:
        return self.count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one parameter in the arena."""

    offset: int  # bytes, a multiple of ALIGNMENT
    shape: tuple[int, ...]
    dtype: str  # "F32" or "BF16"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything a load does, decided before the first byte is copied. `ops` are in file order."""

    dtype: str  # of the matrices: "float32" or "bfloat16"
    slots: Mapping[str, Slot]
    ops: tuple[CopyOp, ...]
    arena_bytes: int
    read_bytes: int
    notes: tuple[str, ...]


def plan_load(checkpoint: Checkpoint, config: ModelConfig, dtype: DType = "auto") -> LoadPlan:
    """Match every checkpoint tensor to its place. Pure: reads nothing but the headers already parsed.

    Raises CheckpointError naming the tensor that is missing, unknown, of a wrong shape or of a dtype not loaded.
    """
    wanted = match_tensors(checkpoint, config)
    params = {param.name: param for param in parameters(config)}
    matrix_dtypes = {checkpoint.tensors[name][1].dtype for name, t in wanted.items() if params[t.param].is_matrix}
    chosen = ("bfloat16" if matrix_dtypes == {"BF16"} else "float32") if dtype == "auto" else dtype
    if chosen not in _ARENA_DTYPE:
        raise ValueError(f"dtype {dtype!r} is not auto, float32 or bfloat16")
    slots, arena_bytes = _layout(params.values(), _ARENA_DTYPE[chosen])
    ops: list[CopyOp] = []
    for name, target in wanted.items():
        file, info = checkpoint.tensors[name]
        slot = slots[target.param]
        row_bytes = math.prod(slot.shape[1:]) * DTYPE_BYTES[slot.dtype]
        ops += _chunks(file, info, slot.offset + target.row * row_bytes, slot.dtype)
    ops.sort(key=lambda op: (op.file, op.source_offset))
    return LoadPlan(
        dtype=chosen,
        slots=MappingProxyType(slots),
        ops=tuple(ops),
        arena_bytes=arena_bytes,
        read_bytes=sum(op.source_bytes for op in ops),
        notes=checkpoint.notes,
    )


def match_tensors(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Target]:
    """Every tensor of the checkpoint that is loaded, with its place. Host and device plans begin here.

    Raises CheckpointError naming the tensor that is missing, unknown, of a wrong shape or of a dtype not loaded.
    """
    wanted = targets(config)
    _check_names(checkpoint, config, set(wanted))
    for name, target in wanted.items():
        file, info = checkpoint.tensors[name]
        where = checkpoint.files[file].path
        if info.shape != target.shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(info.shape)}, but config.json makes it {list(target.shape)}",
                hint="config.json and weights are of different models or uploads: fetch both again.",
            )
        if info.dtype not in _LOADABLE:
            raise CheckpointError(
                f"{where}: tensor {name} has dtype {info.dtype}; only F16, BF16 and F32 weights are loaded",
                hint="Fetch the model in one of these; a quantised GGUF is converted by `appliance model add`.",
            )
    return wanted


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """What `appliance model add` reports of a checkpoint that could be loaded."""

    family: str
    num_parameters: int  # a tied lm_head counted once
    num_tensors: int
    file_names: tuple[str, ...]
    file_bytes: int
    source_dtypes: Mapping[str, int]  # safetensors dtype -> tensors
    dtype: str  # of the matrices as loaded by "auto"
    arena_bytes: int
    notes: tuple[str, ...]


def checkpoint_summary(path: str | Path, config: ModelConfig | None = None) -> CheckpointSummary:
    """Check all that can be checked without reading weights: config, headers, names, shapes, dtypes.

    Raises ConfigError and CheckpointError as ModelConfig.from_dir and load_weights would.
    """
    config = config or ModelConfig.from_dir(path)
    with Checkpoint.open(path) as checkpoint:
        plan = plan_load(checkpoint, config)
        return CheckpointSummary(
            family=config.family,
            num_parameters=sum(math.prod(slot.shape) for slot in plan.slots.values()),
            num_tensors=len(checkpoint.tensors),
            file_names=tuple(file.path.name for file in checkpoint.files),
            file_bytes=checkpoint.total_bytes,
            source_dtypes=dict(sorted(Counter(info.dtype for _, info in checkpoint.tensors.values()).items())),
            dtype=plan.dtype,
            arena_bytes=plan.arena_bytes,
            notes=plan.notes,
        )


def _check_names(checkpoint: Checkpoint, config: ModelConfig, wanted: set[str]) -> None:
    present = {name for name in checkpoint.tensors if not is_ignorable(name)}
    if config.tie_embeddings:
        present.discard(LM_HEAD_SOURCE)  # looked at after the load
    missing, unknown = wanted - present, present - wanted
    if not missing and not unknown:
        return
    parts = []
    for names, problem in ((missing, "lacks"), (unknown, "holds unknown")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            parts.append(f"{problem} tensor {shown(min(names))}{more}")
    hint = None
    if missing == {LM_HEAD_SOURCE}:
        hint = "A model that shares its embedding needs tie_word_embeddings: true in config.json."
    raise CheckpointError(f"{checkpoint.folder}: the checkpoint {', and '.join(parts)} ({config.family})", hint=hint)


def _layout(params: Iterable[Param], matrix_dtype: str) -> tuple[dict[str, Slot], int]:
    slots: dict[str, Slot] = {}
    position = 0
    for param in params:
        dtype = matrix_dtype if param.is_matrix else "F32"
        slots[param.name] = Slot(position, param.shape, dtype)
        position += param.numel * DTYPE_BYTES[dtype]
        position += -position % ALIGNMENT
    return slots, position


def _chunks(file: int, info: TensorInfo, offset: int, dtype: str) -> list[CopyOp]:
    step = CHUNK_BYTES // DTYPE_BYTES[dtype]
    size_in, size_out = DTYPE_BYTES[info.dtype], DTYPE_BYTES[dtype]
    return [
        CopyOp(
            info.name,
            file,
            info.offset + start * size_in,
            info.dtype,
            offset + start * size_out,
            dtype,
            min(step, info.numel - start),
        )
        for start in range(0, info.numel, step)
    ]

"""Loading onto the device, as far as it goes without one: the plan, and its kernels on the emulator."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from engine.checkpoint import Checkpoint
from engine.config import ModelConfig
from engine.cuda.load_plan import CHUNK_BYTES, DeviceLoadPlan, plan_device_load
from engine.errors import CheckpointError
from engine.loader import execute_plan
from tests.engine.checkpoint_files import random_tensors, tiny_config, write_model
from tests.engine.device_load_cases import CASES, expected_arena, write_case
from tests.kernels.emulator import EmulatedExecutor, guarded_array


class EmulatedArena:
    """engine.loader.Destination: staged bytes go through the emulated kernels when all have been read (an emulator's
    fibers belong to one thread)."""

    def __init__(self, plan: DeviceLoadPlan) -> None:
        self.plan, self.executor = plan, EmulatedExecutor("portable")
        self.arena = np.zeros(plan.arena_bytes + 2048, np.uint8)
        self.start = -self.arena.ctypes.data % 2048
        self.overflows = np.zeros(len(plan.tensors), np.uint32)
        self.staged: dict[int, np.ndarray] = {}

    def reserve(self, offset: int, nbytes: int) -> memoryview:
        self.staged[offset] = guarded_array(nbytes, np.uint8)
        return self.staged[offset].data

    def commit(self, offset: int, buffer: memoryview) -> None:
        pass

    def finish(self) -> None:
        arena, overflows = self.arena.ctypes.data + self.start, self.overflows.ctypes.data
        for offset, staged in self.staged.items():
            self.executor.run(self.plan.launch(self.plan.ops[offset], staged.ctypes.data, arena, overflows))

    @property
    def bytes(self) -> np.ndarray:
        return self.arena[self.start : self.start + self.plan.arena_bytes]


def load(folder, config: ModelConfig, chunk_bytes: int) -> EmulatedArena:
    with Checkpoint.open(folder) as checkpoint:
        plan = plan_device_load(checkpoint, config, chunk_bytes)
        arena = EmulatedArena(plan)
        execute_plan(checkpoint, plan, arena, num_threads=2)
    arena.finish()
    return arena


@pytest.mark.parametrize("name", CASES)
def test_the_arena_holds_what_the_host_loader_reads(tmp_path, name):
    config = write_case(tmp_path, name)
    arena = load(tmp_path, config, CHUNK_BYTES)
    assert (arena.bytes == expected_arena(tmp_path, config)).all()
    assert not arena.overflows.any()


@pytest.mark.parametrize("chunk_bytes", [64, 1000])
def test_pieces_may_begin_and_end_anywhere(tmp_path, chunk_bytes):
    """Most pieces of 64 and 1000 bytes begin inside a row; none may write what belongs to its neighbour."""
    config = write_case(tmp_path, "mistral-mixed")
    assert (load(tmp_path, config, chunk_bytes).bytes == expected_arena(tmp_path, config)).all()


def test_tensors_with_values_beyond_bfloat16_are_counted_apart(tmp_path):
    raw = tiny_config()
    tensors = random_tensors(raw)
    tensors["model.layers.1.mlp.gate_proj.weight"][3, :2] = 3.4e38, -3.4e38
    tensors["lm_head.weight"][0, :2] = 3.395e38, -3.397e38  # the first still rounds to the largest bfloat16
    write_model(tmp_path, raw, tensors)
    arena = load(tmp_path, ModelConfig.from_dir(tmp_path), CHUNK_BYTES)
    counts = {t.name: int(n) for t, n in zip(arena.plan.tensors, arena.overflows, strict=True) if n}
    assert counts == {"model.layers.1.mlp.gate_proj.weight": 2, "lm_head.weight": 1}


def test_the_plan_reads_every_byte_once_in_file_order(tmp_path):
    raw = tiny_config("qwen2")
    write_model(tmp_path, raw, random_tensors(raw), shards=3)
    with Checkpoint.open(tmp_path) as checkpoint:
        plan = plan_device_load(checkpoint, ModelConfig.from_dir(tmp_path), 1 << 10)
        tensor_bytes = sum(info.nbytes for _, info in checkpoint.tensors.values())
    assert plan.read_bytes == tensor_bytes
    assert [op.offset for op in plan.ops] == list(range(len(plan.ops)))
    places = [(op.file, op.source_offset) for op in plan.ops]
    assert places == sorted(places)
    for (file, start), op, (next_file, next_start) in zip(places, plan.ops, places[1:]):
        assert 0 < op.nbytes <= 1 << 10
        assert next_file != file or next_start == start + op.nbytes


def test_the_arena_has_room_for_every_tile(tmp_path):
    raw = tiny_config("qwen3", hidden_size=70, intermediate_size=37)
    write_model(tmp_path, raw, random_tensors(raw))
    with Checkpoint.open(tmp_path) as checkpoint:
        plan = plan_device_load(checkpoint, ModelConfig.from_dir(tmp_path))
    places = sorted((slot.offset, slot.nbytes) for slot in plan.slots.values())
    for (offset, nbytes), (following, _) in itertools.pairwise(places):
        assert offset % 2048 == 0 and offset + nbytes <= following
    gate_up = plan.slots["layers.0.gate_up"]
    assert gate_up.nbytes == 2 * math.ceil(37 / 8) * 2 * 8 * 128  # rows to 8 each, columns to 128


def test_damaged_checkpoints_are_refused_as_by_the_host_loader(tmp_path):
    raw = tiny_config()
    tensors = random_tensors(raw)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    write_model(tmp_path, raw, tensors)
    with (
        Checkpoint.open(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape"),
    ):
        plan_device_load(checkpoint, ModelConfig.from_dir(tmp_path))

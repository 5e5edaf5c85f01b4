"""Loading onto a real GPU: every byte of the arena, the checksum, memory given back."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config import ModelConfig
from engine.cuda.loader import DeviceWeights, WeightLoader, checksum_scratch_bytes, device_checksum
from engine.cuda.memory import DeviceMemory, copy_to_host, plan_memory
from engine.errors import CheckpointError
from kernels import checksum
from tests.engine.checkpoint_files import random_tensors, tiny_config, write_model
from tests.engine.device_load_cases import CASES, expected_arena, write_case


def load(gpu, folder, config: ModelConfig, **options) -> tuple[DeviceWeights, DeviceMemory]:
    with WeightLoader(folder, config, **options) as loader:
        free, total = gpu.context.memory_info()
        plan = plan_memory(
            total_bytes=total, free_bytes=free, fraction=0.9, weights_bytes=loader.arena_bytes, page_bytes=4096,
            workspace={"scratch": checksum_scratch_bytes(loader.arena_bytes)}, max_pages=1,
            staging_bytes=loader.staging_bytes,
        )  # fmt: skip
        memory = DeviceMemory(gpu.context, plan)
        try:
            return loader.load(gpu.context, gpu.kernels, memory, gpu.reports), memory
        except BaseException:
            memory._free()
            raise


@pytest.mark.parametrize("name", CASES)
def test_every_byte_of_the_arena(gpu, tmp_path, name):
    config = write_case(tmp_path, name)
    wanted = expected_arena(tmp_path, config)
    weights, memory = load(gpu, tmp_path, config)
    arena = np.empty(weights.arena_bytes, np.uint8)
    copy_to_host(gpu.context, arena, weights.arena.address, gpu.context.compute)
    pool = np.ones(memory.pool.nbytes, np.uint8)
    copy_to_host(gpu.context, pool, memory.pool.address, gpu.context.compute)
    gpu.context.synchronize()
    assert (arena == wanted).all()
    assert not pool.any(), "the loader left something in the KV pool"
    assert weights.checksum == checksum.checksum(wanted.data)
    assert ("lm_head" in weights.addresses) and (weights.addresses["lm_head"] == weights.addresses["embed"]) == (
        config.tie_embeddings
    )
    scratch = memory.workspace["scratch"].address
    assert device_checksum(gpu.context, gpu.executor, weights.arena, scratch) == weights.checksum
    gpu.context.cuda.memset_d8(weights.arena.address + weights.arena_bytes // 2, int(wanted[len(wanted) // 2]) ^ 4, 1)
    assert device_checksum(gpu.context, gpu.executor, weights.arena, scratch) != weights.checksum
    memory._free()


def test_values_beyond_bfloat16_name_the_tensor(gpu, tmp_path):
    raw = tiny_config()
    tensors = random_tensors(raw)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 3.4e38
    write_model(tmp_path, raw, tensors)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight .* too large for bfloat16"):
        load(gpu, tmp_path, ModelConfig.from_dir(tmp_path))


def test_the_number_of_threads_does_not_matter(gpu, tmp_path):
    config = write_case(tmp_path, "mistral-mixed")
    sums = set()
    for threads in (1, 5):
        weights, memory = load(gpu, tmp_path, config, num_threads=threads)
        sums.add(weights.checksum)
        memory._free()
    assert len(sums) == 1

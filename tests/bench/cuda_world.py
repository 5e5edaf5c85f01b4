"""The CUDA engine with random weights of a given shape, made on the device in a second: for benchmarks, where 15 GB of
checkpoint would say nothing more."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.config import ModelConfig, RopeConfig
from engine.core_config import CoreConfig, with_defaults
from engine.cuda.context import DeviceContext
from engine.cuda.errors import RING_BYTES
from engine.cuda.executor import CudaExecutor, Reports
from engine.cuda.loader import checksum_scratch_bytes
from engine.cuda.memory import DeviceMemory, PinnedBuffer, copy_to_device, plan_memory
from engine.cuda.module import Kernels
from engine.cuda.program import StepSizes, workspace
from engine.cuda.runner import CudaRunner
from engine.cuda.step_device import CudaStepDevice
from engine.cuda.step_ring import StepRingWriter
from engine.engine import Engine
from engine.params import parameters
from engine.types import DeviceId
from kernels.layout import arena_slots, page_elements

LLAMA_8B = ModelConfig(
    family="llama", hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14336, vocab_size=128256, max_position=8192, rms_eps=1e-5,
    rope=RopeConfig(theta=500000.0, kind="default"),
)  # fmt: skip
CHUNK = 1 << 25  # bf16 values that are repeated over the arena


def random_engine(
    model: ModelConfig, *, pages: int, max_batch_tokens: int = 8192, ring_path: str | None = None, **options: Any
) -> Engine:
    """`options` of CoreConfig."""
    config = with_defaults(
        CoreConfig(model_dir="random", backend="cuda", prefix_cache=False, max_batch_tokens=max_batch_tokens, **options)
    )
    sizes = StepSizes(config.max_batch_seqs, max_batch_tokens, model.max_position)
    slots, arena_bytes = arena_slots((param.name, param.shape) for param in parameters(model))
    context = DeviceContext(0)
    kernels = Kernels(context)
    kernels.load_all()
    free, total = context.memory_info()
    plan = plan_memory(
        total_bytes=total,
        free_bytes=free,
        fraction=0.9,
        weights_bytes=arena_bytes,
        workspace={**workspace(model, sizes), "scratch": checksum_scratch_bytes(arena_bytes)},
        page_bytes=model.num_layers * 2 * page_elements(model.num_kv_heads, model.head_dim) * 2,
        min_pages=pages,
        max_pages=pages,
    )
    memory = DeviceMemory(context, plan)
    fill_weights(context, memory.weights.address, arena_bytes, slots, model)
    error_ring = PinnedBuffer(context, RING_BYTES, mapped=True)
    at = {name: buffer.address for name, buffer in memory.workspace.items()}
    reports = Reports(error_ring.device_address, at["results"], at["trace"] if config.profile_kernels else 0)
    addresses = {name: memory.weights.address + slot.offset for name, slot in slots.items()}
    addresses.setdefault("lm_head", addresses["embed"])
    assert config.plans_in_flight is not None
    runner = CudaRunner(
        CudaStepDevice(
            context,
            memory,
            CudaExecutor(context, kernels, reports),
            error_ring,
            overlap_kernels=not config.profile_kernels,
        ),
        model,
        sizes,
        device_id=DeviceId("cuda", context.info.uuid, context.info.name),
        num_pages=pages,
        weights=addresses,
        buffers={**at, "pool": memory.pool.address, "weights": memory.weights.address},
        arena_bytes=arena_bytes,
        weights_checksum="",
        cuda_graphs=config.cuda_graphs is not False,
        plans_in_flight=config.plans_in_flight,
        ring=StepRingWriter(ring_path),
        profile=bool(config.profile_kernels),
    )
    return Engine(config, model, runner)


def fill_weights(context: DeviceContext, arena: int, nbytes: int, slots: Any, model: ModelConfig) -> None:
    """Matrices: random bf16 of the usual size; norms: 1; biases: 0."""
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(CHUNK, np.float32) * model.hidden_size**-0.5).view(np.uint32) >> 16
    pinned = PinnedBuffer(context, 2 * CHUNK)
    pinned.array.view(np.uint16)[:] = values
    for start in range(0, nbytes, 2 * CHUNK):
        part = pinned.array[: min(2 * CHUNK, nbytes - start)]
        copy_to_device(context, arena + start, part, context.compute)
    context.synchronize()
    pinned.free()
    for name, slot in slots.items():
        if not slot.is_matrix:
            vector = np.full(slot.rows, 0.0 if name.endswith("bias") else 1.0, np.float32)
            copy_to_device(context, arena + slot.offset, vector, context.compute)
            context.synchronize()

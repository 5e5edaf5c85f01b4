"""Start of the CUDA backend: device, kernels, memory plan, weights, runner. Whatever fails gives everything back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine.backend import LoadProgress, phase_progress
from engine.core_config import context_length
from engine.cuda.context import DeviceContext
from engine.cuda.errors import RING_BYTES
from engine.cuda.executor import CudaExecutor, Reports
from engine.cuda.loader import WeightLoader, checksum_scratch_bytes
from engine.cuda.memory import DeviceMemory, PinnedBuffer, plan_memory
from engine.cuda.module import Kernels
from engine.cuda.program import StepSizes, workspace
from engine.cuda.runner import CudaRunner
from engine.cuda.step_device import CudaStepDevice
from engine.cuda.step_ring import StepRingWriter
from engine.cuda.step_state import table_width
from engine.errors import ConfigError, EngineError
from engine.fixed_softmax import MAX_VOCAB
from engine.log import log_event
from engine.types import PAGE_TOKENS, DeviceId
from kernels.layout import page_elements

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from engine.core_config import CoreConfig
    from engine.cuda.memory import MemoryPlan

log = logging.getLogger("appliance.cuda")


def load_cuda(config: CoreConfig, model: ModelConfig, progress: LoadProgress | None = None) -> CudaRunner:
    """`config` with its defaults filled in (core_config.with_defaults). ConfigError: no driver or GPU, kernels not
    built, a model that no kernel takes, or one that does not fit; CheckpointError: damaged files."""
    sizes = step_sizes(config, model)
    assert config.device is not None
    context = DeviceContext(config.device)
    try:
        return _load(config, model, sizes, context, progress)
    except BaseException:
        try:
            context.close()
        except EngineError as error:  # the first error says what to do and has the right exit status
            log_event(log, logging.ERROR, "close_failed", error.message)
        raise


def step_sizes(config: CoreConfig, model: ModelConfig) -> StepSizes:
    """Pure. A pool that is asked for and smaller than the context bounds the context."""
    if not 0 < model.vocab_size < MAX_VOCAB:
        raise ConfigError(
            f"the vocabulary has {model.vocab_size} tokens; the CUDA sampler takes up to {MAX_VOCAB - 1}",
            hint="use --backend cpu",
        )
    assert config.max_batch_tokens is not None
    max_model_len = context_length(config, model.max_position)
    if config.kv_tokens is not None:
        max_model_len = min(max_model_len, table_width(config.kv_tokens) * PAGE_TOKENS)
    return StepSizes(config.max_batch_seqs, config.max_batch_tokens, max_model_len)


def page_limits(config: CoreConfig, sizes: StepSizes) -> tuple[int, int]:
    """(fewest, most) pages: what was asked for; else at least one full context, at most a full batch of them."""
    if config.kv_tokens is not None:
        return (pages := table_width(config.kv_tokens)), pages
    pages = table_width(sizes.max_model_len)
    return pages, pages * config.max_batch_seqs


def _load(
    config: CoreConfig,
    model: ModelConfig,
    sizes: StepSizes,
    context: DeviceContext,
    progress: LoadProgress | None,
) -> CudaRunner:
    kernels = Kernels(context)
    kernels.load_all()  # no step may be the first to use a kernel: the driver would allocate for it
    page_bytes = model.num_layers * 2 * page_elements(model.num_kv_heads, model.head_dim) * 2
    fewest, most = page_limits(config, sizes)
    assert config.gpu_memory_fraction is not None and config.plans_in_flight is not None
    with WeightLoader(config.model_dir, model) as loader:
        free_bytes, total_bytes = context.memory_info()
        plan = plan_memory(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            fraction=config.gpu_memory_fraction,
            weights_bytes=loader.arena_bytes,
            workspace={**workspace(model, sizes), "scratch": checksum_scratch_bytes(loader.arena_bytes)},
            page_bytes=page_bytes,
            min_pages=fewest,
            max_pages=most,
            staging_bytes=loader.staging_bytes,
        )
        _log_plan(plan)
        memory = DeviceMemory(context, plan)
        error_ring = PinnedBuffer(context, RING_BYTES, mapped=True)
        at = {name: buffer.address for name, buffer in memory.workspace.items()}
        reports = Reports(error_ring.device_address, at["results"], at["trace"] if config.profile_kernels else 0)
        weights = loader.load(context, kernels, memory, reports, progress=phase_progress(progress, "weights"))
    for note in weights.notes:
        log_event(log, logging.WARNING, "checkpoint_note", note)
    ring = StepRingWriter(config.step_ring)
    log_event(log, logging.INFO, "step_ring", f"python -m engine.cuda.step_ring {ring.readable_as}")
    executor = CudaExecutor(context, kernels, reports)
    return CudaRunner(
        CudaStepDevice(context, memory, executor, error_ring, overlap_kernels=not config.profile_kernels),
        model,
        sizes,
        device_id=DeviceId("cuda", context.info.uuid, context.info.name),
        num_pages=plan.num_pages,
        weights=weights.addresses,
        buffers={**at, "pool": memory.pool.address, "weights": memory.weights.address},
        arena_bytes=weights.arena_bytes,
        weights_checksum=weights.checksum,
        cuda_graphs=config.cuda_graphs is not False,
        plans_in_flight=config.plans_in_flight,
        ring=ring,
        profile=bool(config.profile_kernels),
    )


def _log_plan(plan: MemoryPlan) -> None:
    """What takes how much of the GPU, one line for machines; MemoryPlan.table() is for people."""
    log_event(
        log, logging.INFO, "memory_plan", plan.table(), total_bytes=plan.total_bytes, budget_bytes=plan.budget_bytes,
        weights_bytes=plan.weights_bytes, workspace_bytes=plan.workspace_bytes, pool_bytes=plan.pool_bytes,
        num_pages=plan.num_pages, page_bytes=plan.page_bytes,
    )  # fmt: skip


__all__ = ["load_cuda", "page_limits", "step_sizes"]

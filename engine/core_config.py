"""What engine-core is told at start, and the arithmetic that turns free memory into KV pages."""

from __future__ import annotations

import os
from typing import Any, Literal

import msgspec

from engine.errors import ConfigError
from engine.plan import SchedulerConfig
from engine.types import PAGE_TOKENS

MIB = 1 << 20


class CoreConfig(msgspec.Struct, kw_only=True, frozen=True):
    """None = decide from the backend, the model and the machine; every decision is printed at start."""

    model_dir: str
    backend: Literal["cpu", "cuda"] = "cpu"  # "cpu" only when asked for; "cuda" is the appliance's
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the weights; CUDA: always bfloat16
    max_model_len: int | None = None  # tokens of prompt + output; default: the model's context
    kv_tokens: int | None = None  # size of the KV pool in tokens, rounded up to pages
    max_batch_tokens: int | None = None  # of one step
    max_batch_seqs: int = 64
    prefill_chunk: int | None = None
    prefix_cache: bool = True
    plans_in_flight: Literal[1, 2] | None = None  # 2 = step n+1 is launched while step n runs
    allow_fault_injection: bool = False  # tests and drills: Control "flip" may damage the weights (engine/faults.py)
    # CPU backend
    memory_fraction: float | None = None  # of the memory free after loading, for the KV pool, without kv_tokens
    num_threads: int | None = None  # default: the CPUs this process may use
    # CUDA backend
    gpu_memory_fraction: float | None = None  # of the GPU's memory, for everything this process takes there
    device: str | None = None  # index among the visible GPUs, or (the beginning of) a UUID
    cuda_graphs: bool | None = None  # False: every step is launched kernel by kernel (same bits)
    profile_kernels: bool | None = None  # True: every kernel of a step writes its start time into the step ring
    step_ring: str | None = None  # file of the step ring; default: an anonymous one, see the log


_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"max_batch_tokens": 256, "prefill_chunk": 128, "plans_in_flight": 1, "memory_fraction": 0.4},
    "cuda": {
        "max_batch_tokens": 8192,
        "prefill_chunk": 512,
        "plans_in_flight": 2,
        "gpu_memory_fraction": 0.9,
        "device": "0",
        "cuda_graphs": True,
        "profile_kernels": False,
    },
}
_ONLY: dict[str, tuple[str, ...]] = {  # options that mean nothing to the other backend
    "cpu": ("memory_fraction", "num_threads"),
    "cuda": ("gpu_memory_fraction", "device", "cuda_graphs", "profile_kernels", "step_ring"),
}
MAX_BATCH_SEQS_CUDA = 256


def with_defaults(config: CoreConfig) -> CoreConfig:
    """Fill in what depends on the backend alone. ConfigError for an option of the other backend: it would be ignored
    in silence. Doing it twice changes nothing."""
    other = "cpu" if config.backend == "cuda" else "cuda"
    for name in _ONLY[other]:
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name} is an option of the {other} backend, and the backend is {config.backend}",
                hint=f"leave it out or use --backend {other}",
            )
    if config.backend == "cuda":
        if config.dtype == "float32":
            raise ConfigError("the cuda backend computes in bfloat16", hint="leave --dtype out or use --backend cpu")
        if config.max_batch_seqs > MAX_BATCH_SEQS_CUDA:
            raise ConfigError(
                f"max_batch_seqs is {config.max_batch_seqs}; the cuda backend takes up to {MAX_BATCH_SEQS_CUDA}",
                hint="lower --max-batch-seqs",
            )
    missing = {name: value for name, value in _DEFAULTS[config.backend].items() if getattr(config, name) is None}
    return msgspec.structs.replace(config, **missing)


def context_length(config: CoreConfig, model_context: int) -> int:
    """Tokens of prompt + output: as asked, else the model's. More than the model was made for is refused."""
    asked = config.max_model_len or model_context
    if asked > model_context:
        raise ConfigError(
            f"max_model_len is {asked}, but the model's context is {model_context}", hint="lower --max-model-len"
        )
    if asked < 2:
        raise ConfigError(f"a context of {asked} tokens holds no prompt and no answer", hint="--max-model-len >= 2")
    return asked


def scheduler_config(config: CoreConfig, max_model_len: int, plans_in_flight: int | None = None) -> SchedulerConfig:
    """ConfigError for sizes that do not go together; needs no model, so it is also called before the load."""
    config = with_defaults(config)
    assert config.prefill_chunk and config.max_batch_tokens and config.plans_in_flight
    if config.prefill_chunk > config.max_batch_tokens:
        raise ConfigError(
            f"prefill_chunk is {config.prefill_chunk}, but a step takes at most {config.max_batch_tokens} tokens",
            hint="lower --prefill-chunk or raise --max-batch-tokens",
        )
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_seqs=config.max_batch_seqs,
        prefill_chunk=config.prefill_chunk,
        prefix_cache=config.prefix_cache,
        max_plans_in_flight=plans_in_flight or config.plans_in_flight,
    )


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def plan_kv_pages(config: CoreConfig, *, max_model_len: int, bytes_per_page: int, free_bytes: int | None) -> int:
    """Pages of the KV pool: as asked, or `memory_fraction` of `free_bytes`, capped at a full batch of full contexts.

    ConfigError when not even one full context fits: refusing at start beats refusing every long request.
    """
    pages_per_context = -(-max_model_len // PAGE_TOKENS)
    if config.kv_tokens is not None:
        pages = -(-config.kv_tokens // PAGE_TOKENS)
        if pages < 1:
            raise ConfigError(f"kv_tokens = {config.kv_tokens} is not even one page of {PAGE_TOKENS} tokens")
        if free_bytes is not None and pages * bytes_per_page > free_bytes:
            raise ConfigError(
                f"kv_tokens = {config.kv_tokens} needs {pages * bytes_per_page // MIB} MiB, "
                f"{free_bytes // MIB} MiB are free",
                hint="lower --kv-tokens",
            )
        return pages
    if free_bytes is None:
        raise ConfigError("cannot tell how much memory is free here", hint="give --kv-tokens")
    fraction = with_defaults(config).memory_fraction
    assert fraction is not None
    pages = min(int(free_bytes * fraction) // bytes_per_page, pages_per_context * config.max_batch_seqs)
    if pages < pages_per_context:
        raise ConfigError(
            f"the KV pool would hold {pages * PAGE_TOKENS} tokens, one context is {max_model_len} "
            f"({pages_per_context * bytes_per_page // MIB} MiB needed, {free_bytes // MIB} MiB free "
            f"x memory_fraction {fraction})",
            hint="lower --max-model-len, raise --memory-fraction, or give --kv-tokens",
        )
    return pages

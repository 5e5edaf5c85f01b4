"""What engine-core is told at start, and the arithmetic that turns free memory into KV pages."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from engine.errors import ConfigError
from engine.plan import SchedulerConfig
from engine.types import PAGE_TOKENS

MIB = 1 << 20


class CoreConfig(msgspec.Struct, kw_only=True, frozen=True):
    """None = decide from the model and the machine; every decision is printed at start."""

    model_dir: str
    backend: str = "cpu"  # "cpu" only when asked for; "cuda" is the appliance's
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the weights
    max_model_len: int | None = None  # tokens of prompt + output; default: the model's context
    kv_tokens: int | None = None  # size of the KV pool in tokens, rounded up to pages
    memory_fraction: float = 0.4  # of the memory free after loading, for the KV pool, when kv_tokens is not given
    max_batch_tokens: int = 256  # of one step
    max_batch_seqs: int = 64
    prefill_chunk: int = 128
    num_threads: int | None = None  # CPU backend; default: the CPUs this process may use
    prefix_cache: bool = True


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


def scheduler_config(config: CoreConfig, max_model_len: int) -> SchedulerConfig:
    """ConfigError for sizes that do not go together; needs no model, so it is also called before the load."""
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
        max_plans_in_flight=1,
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
    pages = min(int(free_bytes * config.memory_fraction) // bytes_per_page, pages_per_context * config.max_batch_seqs)
    if pages < pages_per_context:
        raise ConfigError(
            f"the KV pool would hold {pages * PAGE_TOKENS} tokens, one context is {max_model_len} "
            f"({pages_per_context * bytes_per_page // MIB} MiB needed, {free_bytes // MIB} MiB free "
            f"x memory_fraction {config.memory_fraction})",
            hint="lower --max-model-len, raise --memory-fraction, or give --kv-tokens",
        )
    return pages

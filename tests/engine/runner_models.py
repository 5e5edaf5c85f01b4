"""Small random models, and their forward pass in float64 from kernels/reference.py: the oracle of ModelRunner."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.config import ModelConfig, RopeConfig
from engine.rope import rope_table
from engine.types import PAGE_TOKENS, StepBatch, Weights
from kernels import reference

BASE: dict[str, Any] = {
    "family": "llama", "hidden_size": 52, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 12,
    "intermediate_size": 70, "vocab_size": 90, "max_position": 1024, "rms_eps": 1e-5,
    "rope": RopeConfig(theta=10000.0, kind="default"), "tie_embeddings": False,
}  # fmt: skip

# What differs between the families, with a size that is no multiple of 8 somewhere in each.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "mha": {"num_kv_heads": 6},
    "mqa": {"num_kv_heads": 1},
    "window": {"family": "mistral", "sliding_window": 37},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 26},
    "yarn": {"rope": RopeConfig(theta=10000.0, kind="yarn", factor=4.0, original_max_position=64)},
}


def make_config(name: str) -> ModelConfig:
    return ModelConfig(**{**BASE, **VARIANTS[name]})


def make_weights(config: ModelConfig, *, bf16: bool = False, seed: int = 1) -> Weights:
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        values = (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
        tensors[name] = (values.view(np.uint32) >> 16).astype(np.uint16) if bf16 else values

    def vector(name: str, size: int, mean: float) -> None:
        tensors[name] = (mean + 0.2 * rng.standard_normal(size)).astype(np.float32)

    hidden, head_dim = config.hidden_size, config.head_dim
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * head_dim
    matrix("embed", config.vocab_size, hidden)
    for i in range(config.num_layers):
        vector(f"layers.{i}.attn_norm", hidden, 1)
        matrix(f"layers.{i}.qkv", qkv_rows, hidden)
        if config.qkv_bias:
            vector(f"layers.{i}.qkv_bias", qkv_rows, 0)
        if config.qk_norm:
            vector(f"layers.{i}.q_norm", head_dim, 1)
            vector(f"layers.{i}.k_norm", head_dim, 1)
        matrix(f"layers.{i}.o", hidden, config.num_heads * head_dim)
        vector(f"layers.{i}.mlp_norm", hidden, 1)
        matrix(f"layers.{i}.gate_up", 2 * config.intermediate_size, hidden)
        matrix(f"layers.{i}.down", hidden, config.intermediate_size)
    vector("final_norm", hidden, 1)
    if config.tie_embeddings:
        tensors["lm_head"] = tensors["embed"]
    else:
        matrix("lm_head", config.vocab_size, hidden)
    arena_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return Weights(tensors, "bfloat16" if bf16 else "float32", arena_bytes, "0" * 64)


def reference_logits(config: ModelConfig, weights: Weights, ids: np.ndarray) -> np.ndarray:
    """Logits (len(ids), vocab) float64 of one sequence from position 0, in one go over pages 0, 1, 2 ..."""
    f64, w, n = np.float64, weights.tensors, len(ids)
    pages = -(-n // PAGE_TOKENS)
    tokens = (np.arange(n), np.zeros(n, int), np.arange(pages)[None])
    cos, sin = rope_table(config.rope, config.head_dim, n)
    x = reference.embed(w["embed"], ids, f64)
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        pool = np.zeros((2, pages, config.num_kv_heads, PAGE_TOKENS, config.head_dim))
        h = reference.rmsnorm(x, w[layer + "attn_norm"], config.rms_eps, f64)
        q = reference.qkv_rope_append(
            reference.matmul(h, w[layer + "qkv"], f64), cos, sin, pool[0], pool[1], *tokens,
            bias=w.get(layer + "qkv_bias"), q_norm=w.get(layer + "q_norm"), k_norm=w.get(layer + "k_norm"),
            eps=config.rms_eps, dtype=f64,
        )  # fmt: skip
        attn = reference.paged_attention(
            q, pool[0], pool[1], *tokens, scale=config.head_dim**-0.5, window=config.sliding_window, dtype=f64
        )
        x = x + reference.matmul(attn.reshape(n, -1), w[layer + "o"], f64)
        h = reference.rmsnorm(x, w[layer + "mlp_norm"], config.rms_eps, f64)
        x = x + reference.matmul(
            reference.swiglu(reference.matmul(h, w[layer + "gate_up"], f64), f64), w[layer + "down"], f64
        )
    return reference.matmul(reference.rmsnorm(x, w["final_norm"], config.rms_eps, f64), w["lm_head"], f64)


class Feeder:
    """Lays out step batches for some sequences, each with its own scattered pages."""

    def __init__(self, prompts: list[np.ndarray], num_pages: int, seed: int = 0) -> None:
        self.prompts = prompts
        order = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
        width = max(-(-len(p) // PAGE_TOKENS) for p in prompts) + 1
        self.block_tables = np.full((len(prompts), width), -1, np.int32)
        for s, prompt in enumerate(prompts):
            count = -(-len(prompt) // PAGE_TOKENS)
            self.block_tables[s, :count], order = order[:count], order[count:]

    def batch(self, parts: list[tuple[int, int, int]], logits_rows: np.ndarray | None = None) -> StepBatch:
        """parts: (sequence, start, stop). By default the logits of every token."""
        ids = np.concatenate([self.prompts[s][a:b] for s, a, b in parts]).astype(np.int32)
        return StepBatch(
            token_ids=ids,
            positions=np.concatenate([np.arange(a, b) for _, a, b in parts]).astype(np.int32),
            seq_index=np.concatenate([np.full(b - a, s) for s, a, b in parts]).astype(np.int32),
            block_tables=self.block_tables,
            logits_rows=np.arange(len(ids), dtype=np.int32) if logits_rows is None else logits_rows,
        )


def prompt(length: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, length).astype(np.int32)

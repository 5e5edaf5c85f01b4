"""The canonical parameters of a model (names of engine.types.Weights) and where each checkpoint tensor goes.

Pure: from a ModelConfig to names and shapes. Hugging Face keeps q, k, v and gate, up apart; here they are row slices of
one matrix, so that a layer has four matrix products instead of seven.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import ModelConfig

ALIGNMENT = 64
"""Every parameter starts on a border of that many bytes (a cache line; one AVX-512 load)."""

EMBED_SOURCE = "model.embed_tokens.weight"
LM_HEAD_SOURCE = "lm_head.weight"

_IGNORABLE = re.compile(r"model\.(layers\.\d{1,4}\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class Param:
    """One canonical parameter. Matrices get the dtype of the arena; norms and biases are float32."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Target:
    """The place of one checkpoint tensor: rows `row` .. `row + shape[0]` of parameter `param`."""

    param: str
    row: int
    shape: tuple[int, ...]  # that the checkpoint tensor must have


def is_ignorable(name: str) -> bool:
    """Tensors of old checkpoints that the engine computes itself."""
    return _IGNORABLE.fullmatch(name) is not None


def parameters(config: ModelConfig) -> list[Param]:
    """All parameters in arena order (the order of use). A tied lm_head is not among them."""
    hidden, rows_q, rows_kv = config.hidden_size, *_head_rows(config)
    params = [Param("embed", (config.vocab_size, hidden))]
    for i in range(config.num_layers):
        params.append(Param(f"layers.{i}.attn_norm", (hidden,)))
        params.append(Param(f"layers.{i}.qkv", (rows_q + 2 * rows_kv, hidden)))
        if config.qkv_bias:
            params.append(Param(f"layers.{i}.qkv_bias", (rows_q + 2 * rows_kv,)))
        if config.qk_norm:
            params.append(Param(f"layers.{i}.q_norm", (config.head_dim,)))
            params.append(Param(f"layers.{i}.k_norm", (config.head_dim,)))
        params.append(Param(f"layers.{i}.o", (hidden, rows_q)))
        params.append(Param(f"layers.{i}.mlp_norm", (hidden,)))
        params.append(Param(f"layers.{i}.gate_up", (2 * config.intermediate_size, hidden)))
        params.append(Param(f"layers.{i}.down", (hidden, config.intermediate_size)))
    params.append(Param("final_norm", (hidden,)))
    if not config.tie_embeddings:
        params.append(Param("lm_head", (config.vocab_size, hidden)))
    return params


def targets(config: ModelConfig) -> dict[str, Target]:
    """Hugging Face tensor name -> place, in the order of the arena. Together they fill every parameter exactly."""
    hidden, inter, (rows_q, rows_kv) = config.hidden_size, config.intermediate_size, _head_rows(config)
    result = {EMBED_SOURCE: Target("embed", 0, (config.vocab_size, hidden))}
    for i in range(config.num_layers):
        old, new = f"model.layers.{i}.", f"layers.{i}."
        attn, mlp = old + "self_attn.", old + "mlp."
        result[old + "input_layernorm.weight"] = Target(new + "attn_norm", 0, (hidden,))
        qkv = (("q", 0, rows_q), ("k", rows_q, rows_kv), ("v", rows_q + rows_kv, rows_kv))
        for letter, row, rows in qkv:
            result[f"{attn}{letter}_proj.weight"] = Target(new + "qkv", row, (rows, hidden))
        if config.qkv_bias:
            for letter, row, rows in qkv:
                result[f"{attn}{letter}_proj.bias"] = Target(new + "qkv_bias", row, (rows,))
        if config.qk_norm:
            for letter in "qk":
                result[f"{attn}{letter}_norm.weight"] = Target(f"{new}{letter}_norm", 0, (config.head_dim,))
        result[attn + "o_proj.weight"] = Target(new + "o", 0, (hidden, rows_q))
        result[old + "post_attention_layernorm.weight"] = Target(new + "mlp_norm", 0, (hidden,))
        result[mlp + "gate_proj.weight"] = Target(new + "gate_up", 0, (inter, hidden))
        result[mlp + "up_proj.weight"] = Target(new + "gate_up", inter, (inter, hidden))
        result[mlp + "down_proj.weight"] = Target(new + "down", 0, (hidden, inter))
    result["model.norm.weight"] = Target("final_norm", 0, (hidden,))
    if not config.tie_embeddings:
        result[LM_HEAD_SOURCE] = Target("lm_head", 0, (config.vocab_size, hidden))
    return result


def _head_rows(config: ModelConfig) -> tuple[int, int]:
    return config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

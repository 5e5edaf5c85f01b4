"""Small checkpoints of every family, written by the safetensors library: inputs of the loader's tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"head_dim": 12, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 10}),
}


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    architecture, extra = FAMILIES[family]
    config = {
        "architectures": [architecture],
        "model_type": family.removesuffix("-tied"),
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 40,
        "vocab_size": 50,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    return config | extra | changes


def hub_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes as the Hub has them (from the index files of meta-llama/Llama-2-7b-hf,
    mistralai/Mistral-7B-v0.3, Qwen/Qwen2.5-7B and Qwen/Qwen3-8B)."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "mlp.down_proj.weight": (hidden, inter),
            "mlp.gate_proj.weight": (inter, hidden),
            "mlp.up_proj.weight": (inter, hidden),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
        }
        if config["model_type"] == "qwen2":
            layer |= {"self_attn.k_proj.bias": (kv,), "self_attn.q_proj.bias": (q,), "self_attn.v_proj.bias": (kv,)}
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.k_norm.weight": (dim,), "self_attn.q_norm.weight": (dim,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 values that bfloat16 and float16 hold exactly, so that every conversion is lossless."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.integers(-128, 128, shape) / 64).astype(np.float32) for name, shape in hub_shapes(config).items()
    }


def write_file(path: Path, tensors: dict[str, np.ndarray], dtype: str | dict[str, str] = "float32") -> None:
    """Write a file by the library. dtype: one for all, or one for each name; a numpy name, "bfloat16" or
    "float8_e4m3fn", which numpy lacks: these are written as bits and relabelled in the header."""
    parts, relabel = {}, {}
    for name, array in tensors.items():
        kind = dtype if isinstance(dtype, str) else dtype[name]
        if kind == "bfloat16":
            parts[name] = (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
            relabel[name] = "BF16"
        elif kind == "float8_e4m3fn":
            parts[name] = np.zeros(array.shape, np.uint8)
            relabel[name] = "F8_E4M3"
        else:
            parts[name] = np.ascontiguousarray(array.astype(kind))
    data = save(parts, {"format": "pt"})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, code in relabel.items():
        header[name]["dtype"] = code
    path.write_bytes(with_header(header, data[8 + length :]))


def with_header(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def write_model(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    dtype: str | dict[str, str] = "float32",
    shards: int = 1,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_file(folder / "model.safetensors", tensors, dtype)
        return
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        write_file(folder / name, part, dtype)
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, weight_map)


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

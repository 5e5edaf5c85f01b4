"""Turns a GGUF file of a Llama-architecture model into a Hugging Face style directory, without loss.

Weights become float32 safetensors with the names of Hugging Face's LlamaForCausalLM, config.json and
generation_config.json come from the metadata, the tokenizer from `appliance.hf_tokenizer`. Memory stays bounded: a few
megabytes at a time, whatever the model's size.

GGUF keeps the rows of Q and K of Llama models in the order that interleaved rotary embedding wants: row (head, pair j,
half s) holds Hugging Face's row (head, s, j). `rope_row_order` undoes that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from appliance.dequant import dequantize
from appliance.gguf import GgufError, GgufFile, GgufTensor
from appliance.hf_tokenizer import tokenizer_files
from appliance.safetensors_writer import TensorSource, write_safetensors

CONVERTER_VERSION = 1
"""Part of the manifest: a model converted by an older version is converted again by the next pull."""

CHUNK_WEIGHTS = 1024 * 1024  # weights dequantised at once; peak memory is a few times 4 bytes of each

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_KNOWN_KEYS = {
    "llama.": {
        "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base",
    },
    "tokenizer.": {
        "ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.merges", "ggml.bos_token_id",
        "ggml.eos_token_id", "ggml.unknown_token_id", "ggml.padding_token_id", "ggml.add_bos_token",
        "ggml.add_eos_token", "ggml.add_space_prefix", "chat_template",
    },
}  # fmt: skip
"""Metadata with a meaning for the model; general.* (names, licences, quantisation) has none."""


def convert_gguf(source: Path, target: Path, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors into the
    existing directory `target`; every file is fsynced. Returns {"parameters": int} and raises GgufError for anything
    that is unknown, missing, left over, of the wrong shape, or not finite."""
    with GgufFile(source) as gguf:
        config = llama_config(gguf.metadata, tied="output.weight" not in gguf.tensors)
        shapes = expected_shapes(config)
        _check_tensors(gguf.tensors, shapes)
        files = tokenizer_files(gguf.metadata, config)
        files["config.json"] = config
        files["generation_config.json"] = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
        }
        for name, value in files.items():
            _write_json(target / name, value)
        sources = [_tensor_source(gguf, gguf.tensors[name], hf_name(name), config) for name in shapes]
        total = sum(item.num_bytes for item in sources)
        for written in write_safetensors(target / "model.safetensors", sources, metadata={"format": "pt"}):
            if progress:
                progress(min(written, total), total)
    return {"parameters": total // 4}


def llama_config(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Hugging Face's config.json of a Llama model from GGUF metadata."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise GgufError(f"general.architecture is {architecture!r}; only 'llama' can be converted")
    _refuse_unknown(metadata)
    hidden, heads = _count(metadata, "llama.embedding_length"), _count(metadata, "llama.attention.head_count")
    kv_heads = _count(metadata, "llama.attention.head_count_kv", default=heads)
    head_dim = _count(metadata, "llama.attention.key_length", default=hidden // heads)
    rotated = _count(metadata, "llama.rope.dimension_count", default=head_dim)
    value_dim = _count(metadata, "llama.attention.value_length", default=head_dim)
    if heads % kv_heads or head_dim % 2 or not rotated == value_dim == head_dim:
        raise GgufError(
            f"unsupported attention: {heads} query and {kv_heads} key heads of {head_dim}, values of {value_dim}, "
            f"{rotated} dimensions rotated"
        )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _count(metadata, "llama.feed_forward_length"),
        "max_position_embeddings": _count(metadata, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": _count(metadata, "llama.block_count", most=1024),
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": _real(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_scaling": None,
        "rope_theta": _real(metadata, "llama.rope.freq_base", default=10000.0),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens) if isinstance(tokens, list) else 0
    config["vocab_size"] = _count(metadata, "llama.vocab_size", default=vocab_size)
    for key, gguf_key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = metadata.get(f"tokenizer.ggml.{gguf_key}_token_id")
        if value is not None:
            if type(value) is not int or not 0 <= value < config["vocab_size"]:
                raise GgufError(f"tokenizer.ggml.{gguf_key}_token_id is {value!r}, outside the vocabulary")
            config[f"{key}_token_id"] = value
    return dict(sorted(config.items()))


def _refuse_unknown(metadata: Mapping[str, Any]) -> None:
    """Rope scaling, sliding windows, experts, more stop tokens: what is not converted must not be lost silently."""
    for key in metadata:
        prefix = next((prefix for prefix in _KNOWN_KEYS if key.startswith(prefix)), None)
        if prefix is not None and key.removeprefix(prefix) not in _KNOWN_KEYS[prefix]:
            raise GgufError(f"the metadata key {key!r} is not supported by the conversion")


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """GGUF name -> shape (rows, columns) of every tensor of this model, in the order they are written."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "attn_norm": (hidden,), "attn_q": (query, hidden), "attn_k": (key, hidden), "attn_v": (key, hidden),
        "attn_output": (hidden, query), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"blk.{index}.{part}.weight": shape for part, shape in layer.items()}
    shapes["output_norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = (vocab, hidden)
    return shapes


def hf_name(name: str) -> str:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, index, part, suffix = name.split(".")
    return f"model.layers.{index}.{_LAYER_NAMES[part]}.{suffix}"


def rope_row_order(num_heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """order[i] is the GGUF row that holds row i of Hugging Face's Q or K, (num_heads * head_dim,)."""
    gguf_rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)  # (head, pair, half)
    return np.ascontiguousarray(gguf_rows.swapaxes(1, 2)).reshape(-1)  # (head, half, pair)


def _check_tensors(tensors: Mapping[str, GgufTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing, surplus = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing:
        raise GgufError(f"{len(missing)} tensors are missing, the first is {missing[0]!r}")
    if surplus:
        raise GgufError(f"{len(surplus)} tensors are unknown to the conversion, the first is {surplus[0]!r}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise GgufError(f"tensor {name!r} has shape {tensors[name].shape}, the metadata asks for {shape}")


def _tensor_source(gguf: GgufFile, tensor: GgufTensor, name: str, config: Mapping[str, Any]) -> TensorSource:
    order = None
    if tensor.name.endswith((".attn_q.weight", ".attn_k.weight")):
        order = rope_row_order(tensor.shape[0] // config["head_dim"], config["head_dim"])
    return TensorSource(name, "F32", tensor.shape, _chunks(gguf, tensor, order))


def _chunks(gguf: GgufFile, tensor: GgufTensor, order: npt.NDArray[np.int64] | None) -> Iterator[memoryview]:
    """The tensor as little-endian float32, a few rows at a time, in `order` if given."""
    num_rows = prod(tensor.shape[:-1])
    step = max(1, CHUNK_WEIGHTS // tensor.shape[-1])
    for begin in range(0, num_rows, step):
        rows = np.arange(begin, min(begin + step, num_rows))
        values = dequantize(gguf.rows(tensor, rows if order is None else order[rows]), tensor.type)
        if not np.isfinite(values).all():
            raise GgufError(f"tensor {tensor.name!r} holds NaN or infinity", hint="the file is damaged; get it again")
        yield values.astype("<f4", copy=False).reshape(-1).data.cast("B")


def _write_json(path: Path, value: Any) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _count(metadata: Mapping[str, Any], key: str, *, default: int | None = None, most: int = 2**31 - 1) -> int:
    value = metadata.get(key, default)
    if value is None:
        raise GgufError(f"the metadata key {key!r} is missing")
    if type(value) is not int or not 1 <= value <= most:
        raise GgufError(f"{key} is {value!r}; expected a whole number from 1 to {most}")
    return value


def _real(metadata: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """A float32 of the metadata as the shortest decimal that means it: 9.99999974e-06 is written 1e-05."""
    value = metadata.get(key, default)
    if value is None:
        raise GgufError(f"the metadata key {key!r} is missing")
    if not isinstance(value, float) or not 0 < value < 1e30:
        raise GgufError(f"{key} is {value!r}; expected a positive number")
    return float(str(np.float32(value)))

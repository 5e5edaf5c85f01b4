"""A tiny servable model, made from a seed in a fraction of a second: random weights, a byte-level tokenizer, ChatML.

Its answers are noise, but everything around them is real: it serves tests of the engine, the endpoint and the soak.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>")
VOCAB_SIZE = 256 + len(SPECIAL)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(shifted)) for b in range(256)]


def tokenizer_json() -> dict[str, Any]:
    vocab = {symbol: index for index, symbol in enumerate(byte_alphabet())}
    added = [
        {"id": 256 + i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for i, text in enumerate(SPECIAL)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "fuse_unk": False,
        "end_of_word_suffix": None, "byte_fallback": False, "vocab": vocab, "merges": [],
    }  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}  # fmt: skip


def make_tiny_model(
    directory: Path, *, seed: int = 0, max_position: int = 2048, poison_token: int | None = None, **overrides: Any
) -> Path:
    """Write a Llama-shaped model directory. `poison_token`: the embedding of that token is NaN (a request using it must
    fail alone). `overrides` go into config.json (hidden_size=..., num_hidden_layers=...)."""
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": max_position, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 259, "eos_token_id": 258,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32",
        **overrides,
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    hidden, inter, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (rng.standard_normal((rows, columns)) * 1.5 / columns**0.5).astype(np.float32)

    tensors = {"model.embed_tokens.weight": rng.standard_normal((config["vocab_size"], hidden)).astype(np.float32),
               "model.norm.weight": np.ones(hidden, np.float32),
               "lm_head.weight": matrix(config["vocab_size"], hidden)}  # fmt: skip
    for i in range(layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": matrix(inter, hidden),
            prefix + "mlp.up_proj.weight": matrix(inter, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inter),
        }
    if poison_token is not None:
        tensors["model.embed_tokens.weight"][poison_token] = np.nan
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256], "bos_token_id": 259}))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(), ensure_ascii=False))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE,
                    "model_max_length": max_position, "tokenizer_class": "PreTrainedTokenizerFast"})
    )  # fmt: skip
    return directory

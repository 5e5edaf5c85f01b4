"""Tiny random-weight checkpoints of every model family, written from a seed so that no weights are committed.

`make_tiny(name, directory)` writes config.json and model.safetensors in Hugging Face's layout. Every value comes from
PCG64's raw integers by exact arithmetic (no numpy distribution, whose streams may change between numpy versions), so
the files have the same bytes on every machine; their SHA-256 is in the golden .npz, for `Golden.check_weights`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 320
LONG = "llama31_long"
PROMPT_LENGTHS = (5, 131, 300)  # one inside a page, one just past a 128-token page, one over three pages


@dataclass(frozen=True)
class TinyModel:
    """`config` is config.json as written. `alternatives` are changes to it that an engine with a bug would in effect
    make (scaling ignored, window ignored ...); make_tiny.py records how far the logits move under each, which shows
    that the comparison would notice."""

    config: dict[str, Any]
    storage: str = "F32"  # dtype in the checkpoint: F32, F16 or BF16
    shards: int = 1
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS
    columns: int = 48  # vocabulary columns kept at every position
    full_every: int = 32  # every so many positions the whole row is kept
    alternatives: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        config = self.config
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _config(family: str, **changes: Any) -> dict[str, Any]:
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config: dict[str, Any] = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if family in ("llama", "qwen3"):
        config["attention_bias"] = False
    if family == "llama":
        config["mlp_bias"] = False
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_NO_SCALING: dict[str, Any] = {"rope_scaling": None}

TINY_MODELS: dict[str, TinyModel] = {
    # Llama-2: full multi-head attention, untied, float16 files.
    "llama2": TinyModel(
        _config("llama", num_key_value_heads=4, torch_dtype="float16"),
        storage="F16",
        alternatives={"theta": {"rope_theta": 500000.0}, "eps": {"rms_norm_eps": 1e-3}},
    ),
    # Llama-3.1: GQA, rope llama3, untied, bfloat16 files in two shards.
    "llama31": TinyModel(
        _config("llama", rope_theta=500000.0, rope_scaling=_LLAMA3, torch_dtype="bfloat16", eos_token_id=[2, 3, 4]),
        storage="BF16",
        shards=2,
        alternatives={
            "scaling ignored": _NO_SCALING,
            "linear instead": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        },
    ),
    # Llama-3.2: factor 32, tied, explicit head_dim.
    "llama32": TinyModel(
        _config(
            "llama",
            rope_theta=500000.0,
            rope_scaling={**_LLAMA3, "factor": 32.0},
            tie_word_embeddings=True,
            head_dim=16,
            torch_dtype="bfloat16",
        ),
        storage="BF16",
        alternatives={"scaling ignored": _NO_SCALING, "factor 8": {"rope_scaling": _LLAMA3}},
    ),
    # SmolLM2: head_dim 64, three query heads to one KV head, tied, theta 100,000.
    "smollm2_like": TinyModel(
        _config(
            "llama",
            hidden_size=192,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            rope_theta=100000.0,
            tie_word_embeddings=True,
        ),
        alternatives={"theta": {"rope_theta": 10000.0}},
    ),
    # Mistral-Nemo: heads x head_dim (128) is not hidden_size (64).
    "mistral_head_dim": TinyModel(
        _config("mistral", head_dim=32, sliding_window=None, rope_theta=1000000.0),
        alternatives={"window": {"sliding_window": 48}},
    ),
    # Mistral-7B v0.1: sliding window, here shorter than a page ...
    "mistral_window": TinyModel(
        _config("mistral", sliding_window=48, torch_dtype="bfloat16"),
        storage="BF16",
        alternatives={"window ignored": {"sliding_window": None}, "one less": {"sliding_window": 47}},
    ),
    # ... and one that crosses page borders.
    "mistral_window_pages": TinyModel(
        _config("mistral", sliding_window=150),
        alternatives={"window ignored": {"sliding_window": None}, "one less": {"sliding_window": 149}},
    ),
    # Qwen2 0.5B: QKV bias, tied. use_sliding_window is false, so sliding_window must be ignored, as in the real files.
    "qwen2_tied": TinyModel(
        _config(
            "qwen2",
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            use_sliding_window=False,
            sliding_window=32,
            max_window_layers=2,
        ),
        alternatives={"window applied": {"use_sliding_window": True, "max_window_layers": 0}},
    ),
    # Qwen2.5 7B: QKV bias, untied, bfloat16, a single KV head.
    "qwen2_untied": TinyModel(
        _config("qwen2", num_key_value_heads=1, rms_norm_eps=1e-6, rope_theta=1000000.0, torch_dtype="bfloat16"),
        storage="BF16",
        alternatives={"theta": {"rope_theta": 10000.0}},
    ),
    # Qwen3: RMSNorm over each head of q and k, explicit head_dim, no bias.
    "qwen3": TinyModel(
        _config("qwen3", head_dim=32, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_theta=1000000.0),
        alternatives={"theta": {"rope_theta": 10000.0}},
    ),
    # The same keys in the format of transformers 5: rope_parameters with rope_theta inside, dtype for torch_dtype.
    "qwen3_new_keys": TinyModel(
        _config(
            "qwen3",
            head_dim=32,
            rms_norm_eps=1e-6,
            rope_theta=...,
            torch_dtype=...,
            dtype="bfloat16",
            rope_parameters={"rope_theta": 50000.0, **_YARN},
        ),
        storage="BF16",
        alternatives={"scaling ignored": {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}},
    ),
    "rope_linear": TinyModel(
        _config("llama", rope_scaling={"type": "linear", "factor": 4.0}),  # "type": the older spelling
        alternatives={"scaling ignored": _NO_SCALING},
    ),
    # Prompts below, at, one past and far past max_position_embeddings; past it see make_tiny.py on "stepwise".
    "rope_dynamic": TinyModel(
        _config("llama", max_position_embeddings=96, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
        prompt_lengths=(40, 96, 97, 300),
        alternatives={"scaling ignored": _NO_SCALING},
    ),
    "rope_yarn": TinyModel(
        _config("llama", head_dim=32, rope_scaling=_YARN),
        alternatives={
            "scaling ignored": _NO_SCALING,
            "attention factor 1": {"rope_scaling": {**_YARN, "attention_factor": 1.0}},
            "truncate": {"rope_scaling": {**_YARN, "truncate": False}},
        },
    ),
    "rope_yarn_attention_factor": TinyModel(
        _config(
            "llama",
            head_dim=32,
            rope_scaling={**_YARN, "attention_factor": 0.8, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
        ),
        alternatives={
            "factor inferred": {"rope_scaling": {**_YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}},
            "default betas": {"rope_scaling": {**_YARN, "attention_factor": 0.8, "truncate": False}},
            "truncate": {"rope_scaling": {**_YARN, "attention_factor": 0.8, "beta_fast": 4.0, "beta_slow": 0.5}},
        },
    ),
    "rope_yarn_mscale": TinyModel(
        _config(
            "mistral", head_dim=32, sliding_window=None, rope_scaling={**_YARN, "mscale": 2.0, "mscale_all_dim": 0.5}
        ),
        alternatives={"mscale ignored": {"rope_scaling": _YARN}},
    ),
    # Qwen2.5's own long-context recipe, in its own spelling.
    "qwen2_yarn": TinyModel(
        _config(
            "qwen2",
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            tie_word_embeddings=True,
            rope_scaling={"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"},
            use_sliding_window=False,
            sliding_window=64,
            max_window_layers=3,
        ),
        alternatives={"scaling ignored": _NO_SCALING},
    ),
    # Llama-3.1's real rope numbers at positions in the thousands, where the float32 rounding of angles begins to show.
    LONG: TinyModel(
        _config(
            "llama",
            head_dim=64,
            num_hidden_layers=2,
            rope_theta=500000.0,
            rope_scaling={**_LLAMA3, "original_max_position_embeddings": 8192},
            max_position_embeddings=131072,
            tie_word_embeddings=True,
        ),
        prompt_lengths=(4200,),
        columns=8,
        full_every=512,
        alternatives={"scaling ignored": _NO_SCALING},
    ),
}


def make_tiny(name: str, directory: Path) -> str:
    """Write checkpoint `name` into `directory`, which is created; returns `weights_sha256(directory)`."""
    model = TINY_MODELS[name]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.config, indent=2) + "\n", encoding="utf-8")
    tensors = _tensors(name, model)
    if model.shards == 1:
        _save(tensors, directory / "model.safetensors")
    else:
        _save_sharded(tensors, directory, model.shards)
    return weights_sha256(directory)


def weights_sha256(directory: Path) -> str:
    """SHA-256 over config.json and every safetensors file, names included, in order of name."""
    digest = hashlib.sha256()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def prompt_ids(name: str, length: int) -> list[int]:
    """Random token ids, never one of the special ids 0..4; a longer prompt starts like a shorter one."""
    raw = np.random.PCG64(_seed(f"{name} prompt")).random_raw(length)
    return [int(value) for value in 5 + (raw >> np.uint64(32)) % np.uint64(VOCAB - 5)]


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _uniform(key: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> np.ndarray:
    """float32 uniform values of the given mean and standard deviation: 24 random bits, then two rounded operations."""
    raw = np.random.PCG64(_seed(key)).random_raw(int(np.prod(shape)))
    unit = ((raw >> np.uint64(40)).astype(np.int64) - 2**23).astype(np.float32) / np.float32(2**23)
    return (unit * np.float32(std * 3**0.5) + np.float32(mean)).reshape(shape)


def _tensors(name: str, model: TinyModel) -> dict[str, dict[str, Any]]:
    """Every parameter under its Hugging Face name. q and k are drawn larger so that attention is far from uniform."""
    config, head_dim = model.config, model.head_dim
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[tuple[int, ...], float, float]] = {
        "model.embed_tokens.weight": ((VOCAB, hidden), 0.05, 0.0),  # small, so that rms_norm_eps matters
        "model.norm.weight": ((hidden,), 0.3, 1.0),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = ((VOCAB, hidden), hidden**-0.5, 0.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = ((hidden,), 0.3, 1.0)
        for proj, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            std = hidden**-0.5 * (1.0 if proj == "v_proj" else 1.5)
            shapes[f"{prefix}self_attn.{proj}.weight"] = ((rows, hidden), std, 0.0)
            if config["model_type"] == "qwen2":
                shapes[f"{prefix}self_attn.{proj}.bias"] = ((rows,), 0.5, 0.0)
        if config["model_type"] == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = ((head_dim,), 0.4, 1.3)
            shapes[f"{prefix}self_attn.k_norm.weight"] = ((head_dim,), 0.4, 1.3)
        shapes[f"{prefix}self_attn.o_proj.weight"] = ((hidden, q_size), q_size**-0.5, 0.0)
        for proj in ("gate_proj", "up_proj"):
            shapes[f"{prefix}mlp.{proj}.weight"] = ((inner, hidden), hidden**-0.5, 0.0)
        shapes[f"{prefix}mlp.down_proj.weight"] = ((hidden, inner), inner**-0.5, 0.0)
    return {
        key: _encode(_uniform(f"{name} {key}", shape, std, mean), model.storage)
        for key, (shape, std, mean) in shapes.items()
    }


def _encode(values: np.ndarray, storage: str) -> dict[str, Any]:
    """dtype, shape and bytes of one tensor; BF16 by round to nearest even on the upper 16 bits."""
    if storage == "BF16":
        bits = values.view(np.uint32)
        data = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    else:
        data = values.astype({"F32": "<f4", "F16": "<f2"}[storage])
    return {"dtype": storage, "shape": list(values.shape), "data": data.tobytes()}


def _save(tensors: dict[str, dict[str, Any]], path: Path) -> None:
    """The safetensors format by hand (8-byte length, JSON header, data): its library's writer changed between releases,
    and these bytes must not."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, entry in tensors.items():
        end = offset + len(entry["data"])
        header[key] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(entry["data"] for entry in tensors.values()))


def _save_sharded(tensors: dict[str, dict[str, Any]], directory: Path, shards: int) -> None:
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in names[shard::shards]}
        weight_map.update(dict.fromkeys(part, file))
        _save(part, directory / file)
    total = sum(len(entry["data"]) for entry in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

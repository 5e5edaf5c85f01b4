"""ModelConfig: what the engine needs to know of a model, read from Hugging Face's config.json and checked.

A setting that changes the arithmetic and is not implemented is refused by key and value; nothing that matters is
skipped. Defaults of absent keys are those of the family's class in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config_rope import MAX_POSITION, RopeConfig, RopeKind, parse_rope
from engine.errors import ConfigError
from engine.jsonfile import Section, read_json_object, shown

__all__ = ["ModelConfig", "RopeConfig", "RopeKind"]

MAX_CONFIG_BYTES = 4 << 20

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # llama: as many as query heads
_DTYPES = {"float32", "float16", "bfloat16"}

# Keys that change the arithmetic, with the values under which they do not. Absent and null are always neutral.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": ({},),
    "compression_config": ({},),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "n_routed_experts": (0,),
    "moe_intermediate_size": (0,),
    "mlp_bias": (False,),
    "bias": (False,),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "dual_chunk_attention_config": ({},),
    "no_rope_layers": ([],),
    "position_embedding_type": ("rope",),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "text_config": ({},),
    "vision_config": ({},),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Immutable description of a decoder-only model of one of the supported families.

    `max_position` is the number of positions that may be served: max_position_embeddings, or
    factor * original_max_position where rope is scaled and that is more. `eos_token_ids` is the sorted union of
    config.json and generation_config.json; the tokenizer's EOS is not read here. `torch_dtype` is what the checkpoint
    claims ("auto" if nothing); the loader goes by the tensors.
    """

    family: str  # "llama" (SmolLM2 too), "mistral", "qwen2", "qwen3"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # a token at p sees p - window + 1 .. p
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = "auto"

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read config.json and, where there is one, generation_config.json of a model directory.

        Raises ConfigError naming file, key and value.
        """
        folder = Path(path)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} has no config.json", hint="Give the directory of a model in Hugging Face form."
            )
        config = read_json_object(folder / "config.json", max_bytes=MAX_CONFIG_BYTES, error=ConfigError)
        generation: dict[str, Any] = {}
        if (folder / "generation_config.json").exists():
            generation = read_json_object(
                folder / "generation_config.json", max_bytes=MAX_CONFIG_BYTES, error=ConfigError
            )
        return cls.from_json(config, generation)

    @classmethod
    def from_json(cls, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        """The same from parsed JSON objects."""
        keys = Section(config, "config.json")
        family = _family(keys)
        _refuse_unsupported(keys, family)
        vocab_size = keys.integer("vocab_size", 1, 1 << 22)
        hidden_size = keys.integer("hidden_size", 1, 1 << 17)
        num_layers = keys.integer("num_hidden_layers", 1, 1024)
        num_heads, num_kv_heads, head_dim = _heads(keys, family, hidden_size)
        declared = keys.integer("max_position_embeddings", 1, MAX_POSITION)
        rope = parse_rope(keys, declared)
        sources = [keys, Section(generation or {}, "generation_config.json")]
        return cls(
            family=family,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=keys.integer("intermediate_size", 1, 1 << 20),
            vocab_size=vocab_size,
            max_position=_max_position(declared, rope),
            rms_eps=keys.number("rms_norm_eps", 1e-12, 0.1, default=1e-6),
            rope=rope,
            tie_embeddings=keys.boolean("tie_word_embeddings", False),
            qkv_bias=family == "qwen2",  # always, though no key of config.json says so
            qk_norm=family == "qwen3",
            sliding_window=_sliding_window(keys, family, num_layers, declared),
            bos_token_id=next((ids[0] for s in sources if (ids := _token_ids(s, "bos_token_id", vocab_size))), None),
            eos_token_ids=tuple(sorted({i for s in sources for i in _token_ids(s, "eos_token_id", vocab_size)})),
            torch_dtype=_dtype(keys),
        )


def _family(keys: Section) -> str:
    supported = ", ".join(_ARCHITECTURES)
    names = keys.values.get("architectures")
    if names is None:
        model_type = keys.text("model_type", "")
        if model_type not in _ARCHITECTURES.values():
            keys.fail("model_type", f"one of {', '.join(_ARCHITECTURES.values())} (architectures is not set)")
        return model_type
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(_ARCHITECTURES):
        keys.fail("architectures", f"a list of one of {supported}")
    family = _ARCHITECTURES[names[0]]
    if keys.text("model_type", family) != family:
        keys.fail("model_type", f"{family!r} to agree with architectures {names[0]}")
    return family


def _refuse_unsupported(keys: Section, family: str) -> None:
    for key, neutral in _REFUSED.items():
        value = keys.values.get(key)
        if value is not None and not any(value == n and type(value) is type(n) for n in neutral):
            raise ConfigError(
                f"config.json: {key} = {shown(value)} is not supported",
                hint="Use a checkpoint with plain float16, bfloat16 or float32 weights."
                if key in ("quantization_config", "compression_config")
                else None,
            )
    if keys.text("hidden_act", "silu") not in ("silu", "swish"):
        keys.fail("hidden_act", "'silu'")
    # On q, k, v and o in Llama and Qwen3; Qwen2 has its fixed biases and its class ignores the key.
    if family != "qwen2" and keys.boolean("attention_bias", False):
        keys.fail("attention_bias", f"false (biases on all four attention projections of {family} are not supported)")
    code = keys.section("auto_map").values
    if "AutoModelForCausalLM" in code:
        raise ConfigError(
            f"config.json: auto_map asks for the checkpoint's own code ({shown(code['AutoModelForCausalLM'])}); "
            "model code is never run"
        )


def _heads(keys: Section, family: str, hidden_size: int) -> tuple[int, int, int]:
    """(query heads, KV heads, head_dim)."""
    num_heads = keys.integer("num_attention_heads", 1, 4096)
    if "num_key_value_heads" in keys.values or family == "llama":
        num_kv_heads = keys.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    else:
        num_kv_heads = _DEFAULT_KV_HEADS[family]
    if num_heads % num_kv_heads:
        keys.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if family == "qwen3" and "head_dim" not in keys.values:
        head_dim = 128
    elif keys.has("head_dim") or family == "qwen3":
        head_dim = keys.integer("head_dim", 2, 1024)
    else:
        if hidden_size % num_heads:
            keys.fail("hidden_size", f"a multiple of num_attention_heads ({num_heads}) where head_dim is not given")
        head_dim = hidden_size // num_heads
    if head_dim % 2 or not 2 <= head_dim <= 1024:
        raise ConfigError(f"config.json: head_dim is {head_dim}; it must be even, from 2 to 1024")
    return num_heads, num_kv_heads, head_dim


def _max_position(declared: int, rope: RopeConfig) -> int:
    # Not for llama3 (max_position_embeddings is the extended length by definition) nor for linear without the trained
    # length: some authors left max_position_embeddings at it (vicuna-16k), some did not (deepseek-coder).
    if rope.kind in ("linear", "dynamic", "yarn") and rope.original_max_position is not None:
        return min(max(declared, int(rope.factor * rope.original_max_position)), MAX_POSITION)
    return declared


def _sliding_window(keys: Section, family: str, num_layers: int, max_position: int) -> int | None:
    """The window that all layers share, or None; a mix of both kinds of layers is refused."""
    window: int | None = None
    if family == "mistral" and "sliding_window" not in keys.values:
        window = 4096
    elif keys.has("sliding_window"):
        window = keys.integer("sliding_window", 1, MAX_POSITION)
    types = _layer_types(keys, num_layers)
    if family == "llama":
        if types == "sliding_attention" or (window is not None and window < max_position):
            keys.fail("sliding_window", "null for the Llama family, which attends to everything")
        return None
    if family == "mistral":
        if types is not None and (types == "sliding_attention") != (window is not None):
            keys.fail("layer_types", f"consistent with sliding_window ({window})")
        return window
    if not keys.boolean("use_sliding_window", False) or window is None:
        if types == "sliding_attention":
            keys.fail("layer_types", "full_attention where use_sliding_window is not true")
        return None
    if types is not None:
        return window if types == "sliding_attention" else None
    first = keys.integer("max_window_layers", 0, 1 << 20, default=28)  # transformers: layers >= first have the window
    if first >= num_layers:
        return None
    if first > 0:
        keys.fail("max_window_layers", f"0 or at least {num_layers}: layers of both kinds in one model")
    return window


def _layer_types(keys: Section, num_layers: int) -> str | None:
    types = keys.values.get("layer_types")
    if types is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or types[0] not in known:
        keys.fail("layer_types", f"a list of {num_layers} times full_attention or sliding_attention")
    if any(kind != types[0] for kind in types):
        keys.fail("layer_types", "the same for all layers")
    return str(types[0])


def _token_ids(keys: Section, key: str, vocab_size: int) -> list[int]:
    value = keys.values.get(key)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            keys.fail(key, f"a token id below vocab_size ({vocab_size}) or a list of such")
    return ids


def _dtype(keys: Section) -> str:
    key = "dtype" if keys.has("dtype") else "torch_dtype"
    name = keys.text(key, "auto").removeprefix("torch.")
    if name != "auto" and name not in _DTYPES:
        keys.fail(key, f"one of {', '.join(sorted(_DTYPES))}")
    return name

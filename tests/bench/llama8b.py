"""A Llama-3-8B-shaped checkpoint of random bf16 weights, for benchmarks: `python -m tests.bench.llama8b DIR`.

16 GB in four shards, written in a few seconds: every tensor is a different window of one pool of random values, so that
no two matrices are the same and nothing is zero (zeros run faster than real data on a GPU). The tokenizer is
tests/tiny.py's, filled up with words that nothing merges to: every id the model draws is text, so that a stream has an
event for each of its tokens.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from appliance.safetensors_writer import TensorSource, write_safetensors
from tests.tiny import CHAT_TEMPLATE, VOCAB_SIZE, tokenizer_json

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "bos_token_id": 259, "eos_token_id": 258, "attention_bias": False,
    "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
POOL_VALUES = (1 << 26) + 12345  # 134 MB; larger than any L2 cache
CHUNK_VALUES = 1 << 22
SHARDS = 4

Bits = npt.NDArray[np.uint16]


def shapes() -> dict[str, tuple[int, ...]]:
    hidden, inter, vocab = 4096, 14336, 128256
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(32):
        layer = f"model.layers.{i}."
        result |= {
            layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (hidden, hidden), layer + "self_attn.k_proj.weight": (1024, hidden),
            layer + "self_attn.v_proj.weight": (1024, hidden), layer + "self_attn.o_proj.weight": (hidden, hidden),
            layer + "mlp.gate_proj.weight": (inter, hidden), layer + "mlp.up_proj.weight": (inter, hidden),
            layer + "mlp.down_proj.weight": (hidden, inter),
        }  # fmt: skip
    return result | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def full_tokenizer() -> dict[str, Any]:
    """tests/tiny.py's tokenizer, with a word for each further id of the vocabulary."""
    tokenizer = tokenizer_json()
    vocab = tokenizer["model"]["vocab"]
    for token_id in range(VOCAB_SIZE, 128256):
        vocab[f"\u0120w{token_id}"] = token_id  # U+0120 is byte-level BPE's space
    return tokenizer


def random_pool(seed: int) -> Bits:
    """Normal values of standard deviation 0.02, rounded down to bf16."""
    parts = np.array_split(np.empty(POOL_VALUES, np.uint16), os.cpu_count() or 1)

    def fill(index: int) -> Bits:
        values = np.random.default_rng((seed, index)).standard_normal(len(parts[index]), dtype=np.float32) * 0.02
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    with ThreadPoolExecutor() as pool:
        return np.concatenate(list(pool.map(fill, range(len(parts)))))


def chunks(pool: Bits, count: int, start: int) -> Iterator[memoryview]:
    while count:
        start %= POOL_VALUES
        take = min(count, CHUNK_VALUES, POOL_VALUES - start)
        yield memoryview(pool[start : start + take]).cast("B")
        start, count = start + take, count - take


def make_llama8b(directory: Path, *, seed: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    pool, ones = random_pool(seed), np.full(4096, 0x3F80, np.uint16)
    names = list(shapes().items())
    files: list[list[TensorSource]] = [[] for _ in range(SHARDS)]
    for i, (name, shape) in enumerate(names):
        count = int(np.prod(shape))
        source = [memoryview(ones).cast("B")] if len(shape) == 1 else chunks(pool, count, i * 7919 * 4801)
        files[i * SHARDS // len(names)].append(TensorSource(name, "BF16", shape, source))
    paths = [directory / f"model-{i + 1:05}-of-{SHARDS:05}.safetensors" for i in range(SHARDS)]
    with ThreadPoolExecutor(SHARDS) as threads:
        list(threads.map(lambda job: sum(0 for _ in write_safetensors(*job)), zip(paths, files, strict=True)))
    weight_map = {source.name: path.name for path, file in zip(paths, files, strict=True) for source in file}
    index = {"metadata": {"total_size": sum(s.num_bytes for file in files for s in file)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text(json.dumps(full_tokenizer()))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|bos|>", "chat_template": CHAT_TEMPLATE})
    )
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    make_llama8b(parser.parse_args().directory)

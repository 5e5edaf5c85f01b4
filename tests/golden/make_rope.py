"""Make rope_frequencies.json: float32 inverse frequencies and attention scaling of transformers.

    python tests/golden/make_rope.py

The settings are those of real models. At position p an angle is p * inv_freq, so one unit in the last place of inv_freq
is worth p times as much there: an engine that rounds otherwise than transformers leaves it by more than 1e-4 of the
logits after about 1,000 positions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path.insert(0, str(Path(__file__).parent))
from golden_file import HERE, script_sha256

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip

# name -> (head_dim, max_position_embeddings, rope_theta, rope_scaling, sequence length)
CASES: dict[str, tuple[int, int, float, dict[str, Any] | None, int]] = {
    "Llama-2-7B": (128, 4096, 10000.0, None, 1),
    "SmolLM2-135M": (64, 8192, 100000.0, None, 1),
    "Llama-3-8B": (128, 8192, 500000.0, None, 1),
    "Llama-3.1-8B": (128, 131072, 500000.0, {**_LLAMA3, "factor": 8.0}, 1),
    "Llama-3.2-1B": (64, 131072, 500000.0, {**_LLAMA3, "factor": 32.0}, 1),
    "Mistral-7B-v0.3": (128, 32768, 1000000.0, None, 1),
    "head_dim 80": (80, 4096, 10000.0, None, 1),
    "vicuna-13b-16k (linear)": (128, 4096, 10000.0, {"type": "linear", "factor": 4.0}, 1),
    "linear by 3": (128, 4096, 10000.0, {"rope_type": "linear", "factor": 3.0}, 1),
    "dynamic, short": (128, 4096, 10000.0, {"type": "dynamic", "factor": 2.0}, 100),
    "dynamic, at the limit": (128, 4096, 10000.0, {"type": "dynamic", "factor": 2.0}, 4096),
    "dynamic, past it": (128, 4096, 10000.0, {"type": "dynamic", "factor": 2.0}, 4097),
    "dynamic, far past it": (64, 2048, 10000.0, {"type": "dynamic", "factor": 8.0}, 16000),
    "Qwen2.5-7B (yarn)": (
        128, 32768, 1000000.0, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 1,
    ),
    "Yarn-Llama-2-7b-64k": (
        128, 65536, 10000.0, {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}, 1,
    ),
    "DeepSeek's yarn": (
        64, 163840, 10000.0, {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
                              "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707}, 1,
    ),
    "yarn, not truncated": (
        64, 131072, 150000.0, {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                               "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "attention_factor": 1.25}, 1,
    ),
}  # fmt: skip


def main() -> None:
    transformers.logging.set_verbosity_error()
    cases = []
    for name, (head_dim, max_position, theta, scaling, seq_len) in CASES.items():
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2 * head_dim,
                  "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 64,
                  "vocab_size": 64, "head_dim": head_dim, "max_position_embeddings": max_position,
                  "rms_norm_eps": 1e-5, "rope_theta": theta, "rope_scaling": scaling}  # fmt: skip
        rope = LlamaRotaryEmbedding(transformers.LlamaConfig(**json.loads(json.dumps(config))))
        rope(torch.zeros(1, 1), torch.tensor([[seq_len - 1]]))
        frequencies = [float(value).hex() for value in rope.inv_freq]
        case = {"name": name, "config": config, "seq_len": seq_len, "inv_freq": frequencies,
                "attention_scaling": float(rope.attention_scaling)}  # fmt: skip
        cases.append(case)
    value = {
        "made_by": "tests/golden/make_rope.py",
        "script_sha256": script_sha256(__file__),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "cases": cases,
    }
    (HERE / "rope_frequencies.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

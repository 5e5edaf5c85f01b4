"""Writes rope_golden.npz: cos and sin of transformers' LlamaRotaryEmbedding for every kind of rope scaling.

Run by hand where torch and transformers are installed: `python tests/engine/make_rope_golden.py`. Versions are inside.
Per case: cos and sin (positions, head_dim / 2) at POSITIONS, one position per call and ascending, as when decoding.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

POSITIONS = [0, 1, 2, 17, 127, 128, 1000, 2047, 2048, 2049, 4096, 8191, 30000, 100000]
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2048}
# name -> (head_dim, rope_parameters of transformers 5); max_position_embeddings is 2048 for all.
CASES = {
    "default": (64, {"rope_type": "default", "rope_theta": 100000.0}),
    "linear": (80, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "dynamic": (64, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
    "llama31": (128, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}),
    "llama32": (64, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}),
    "yarn": (128, YARN),
    "yarn_mscale": (64, {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}),
    "yarn_attention_factor": (64, {**YARN, "attention_factor": 1.25}),
    "yarn_no_truncate": (96, {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}),
}  # fmt: skip


def main() -> None:
    import torch
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    arrays: dict[str, np.ndarray] = {}
    for name, (head_dim, rope) in CASES.items():
        config = transformers.LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=2048,
            rope_parameters=rope,
        )
        module = LlamaRotaryEmbedding(config)
        rows = [module(torch.zeros(1, 1, head_dim), torch.tensor([[p]])) for p in POSITIONS]
        for index, part in enumerate(("cos", "sin")):
            table = np.concatenate([row[index][0].numpy() for row in rows])
            arrays[f"{name}.{part}"] = table[:, : head_dim // 2]  # the second half repeats the first
    arrays["meta"] = np.array(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}))
    np.savez_compressed(Path(__file__).with_name("rope_golden.npz"), **arrays)


if __name__ == "__main__":
    main()

"""What the arena on the device must hold after a load, by the host loader and numpy. For emulator and GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig
from engine.loader import load_weights
from engine.params import parameters
from kernels.layout import arena_slots, interleave_gate_up, tile
from tests.engine.checkpoint_files import random_tensors, tiny_config, write_model

CASES = {
    "llama-fp16": ("llama", {}, "float16"),
    "llama-tied-fp32": ("llama-tied", {}, "float32"),
    "qwen2-bf16": ("qwen2", {"num_hidden_layers": 1}, "bfloat16"),
    "qwen3-odd": ("qwen3", {"hidden_size": 70, "intermediate_size": 37, "vocab_size": 131}, "bfloat16"),
    "mistral-mixed": ("mistral", {"intermediate_size": 129}, "mixed"),
}  # family, changes of the config, dtype of the file


def write_case(folder: Path, name: str) -> ModelConfig:
    """A checkpoint of random values whose conversion to bf16 rounds, with one NaN and one infinity."""
    family, changes, dtype = CASES[name]
    raw = tiny_config(family, **changes)
    tensors = random_tensors(raw)
    rng = np.random.default_rng(7)
    for tensor in tensors.values():
        tensor[...] = rng.standard_normal(tensor.shape).astype(np.float16)  # exact in fp16 and fp32, rounded in bf16
    odd = tensors["model.layers.0.mlp.up_proj.weight"]
    odd[1, 3], odd[2, 5] = np.nan, np.inf
    dtypes: Any = dtype
    if dtype == "mixed":
        kinds = ("float16", "bfloat16", "float32")
        dtypes = {tensor: kinds[i % 3] for i, tensor in enumerate(tensors)}
    write_model(folder, raw, tensors, dtype=dtypes)
    return ModelConfig.from_dir(folder)


def expected_arena(folder: Path, config: ModelConfig) -> npt.NDArray[np.uint8]:
    """Every byte of the arena. Values from the host loader, which is tested against the safetensors library."""
    host = load_weights(folder, config, dtype="bfloat16").tensors
    slots, nbytes = arena_slots((param.name, param.shape) for param in parameters(config))
    arena = np.zeros(nbytes, np.uint8)
    for name, slot in slots.items():
        tensor = host[name]
        if name.endswith("gate_up"):
            half = len(tensor) // 2
            tensor = tile(interleave_gate_up(tensor[:half], tensor[half:]))
        elif tensor.ndim == 2:
            tensor = tile(tensor)
        raw = np.ascontiguousarray(tensor).view(np.uint8).reshape(-1)
        arena[slot.offset : slot.offset + raw.size] = raw
    return arena

"""Engines on the GPU for tests: the small random model, and SmolLM2 where it is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine.core_config import CoreConfig
from engine.engine import Engine
from tests.gpu.device import Gpu
from tests.tiny import make_tiny_model

POISON = 7
NO_POISON = {POISON: -100.0}
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 2}  # fmt: skip


def make_small_model(directory: Path) -> Path:
    """Four layers of eight heads of 64: big enough that every kernel has more than one block, loaded in a moment."""
    return make_tiny_model(directory, max_position=8192, poison_token=POISON, **SMALL)


@contextmanager
def gpu_engine(gpu: Gpu, directory: Path, **options: Any) -> Iterator[Engine]:
    """Its context is the session's primary one, so it must not leave the thread without a current context."""
    engine = Engine.load(
        CoreConfig(model_dir=str(directory), backend="cuda", gpu_memory_fraction=0.5, **options)  # type: ignore[arg-type]
    )
    try:
        yield engine
    finally:
        engine.close()
        gpu.context.bind_thread()


def text(length: int, seed: int, vocab: int = 250) -> list[int]:
    """Random token ids without the poisoned one and the special ones."""
    ids: list[int] = np.random.default_rng(seed).integers(10, vocab, length).tolist()
    return ids

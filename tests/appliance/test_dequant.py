"""Dequantisation against the gguf library's own, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from appliance.dequant import GGML_TYPES, GgmlType, dequantize

TYPES = list(GGML_TYPES.values())
QUANTIZABLE = [entry for entry in TYPES if entry.name in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Equal bits everywhere; NaN equals NaN whatever its payload."""
    both_nan = np.isnan(ours) & np.isnan(theirs)
    return bool(((ours.view(np.uint32) == theirs.view(np.uint32)) | both_nan).all())


def peer(kind: GgmlType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(kind.number)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_block_sizes_are_those_of_ggml(kind: GgmlType) -> None:
    assert peer(kind).name == kind.name
    assert gguf.GGML_QUANT_SIZES[peer(kind)] == (kind.block_weights, kind.block_bytes)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_random_bytes(kind: GgmlType) -> None:
    """Every bit pattern a file can hold, NaN and infinite scales too."""
    rng = np.random.default_rng(kind.number)
    raw = rng.integers(0, 256, size=(33, 24 * kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, peer(kind))
    actual = dequantize(raw, kind)
    assert actual.shape == expected.shape == (33, 24 * kind.block_weights)
    assert actual.dtype == np.float32
    assert same_bits(actual, expected)
    assert np.isfinite(actual).any()


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_random_bytes_with_plausible_scales(kind: GgmlType) -> None:
    """Finite scales as in real models, so that rounding of the arithmetic is compared on every weight."""
    rng = np.random.default_rng(100 + kind.number)
    blocks = rng.integers(0, 256, size=(512, kind.block_bytes), dtype=np.uint8).view(kind.layout).reshape(-1)
    fields = kind.layout.names or ()
    for name in ("d", "m"):
        if name in fields:
            blocks[name] = rng.standard_normal(512) * 0.01
    if kind.block_weights == 1:
        blocks = rng.standard_normal(512).astype(np.float32).astype(kind.layout["q"]).view(kind.layout)
        if kind.name == "BF16":
            blocks["q"] = (rng.standard_normal(512).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    raw = blocks.view(np.uint8).reshape(8, -1)
    actual = dequantize(raw, kind)
    assert np.isfinite(actual).all()
    assert len(np.unique(actual)) > 200
    assert np.array_equal(actual.view(np.uint32), gguf.dequantize(raw, peer(kind)).view(np.uint32))


@pytest.mark.parametrize("kind", QUANTIZABLE, ids=lambda kind: kind.name)
def test_quantized_by_the_library(kind: GgmlType) -> None:
    """Weights quantised by the gguf library come back near what they were, and exactly as the library says."""
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((17, 256), dtype=np.float32)
    raw = np.ascontiguousarray(gguf.quantize(weights, peer(kind))).view(np.uint8)
    actual = dequantize(raw, kind)
    assert np.array_equal(actual.view(np.uint32), gguf.dequantize(raw, peer(kind)).view(np.uint32))
    bits = {"F16": 11, "BF16": 8}.get(kind.name, int(kind.name[1]) if kind.name[0] == "Q" else 0)
    assert np.abs(actual - weights).max() <= np.abs(weights).max() * 2.0 ** (1 - bits)


def test_partial_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        dequantize(np.zeros((2, 19), dtype=np.uint8), GGML_TYPES[2])

"""Attention on the emulator: the bodies of tests/gpu/test_attention.py, small shapes, threads in several orders."""

from __future__ import annotations

import pytest

from kernels import attention
from kernels.attention import AttentionShape
from tests.kernels import cases_attention as cases
from tests.kernels.emulated_device import EmulatedDevice

LENGTHS = [1, 130, 2, 33, 128, 257, 64]


@pytest.fixture(
    params=[("hopper", 0), ("hopper", 3), ("portable", 1)],
    ids=["hopper-forward", "hopper-shuffled", "portable-reverse"],
)
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    return EmulatedDevice(*request.param)


# Hq, Hkv, D: every padded head_dim, dims that are padded, groups of 1, 3, 7, and more than the 16 rows of a tile.
SHAPES = [(6, 2, 64), (2, 2, 96), (4, 1, 128), (2, 1, 256), (1, 1, 16), (2, 1, 80), (7, 1, 60), (20, 1, 64)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_decode(device: EmulatedDevice, heads: int, kv_heads: int, dim: int) -> None:
    cases.check_decode(device, AttentionShape(heads, kv_heads, dim), LENGTHS)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_prefill_is_decode(device: EmulatedDevice, heads: int, kv_heads: int, dim: int) -> None:
    cases.check_prefill_is_decode(device, AttentionShape(heads, kv_heads, dim), 150, cuts=(1, 40, 128))


@pytest.mark.parametrize("window", [1, 5, 64, 128, 140, 4096])
def test_window(device: EmulatedDevice, window: int) -> None:
    shape = AttentionShape(2, 1, 64, window)
    cases.check_decode(device, shape, LENGTHS)
    cases.check_prefill_is_decode(device, shape, 300, cuts=(100,))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 31, 32, 127, 128, 129, 256, 400])
def test_prefill_is_decode_at_edges(length: int) -> None:
    cases.check_prefill_is_decode(EmulatedDevice("hopper", 2), AttentionShape(3, 1, 64), length)


def test_bits_do_not_depend_on_the_batch(device: EmulatedDevice) -> None:
    cases.check_bits_do_not_depend_on_the_batch(device, AttentionShape(6, 2, 64), LENGTHS)


@pytest.mark.parametrize("bad_entry", [-1, -(2**31), 10_000, 2**31 - 1])
def test_bad_block_table(device: EmulatedDevice, bad_entry: int) -> None:
    cases.check_bad_block_table(device, AttentionShape(4, 2, 64), [200, 5, 290], bad_entry)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "tokens"), [(32, 8, 128, 32), (9, 3, 64, 42), (64, 1, 128, 8), (8, 8, 128, 128)]
)
def test_tiles_cover_each_row_once(heads: int, kv_heads: int, dim: int, tokens: int) -> None:
    assert attention.tile_tokens(AttentionShape(heads, kv_heads, dim), "hopper") == tokens
    chunks = [(5, 300, 0), (400, 1, 77), (401, 512, 1024)]
    tiles = attention.prefill_tiles(chunks, tokens)
    rows = sorted(row for first, count in tiles for row in range(first, first + count))
    assert rows == sorted(row for first, count, _ in chunks for row in range(first, first + count))
    assert all(1 <= count <= tokens for _, count in tiles)
    assert tiles[0][0] >= 401  # the longest context first


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "message"),
    [(3, 2, 64, 0, "multiple"), (4, 2, 62, 0, "head_dim"), (4, 2, 64, -1, "window")],
)
def test_a_shape_no_kernel_takes(heads: int, kv_heads: int, dim: int, window: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionShape(heads, kv_heads, dim, window)

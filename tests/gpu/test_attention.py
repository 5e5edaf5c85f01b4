"""Attention on the GPU: the bodies of test_emulated_attention.py over the shapes and lengths that models have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from engine.cuda.memory import copy_to_device
from kernels import layout
from kernels.attention import AttentionShape
from tests.gpu.device import GpuDevice
from tests.kernels import cases_attention as cases

# Hq, Hkv, D: Llama-3-8B, SmolLM2, Phi-3, Gemma, odd dims, groups of 1, 7 and more than the 16 rows of a tile.
SHAPES = [
    (32, 8, 128), (9, 3, 64), (8, 8, 96), (8, 4, 256), (4, 2, 80),
    (4, 1, 16), (28, 4, 128), (24, 1, 64), (64, 4, 128), (2, 2, 160),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_decode(device: GpuDevice, heads: int, kv_heads: int, dim: int) -> None:
    rng = np.random.default_rng(heads)
    lengths = [1, 2, 127, 128, 129, 512, 9000, *rng.integers(1, 3000, 10).tolist()]
    cases.check_decode(device, AttentionShape(heads, kv_heads, dim), lengths, sample=12)


@pytest.mark.parametrize("batch", range(1, 68))
def test_decode_batches(device: GpuDevice, batch: int) -> None:
    lengths = np.random.default_rng(batch).integers(1, 700, batch).tolist()
    cases.check_decode(device, AttentionShape(32, 8, 128), lengths, seed=batch, sample=3)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_prefill_is_decode(device: GpuDevice, heads: int, kv_heads: int, dim: int) -> None:
    for length, cuts in ((1500, (128, 256, 1024)), (511, (1, 3)), (130, (64,))):
        cases.check_prefill_is_decode(device, AttentionShape(heads, kv_heads, dim), length, cuts=cuts, seed=length)


@pytest.mark.parametrize("length", [*range(1, 34), *range(120, 136), 255, 256, 257, 384, 385, 1000, 2000])
def test_prefill_is_decode_at_lengths(device: GpuDevice, length: int) -> None:
    cases.check_prefill_is_decode(device, AttentionShape(9, 3, 64), length, sample=2)
    cases.check_prefill_is_decode(device, AttentionShape(4, 1, 128), length, sample=2)


def test_prefill_of_a_long_prompt(device: GpuDevice) -> None:
    cases.check_prefill_is_decode(device, AttentionShape(4, 1, 128), 9000, cuts=(4096, 8192), sample=4)


@pytest.mark.parametrize("window", [1, 100, 128, 300, 4096])
def test_window(device: GpuDevice, window: int) -> None:
    for shape in (
        AttentionShape(8, 2, 128, window),
        AttentionShape(9, 3, 64, window),
        AttentionShape(4, 4, 96, window),
    ):
        cases.check_decode(device, shape, [1, 130, 500, 1200, 9000, 128, 301])
        cases.check_prefill_is_decode(device, shape, 1100, cuts=(128, 640))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64)])
def test_bits_do_not_depend_on_the_batch(device: GpuDevice, heads: int, kv_heads: int, dim: int) -> None:
    lengths = np.random.default_rng(3).integers(1, 2000, 40).tolist()
    for seed in range(3):
        cases.check_bits_do_not_depend_on_the_batch(device, AttentionShape(heads, kv_heads, dim), lengths, seed=seed)


@pytest.mark.parametrize("bad_entry", [-1, -(2**31), 10_000, 2**31 - 1])
def test_bad_block_table(device: GpuDevice, bad_entry: int) -> None:
    cases.check_bad_block_table(device, AttentionShape(32, 8, 128), [200, 5, 900], bad_entry)


@dataclass
class _Place:
    address: int


@pytest.fixture
def large_pools(device: GpuDevice) -> Iterator[list[int]]:
    """Addresses of two pools of 4.5 GiB."""
    pools = [device.context.cuda.mem_alloc(_LARGE) for _ in "kv"]
    yield [int(pool) for pool in pools]
    device.synchronize()
    for pool in pools:
        pool.free()


_LARGE = 4608 << 20


def test_pool_over_4_gib(device: GpuDevice, large_pools: list[int]) -> None:
    """Pages beyond 2^32 bytes and 2^31 elements of a layer's K and V."""
    shape = AttentionShape(32, 8, 128)
    world = cases.World(shape, [700, 1, 300, 128])
    page_bytes = 2 * layout.page_elements(8, 128)
    shift = _LARGE // page_bytes - world.num_pages - 1
    on_device = cases.OnDevice(device, world)
    slots, positions = np.arange(4), np.array(world.lengths) - 1
    q = cases.random_bits(np.random.default_rng(1), 4, shape.num_heads, shape.head_dim)
    chunks = [(row, 1, int(positions[row])) for row in range(4)]
    expected = on_device.decode(slots, positions, q)

    world.tables += shift
    world.num_pages += shift
    for pool, pages in zip(large_pools, (world.k_pool, world.v_pool)):
        bits = layout.swizzle_pages(pages, shape.padded_dim)
        copy_to_device(device.context, pool + shift * page_bytes, bits, device.context.compute)
        device.synchronize()
    on_device.k, on_device.v = (_Place(pool) for pool in large_pools)
    on_device.tables = device.put(world.tables)
    assert np.array_equal(on_device.decode(slots, positions, q), expected)
    assert np.array_equal(on_device.prefill(slots, positions, q, chunks), expected)
    assert device.take_errors() == []

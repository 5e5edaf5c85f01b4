"""Test bodies of attention (kernels/attention.py), for the emulator and the GPU alike.

Every test draws fresh random q, K and V in bf16 and fills with NaN what no row may see: unused pages, the dummy page
except its first token, and the tokens of a page past the last one written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import attention, layout, reference
from kernels.attention import AttentionShape
from kernels.launch import Launch
from kernels.layout import PAGE_TOKENS
from tests.kernels.cases_rows import BF16_ERROR, PAGE_RANGE, Buffer, Device, from_bf16, poisoned, to_bf16

Array = npt.NDArray[Any]
Bits = npt.NDArray[np.uint16]

# What float32 adds: sums of up to 256 products and of a page's p, ex2.approx (2 units), each relative to sum p |v|.
F32_ERROR = 2.0**-14


def random_bits(rng: np.random.Generator, *shape: int) -> Bits:
    return to_bf16(rng.standard_normal(shape).astype(np.float32))


@dataclass
class World:
    """Sequences of given lengths with their keys and values, in pages of a pool in random order."""

    shape: AttentionShape
    lengths: Sequence[int]
    seed: int = 0
    spare_pages: int = 3
    keys: list[Bits] = field(init=False)  # (length, Hkv, D) of each sequence
    values: list[Bits] = field(init=False)
    k_pool: Bits = field(init=False)  # (pages + 1, Hkv, 128, D)
    v_pool: Bits = field(init=False)
    tables: Array = field(init=False)  # (sequences + 1, width); the last row is the dummy slot

    def __post_init__(self) -> None:
        rng = np.random.default_rng((self.seed, len(self.lengths), sum(self.lengths)))
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        counts = [-(-length // PAGE_TOKENS) for length in self.lengths]
        self.num_pages = sum(counts) + self.spare_pages
        order = rng.permutation(self.num_pages)
        self.tables = np.full((len(counts) + 1, max(counts) + 1), self.num_pages, np.int32)
        self.k_pool = poisoned(self.num_pages + 1, heads, PAGE_TOKENS, dim)
        self.v_pool = self.k_pool.copy()
        self.keys, self.values = [], []
        for slot, length in enumerate(self.lengths):
            pages, order = order[: counts[slot]], order[counts[slot] :]
            self.tables[slot, : len(pages)] = pages
            for pool, kept in ((self.k_pool, self.keys), (self.v_pool, self.values)):
                content = random_bits(rng, length, heads, dim)
                kept.append(content)
                token = np.arange(length)
                pool[pages[token // PAGE_TOKENS], :, token % PAGE_TOKENS] = content
        for pool in (self.k_pool, self.v_pool):
            pool[self.num_pages, :, 0] = random_bits(rng, heads, dim)  # padding rows write there

    def repaged(self, seed: int) -> World:
        """The same sequences in other pages of a larger pool."""
        other = World(self.shape, self.lengths, self.seed, self.spare_pages)
        rng = np.random.default_rng((seed, 1))
        other.num_pages = self.num_pages + 4
        place = np.append(rng.permutation(other.num_pages)[: self.num_pages], other.num_pages)
        for name in ("k_pool", "v_pool"):
            old = getattr(self, name)
            new = poisoned(other.num_pages + 1, *old.shape[1:])
            new[place] = old
            setattr(other, name, new)
        other.tables = place[self.tables].astype(np.int32)
        return other

    def exact(self, slot: int, position: int, q: Bits) -> tuple[Array, Array]:
        """Output (Hq, D) in float64, and the bound of its error: P is rounded to bf16 once, the output once."""
        first = max(0, position - self.shape.window + 1) if self.shape.window else 0
        k, v = (from_bf16(kept[slot][first : position + 1]).astype(np.float64) for kept in (self.keys, self.values))
        results = []
        for values in (v, np.abs(v)):
            pages = np.zeros((-(-len(k) // PAGE_TOKENS), self.shape.num_kv_heads, PAGE_TOKENS, self.shape.head_dim))
            pages_v = pages.copy()
            token = np.arange(len(k))
            pages[token // PAGE_TOKENS, :, token % PAGE_TOKENS] = k
            pages_v[token // PAGE_TOKENS, :, token % PAGE_TOKENS] = values
            results.append(
                reference.paged_attention(
                    from_bf16(q)[None].astype(np.float64), pages, pages_v, np.array([len(k) - 1]), np.array([0]),
                    np.arange(len(pages))[None], scale=self.shape.head_dim**-0.5, dtype=np.float64,
                )[0]
            )  # fmt: skip
        exact, size = results
        return exact, BF16_ERROR * size + BF16_ERROR * (np.abs(exact) + BF16_ERROR * size) + F32_ERROR * size


@dataclass(frozen=True)
class DecodeLaunch:
    """A launch of decode attention and the buffers that it reads and writes; it must not outlive them."""

    launch: Launch
    out: Buffer  # (rows, ld_out), poisoned
    ld_out: int
    partial: Buffer  # poisoned
    counters: Buffer  # zero
    inputs: tuple[Buffer, ...]


@dataclass
class OnDevice:
    """A world in a device's memory."""

    device: Device
    world: World

    def __post_init__(self) -> None:
        dp = self.world.shape.padded_dim
        self.k, self.v = (
            self.device.put(layout.swizzle_pages(pool, dp)) for pool in (self.world.k_pool, self.world.v_pool)
        )
        self.tables = self.device.put(self.world.tables)

    def _rows(self, slots: Array, positions: Array, q: Bits) -> tuple[Buffer, Buffer, Buffer, Buffer, int]:
        shape = self.world.shape
        padded = np.zeros((len(slots), shape.num_heads, shape.padded_dim), np.uint16)
        padded[:, :, : shape.head_dim] = q
        ld_out = shape.num_heads * shape.head_dim + 6
        put = self.device.put
        arrays = (padded, np.asarray(slots, np.int32), np.asarray(positions, np.int32), poisoned(len(slots), ld_out))
        q_d, slots_d, positions_d, out_d = (put(array) for array in arrays)
        return q_d, slots_d, positions_d, out_d, ld_out

    def _result(self, out: Buffer, rows: int, ld_out: int) -> Bits:
        shape = self.world.shape
        used = shape.num_heads * shape.head_dim
        bits = out.read().reshape(rows, ld_out)
        assert (bits[:, used:] == poisoned(1)[0]).all(), "wrote beyond the heads"
        result: Bits = bits[:, :used].reshape(rows, shape.num_heads, shape.head_dim)
        return result

    def decode_launch(self, slots: Array, positions: Array, q: Bits, num_blocks: int | None = None) -> DecodeLaunch:
        shape = self.world.shape
        first = np.maximum(0, positions - shape.window + 1) if shape.window else np.zeros_like(positions)
        pages = positions // PAGE_TOKENS - first // PAGE_TOKENS + 1
        prefix = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        q_d, slots_d, positions_d, out_d, ld_out = self._rows(slots, positions, q)
        partial = self.device.put(np.full(attention.partial_bytes(shape, int(prefix[-1])), 0xFF, np.uint8))
        counters = self.device.put(np.zeros(attention.counter_elements(shape, len(slots)), np.uint32))
        prefix_d = self.device.put(prefix)
        launch = attention.decode(
            self.device.executor, shape, q_d.address, self.k.address, self.v.address, out_d.address, partial.address,
            counters.address, prefix_d.address, positions_d.address, slots_d.address, self.tables.address,
            num_rows=len(slots), table_width=self.world.tables.shape[1], num_pages=self.world.num_pages, ld_out=ld_out,
            layer=3, num_blocks=num_blocks,
        )  # fmt: skip
        return DecodeLaunch(launch, out_d, ld_out, partial, counters, (q_d, slots_d, positions_d, prefix_d))

    def decode(
        self, slots: Array, positions: Array, q: Bits, *, num_blocks: int | None = None, launches: int = 2
    ) -> Bits:
        """Bits of the output (rows, Hq, D); launched twice, since the first leaves the counters to the second."""
        made = self.decode_launch(slots, positions, q, num_blocks)
        results = []
        for _ in range(launches):
            self.device.run(made.launch)
            assert not made.counters.read().any(), "counters must be zero for the next launch"
            results.append(self._result(made.out, len(slots), made.ld_out))
        # What the first leaves in `partial` is right for the second, which could hide a page that was not waited for.
        for result in results[1:]:
            assert_same(result, results[0], "the second launch")
        return results[0]

    def prefill(
        self, slots: Array, positions: Array, q: Bits, chunks: Sequence[tuple[int, int, int]], tokens: int | None = None
    ) -> Bits:
        """`tokens`: of a tile, if fewer than the kernel takes."""
        shape = self.world.shape
        tiles = attention.prefill_tiles(chunks, tokens or attention.tile_tokens(shape, self.device.executor.path))
        q_d, slots_d, positions_d, out_d, ld_out = self._rows(slots, positions, q)
        tiles_d = self.device.put(np.array(tiles, np.int32))
        launch = attention.prefill(
            self.device.executor, shape, q_d.address, self.k.address, self.v.address, out_d.address, tiles_d.address,
            positions_d.address, slots_d.address, self.tables.address, num_tiles=len(tiles),
            table_width=self.world.tables.shape[1], num_pages=self.world.num_pages, ld_out=ld_out, layer=3,
        )  # fmt: skip
        self.device.run(launch)
        return self._result(out_d, len(slots), ld_out)


def assert_same(one: Bits, other: Bits, what: str) -> None:
    """Bit for bit; else says where and how far, which is what there is to go by when it happens once in a thousand."""
    rows, heads, columns = np.nonzero(one != other)
    if rows.size:
        first = [(int(r), int(h), int(c)) for r, h, c in zip(rows[:8], heads[:8], columns[:8], strict=True)]
        pairs = [(hex(one[place]), hex(other[place])) for place in first]
        raise AssertionError(
            f"{what}: {rows.size} elements differ, rows {np.unique(rows).tolist()[:20]}, heads "
            f"{np.unique(heads).tolist()}, columns {np.unique(columns).tolist()}; first {first}: {pairs}"
        )


def assert_near(world: World, slots: Array, positions: Array, q: Bits, out: Bits, rows: Sequence[int]) -> None:
    for row in rows:
        exact, bound = world.exact(int(slots[row]), int(positions[row]), q[row])
        error = np.abs(from_bf16(out[row]).astype(np.float64) - exact)
        worst = float((error / bound).max())  # NaN fails
        assert worst <= 1, f"row {row}, position {positions[row]}: {worst} times the bound"


def some_rows(rng: np.random.Generator, count: int, limit: int) -> list[int]:
    return sorted(rng.choice(count, min(count, limit), replace=False).tolist())


# ---- bodies ----------------------------------------------------------------------------------------------------------


def check_decode(
    device: Device, shape: AttentionShape, lengths: Sequence[int], *, seed: int = 0, sample: int = 64
) -> None:
    """Each sequence's last token, and padding rows of the dummy slot between them, against float64."""
    world = World(shape, lengths, seed)
    rng = np.random.default_rng((seed, 2))
    slots = np.repeat(np.arange(len(lengths)), 2)
    slots[1::2] = len(lengths)  # padding rows
    positions = np.where(slots < len(lengths), np.array([*lengths, 1])[slots] - 1, 0)
    q = random_bits(rng, len(slots), shape.num_heads, shape.head_dim)
    out = OnDevice(device, world).decode(slots, positions, q)
    assert device.take_errors() == []
    assert not np.isnan(from_bf16(out)).any()
    assert_near(world, slots, positions, q, out, [2 * i for i in some_rows(rng, len(lengths), sample)])


def check_prefill_is_decode(
    device: Device, shape: AttentionShape, length: int, *, cuts: Sequence[int] = (), seed: int = 0, sample: int = 8
) -> None:
    """One sequence: each token decoded, the whole prefilled, and prefilled in chunks cut at `cuts`: the same bits."""
    world = World(shape, [length, 7], seed)
    rng = np.random.default_rng((seed, 3))
    q = random_bits(rng, length, shape.num_heads, shape.head_dim)
    slots, positions = np.zeros(length, int), np.arange(length)
    on_device = OnDevice(device, world)
    decoded = on_device.decode(slots, positions, q, launches=1)
    whole = on_device.prefill(slots, positions, q, [(0, length, 0)])
    assert device.take_errors() == []
    assert_near(world, slots, positions, q, whole, some_rows(rng, length, sample))
    differ = np.flatnonzero((decoded != whole).any(axis=(1, 2)))
    assert differ.size == 0, f"prefill and decode differ at positions {differ[:10]} of {length}"
    if cuts:
        edges = [0, *cuts, length]
        chunks = [(a, b - a, a) for a, b in itertools.pairwise(edges)]
        assert np.array_equal(on_device.prefill(slots, positions, q, chunks), whole)
        assert np.array_equal(on_device.prefill(slots, positions, q, chunks, tokens=1 + 2 * (seed % 2)), whole)


def check_bits_do_not_depend_on_the_batch(
    device: Device, shape: AttentionShape, lengths: Sequence[int], *, seed: int = 0
) -> None:
    """A row alone, among others in any order, with other grids, and with its keys in other pages."""
    world = World(shape, lengths, seed)
    rng = np.random.default_rng((seed, 4))
    slots, positions = np.arange(len(lengths)), np.array(lengths) - 1
    q = random_bits(rng, len(slots), shape.num_heads, shape.head_dim)
    on_device = OnDevice(device, world)
    together = on_device.decode(slots, positions, q)
    order = rng.permutation(len(slots))
    assert_same(on_device.decode(slots[order], positions[order], q[order]), together[order], "another order")
    for num_blocks in (1, 3, 50):
        assert_same(on_device.decode(slots, positions, q, num_blocks=num_blocks), together, f"{num_blocks} blocks")
    for row in some_rows(rng, len(slots), 3):
        assert_same(on_device.decode(slots[[row]], positions[[row]], q[[row]]), together[[row]], f"row {row} alone")
    other = OnDevice(device, world.repaged(seed))
    assert_same(other.decode(slots, positions, q), together, "other pages")


def check_bad_block_table(device: Device, shape: AttentionShape, lengths: Sequence[int], bad_entry: int) -> None:
    """A slot with an entry outside the pool is reported, by decode and prefill; the others keep their bits."""
    world = World(shape, lengths)
    rng = np.random.default_rng(5)
    slots, positions = np.arange(len(lengths)), np.array(lengths) - 1
    q = random_bits(rng, len(slots), shape.num_heads, shape.head_dim)
    good = OnDevice(device, world).decode(slots, positions, q)
    bad = len(lengths) - 1
    world.tables[bad, positions[bad] // PAGE_TOKENS] = bad_entry
    broken = OnDevice(device, world)
    chunks = [(row, 1, int(positions[row])) for row in range(len(lengths))]
    for run in (
        lambda: broken.decode(slots, positions, q, launches=1),
        lambda: broken.prefill(slots, positions, q, chunks),
    ):
        out = run()
        errors = device.take_errors()
        assert errors and all(
            (e["code"], e["slot"], e["position"], e["layer"], e["value"])
            == (PAGE_RANGE, bad, positions[bad], 3, bad_entry)
            for e in errors
        )
        assert np.array_equal(out[:bad], good[:bad])

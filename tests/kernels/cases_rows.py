"""Test bodies of the row kernels (kernels/rows.py), for the emulator and the GPU alike.

Each body makes fresh random inputs, poisons the outputs, runs one launch and compares with two oracles: numpy float32
that restates the kernel's arithmetic bit for bit, and kernels/reference.py in float64 with a stated bound.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kernels import layout, reference, rows
from kernels.launch import Launch
from kernels.layout import PAGE_TOKENS

Array = npt.NDArray[Any]

POISON = 0x7FC1  # a NaN as bf16 bits; no kernel writes it
BF16_ERROR = 2.0**-8  # largest relative error of rounding to bf16 (8 significant bits)
F32_SLACK = 2.0**-18  # far above what float32 arithmetic adds (about 20 roundings), far below BF16_ERROR
PAGE_RANGE, POSITION_RANGE, TOKEN_RANGE, NONFINITE = 1, 2, 3, 4  # common.cuh:ErrorCode


class Buffer(Protocol):
    address: int

    def read(self) -> Array: ...


class Device(Protocol):
    """An emulated or a real GPU with some memory."""

    def put(self, array: Array) -> Buffer:
        """A copy of the array in the device's memory, 16-byte aligned."""
        ...

    def run(self, launch: Launch) -> None: ...

    def take_errors(self) -> list[dict[str, int]]:
        """The reports since the last call, as common.cuh:ErrorEntry; slot_errors are cleared."""
        ...


# ---- oracles ---------------------------------------------------------------------------------------------------------


def to_bf16(x: Array) -> npt.NDArray[np.uint16]:
    """float32 to bf16 bits, nearest even. IEEE 754; not for NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def tree_sum(values: Array) -> npt.NDArray[np.float32]:
    """float32 sums over the last axis in the canonical order: pairs k, k^1, then k^2 ... of the next power of two."""
    size = 1 << (values.shape[-1] - 1).bit_length()
    level = np.zeros((*values.shape[:-1], size), np.float32)
    level[..., : values.shape[-1]] = values
    while level.shape[-1] > 1:
        level = level[..., 0::2] + level[..., 1::2]
    return level[..., 0]


def normed_bits(x: Array, weight: Array, eps: float) -> npt.NDArray[np.float32]:
    """RMSNorm of the last axis in float32, as the kernels round it."""
    mean = tree_sum(x * x) / np.float32(x.shape[-1])
    inv = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return (x * inv[..., None]) * weight


def roped_bits(x: Array, cos: Array, sin: Array) -> npt.NDArray[np.float32]:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def to_midpoints(rng: np.random.Generator, factors: Array) -> npt.NDArray[np.float32]:
    """Numbers whose float32 products with `factors` lie within an ulp of the middle between two bf16 numbers: if a
    kernel's float32 result is off by the last bit, its bf16 rounding then differs every other time."""
    middles = (rng.integers(0x3F00, 0x4100, factors.shape, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    return np.where(np.abs(factors) > 1e-20, middles / np.where(factors == 0, 1, factors), 1).astype(np.float32)


def assert_near(bits: Array, exact: Array, scale: Array | None = None) -> None:
    """bf16 results against float64: one rounding to bf16, and float32 slack on the size of the terms (`scale`)."""
    terms = np.abs(exact) if scale is None else scale
    bound = BF16_ERROR * np.abs(exact) + F32_SLACK * terms + 1e-37
    error = np.abs(from_bf16(bits).astype(np.float64) - exact)
    assert np.all(error <= bound), f"{(error / bound).max()} times the bound"


def some_floats(rng: np.random.Generator, *shape: int, spread: float = 2.0) -> npt.NDArray[np.float32]:
    """Normal, over several orders of magnitude."""
    return (rng.standard_normal(shape) * np.exp(rng.uniform(-spread, spread, shape))).astype(np.float32)


def poisoned(*shape: int) -> npt.NDArray[np.uint16]:
    return np.full(shape, POISON, np.uint16)


# ---- rmsnorm, embed --------------------------------------------------------------------------------------------------


def check_rmsnorm(
    device: Device, num_rows: int, hidden: int, *, gather: bool = False, threads: int | None = None, seed: int = 0
) -> None:
    rng = np.random.default_rng((seed, num_rows, hidden))
    x, eps = some_floats(rng, num_rows + 3, hidden), 1e-5
    ld_out = layout.padded_columns(hidden) + 64
    rows_of_x = (
        rng.integers(0, num_rows + 3, num_rows).astype(np.int32) if gather else np.arange(num_rows, dtype=np.int32)
    )
    weight = to_midpoints(rng, normed_bits(x[rows_of_x[0]], np.ones(hidden, np.float32), eps))
    x_d, weight_d, out_d, rows_d = (device.put(a) for a in (x, weight, poisoned(num_rows, ld_out), rows_of_x))
    launch = rows.rmsnorm(
        x_d.address, weight_d.address, out_d.address, num_rows=num_rows, hidden=hidden, ld_out=ld_out, eps=eps,
        rows=rows_d.address if gather else 0,
    )  # fmt: skip
    if threads is not None:
        launch = dataclasses.replace(launch, block=(threads, 1, 1))
    device.run(launch)
    out, wanted = out_d.read(), x[rows_of_x]
    assert np.array_equal(out[:, :hidden], to_bf16(normed_bits(wanted, weight, eps)))
    assert_near(out[:, :hidden], reference.rmsnorm(wanted, weight, eps, np.float64))
    written = layout.round_up(hidden, 8)
    assert np.all(out[:, hidden:written] == 0)
    assert np.all(out[:, written:] == POISON)


def check_rmsnorm_keeps_nan_in_its_row(device: Device) -> None:
    """A NaN must not reach the padding, where the next user of the buffer expects zeros, nor other rows."""
    hidden = 60
    x, weight = np.ones((3, hidden), np.float32), np.ones(hidden, np.float32)
    x[1, 7] = np.nan
    x_d, weight_d, out_d = device.put(x), device.put(weight), device.put(poisoned(3, 64))
    device.run(
        rows.rmsnorm(x_d.address, weight_d.address, out_d.address, num_rows=3, hidden=hidden, ld_out=64, eps=0.0)
    )
    out = from_bf16(out_d.read())
    assert np.all(np.isnan(out[1, :hidden])) and np.all(out[[0, 2], :hidden] == 1) and np.all(out[:, hidden:] == 0)


def check_embed(device: Device, num_rows: int, hidden: int, vocab: int, *, seed: int = 0) -> None:
    """With one token below and one above the table, if there are that many rows."""
    rng = np.random.default_rng((seed, num_rows, hidden))
    table = (
        rng.integers(0, 0x7F80, (vocab, hidden)).astype(np.uint16)
        | rng.integers(0, 2, (vocab, hidden)).astype(np.uint16) << 15
    )
    ids = rng.integers(0, vocab, num_rows).astype(np.int32)
    bad = {1: vocab, num_rows - 1: -1} if num_rows > 2 else {}
    for row, token in bad.items():
        ids[row] = token
    slots, positions = np.arange(num_rows, dtype=np.int32), np.arange(100, 100 + num_rows, dtype=np.int32)
    ids_d, slots_d, positions_d = device.put(ids), device.put(slots), device.put(positions)
    table_d, x_d = device.put(layout.tile(table)), device.put(np.full((num_rows, hidden), np.nan, np.float32))
    device.run(
        rows.embed(
            ids_d.address, slots_d.address, positions_d.address, table_d.address, x_d.address, num_rows=num_rows,
            hidden=hidden, vocab_size=vocab,
        )
    )  # fmt: skip
    wanted = reference.embed(table, np.where((ids < 0) | (ids >= vocab), 0, ids))
    wanted[list(bad)] = 0
    assert np.array_equal(x_d.read().view(np.uint32), wanted.view(np.uint32))
    errors = {(e["slot"], e["code"], e["position"], e["value"]) for e in device.take_errors()}
    assert errors == {(row, TOKEN_RANGE, 100 + row, token) for row, token in bad.items()}


# ---- qkv_post --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class QkvCase:
    """One call of qkv_post on random data: `num_rows` tokens of different sequences at random positions."""

    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    norm: bool = False
    warps: int = 4
    many: bool | None = None
    seed: int = 0

    sharp: bool = False  # inputs that show a wrong last bit of float32 in the bf16 results

    num_pages = 6
    max_position = 1000  # of the tables; no position of a case is beyond 895
    eps = 1e-6

    def __post_init__(self) -> None:
        self.rng = rng = np.random.default_rng((self.seed, self.num_rows, self.head_dim))
        heads = self.num_heads + 2 * self.num_kv_heads
        self.padded = layout.padded_head_dim(self.head_dim)
        self.qkv = some_floats(rng, self.num_rows, heads * self.head_dim)
        self.bias_row = some_floats(rng, heads * self.head_dim) if self.bias else None
        angles = rng.uniform(-4, 4, (self.max_position, self.head_dim // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.norms = self._make_norms() if self.norm else None
        # One slot a row, a table of 8 entries; the place in the pool of every row is its own.
        self.table_width = 8
        self.slots = rng.permutation(self.num_rows).astype(np.int32)
        places = rng.permutation(self.num_pages * PAGE_TOKENS)[: self.num_rows]
        blocks = rng.integers(0, 7, self.num_rows)
        self.positions = (blocks * PAGE_TOKENS + places % PAGE_TOKENS).astype(np.int32)
        self.tables = np.full((self.num_rows + 1, self.table_width), self.num_pages, np.int32)
        self.tables[self.slots, self.positions // PAGE_TOKENS] = places // PAGE_TOKENS
        if self.sharp and not self.norm:
            self._sharpen_rope()

    def _heads(self) -> Array:
        """(T, heads, D) after the bias."""
        x = self.qkv if self.bias_row is None else self.qkv + self.bias_row
        return x.reshape(self.num_rows, -1, self.head_dim)

    def _make_norms(self) -> list[Array]:
        """q_norm and k_norm. A sharp case has no rotation, and middles for the first q and k head of row 0."""
        if not self.sharp:
            return [some_floats(self.rng, self.head_dim, spread=0.5) for _ in "qk"]
        self.cos[:], self.sin[:] = 1, 0
        ones = np.ones(self.head_dim, np.float32)
        return [to_midpoints(self.rng, normed_bits(self._heads()[0, h], ones, self.eps)) for h in (0, self.num_heads)]

    def _sharpen_rope(self) -> None:
        """First halves of q and k such that first cos - second sin is in the middle of two bf16 numbers."""
        x = self.qkv.reshape(self.num_rows, -1, self.head_dim)
        half, position = self.head_dim // 2, self.positions
        cos, sin = (table[position][:, None].astype(np.float64) for table in (self.cos, self.sin))
        middles = (self.rng.integers(0x3F00, 0x4100, x[..., :half].shape, dtype=np.uint32) << 16 | 0x8000).view(
            np.float32
        )
        x[..., :half] = (middles + x[..., half:] * sin) / np.where(np.abs(cos) < 0.01, 1, cos)

    def run(self, device: Device) -> None:
        """Fills q (T, Hq, Dp), k and v (num_pages + 1, Hkv, 128, Dp), all bf16 bits."""
        page_shape = (self.num_pages + 1, self.num_kv_heads, PAGE_TOKENS, self.padded)
        q, k, v = (
            device.put(poisoned(*shape))
            for shape in ((self.num_rows, self.num_heads, self.padded), page_shape, page_shape)
        )
        held = [device.put(a) for a in (self.qkv, self.cos, self.sin, self.positions, self.slots, self.tables)]
        optional = {}
        if self.bias_row is not None:
            optional["bias"] = device.put(self.bias_row)
        if self.norms is not None:
            optional["q_norm"], optional["k_norm"] = (device.put(w) for w in self.norms)
        device.run(
            rows.qkv_post(
                *(buffer.address for buffer in held), q.address, k.address, v.address, num_rows=self.num_rows,
                num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
                table_width=self.table_width, num_pages=self.num_pages, max_slots=self.num_rows,
                max_position=self.max_position, layer=7, eps=self.eps, warps=self.warps, many=self.many,
                **{name: buffer.address for name, buffer in optional.items()},
            )
        )  # fmt: skip
        self.q, self.k, self.v = (
            q.read(),
            *(
                layout.unswizzle_pages(
                    pages.read().reshape(-1), self.num_pages + 1, self.num_kv_heads, self.padded, self.padded
                )
                for pages in (k, v)
            ),
        )

    def bits(self) -> tuple[Array, Array, Array]:
        """q, k, v rows (T, heads, D) as the kernel must round them."""
        q, k, v = np.split(self._heads(), [self.num_heads, self.num_heads + self.num_kv_heads], axis=1)
        if self.norms is not None:
            q, k = (normed_bits(part, weight, self.eps) for part, weight in zip((q, k), self.norms))
        cos, sin = self.cos[self.positions], self.sin[self.positions]
        return to_bf16(roped_bits(q, cos, sin)), to_bf16(roped_bits(k, cos, sin)), to_bf16(v)

    def place(self, first: int = 0) -> tuple[Array, slice, Array]:
        """Index into pages (P, Hkv, 128, Dp) that gives the rows of tokens first, first + 1 ..."""
        slots, positions = self.slots[first:], self.positions[first:]
        return self.tables[slots, positions // PAGE_TOKENS], slice(None), positions % PAGE_TOKENS

    def check_reference(self) -> None:
        """Against float64."""
        k_pages, v_pages = (np.zeros((self.num_pages, self.num_kv_heads, PAGE_TOKENS, self.head_dim)) for _ in "kv")
        norms = dict(zip(("q_norm", "k_norm"), self.norms or ()))
        q = reference.qkv_rope_append(
            self.qkv, self.cos, self.sin, k_pages, v_pages, self.positions, self.slots, self.tables,
            bias=self.bias_row, eps=self.eps, dtype=np.float64, **norms,
        )  # fmt: skip
        for got, exact in (
            (self.q, q),
            (self.k[self.place()], k_pages[self.place()]),
            (self.v[self.place()], v_pages[self.place()]),
        ):
            partner = np.abs(np.roll(exact, self.head_dim // 2, axis=-1))  # rope mixes both halves of a pair
            assert_near(got[..., : self.head_dim], exact, np.abs(exact) + partner)


def check_qkv_post(device: Device, case: QkvCase) -> None:
    case.run(device)
    assert device.take_errors() == []
    for got, wanted in zip((case.q, case.k[case.place()], case.v[case.place()]), case.bits()):
        assert np.array_equal(got[..., : case.head_dim], wanted)
        assert np.all(got[..., case.head_dim :] == 0)
    case.check_reference()
    for pages in (case.k, case.v):  # nothing else was written
        pages[case.place()] = POISON
        assert np.all(pages == POISON)


def check_qkv_post_reports(device: Device, max_position: int, head_dim: int, *, many: bool = False) -> None:
    """Bad positions and pages write nothing; NaN and Inf are written, and reported with their head and element."""
    case = QkvCase(num_rows=8, num_heads=2, num_kv_heads=1, head_dim=head_dim, many=many)
    n_pages, case.max_position = case.num_pages, max_position
    first_bad = min(max_position, case.table_width * PAGE_TOKENS)
    case.tables[case.slots[0]] = n_pages  # the dummy page is not for this slot
    case.tables[case.slots[1]] = -1
    case.tables[case.slots[2]] = n_pages + 1
    case.positions[3], case.positions[4] = -1, first_bad
    half = head_dim // 2
    case.qkv[5, head_dim + half + 5 : 2 * head_dim] = np.nan  # head 1; rope spreads them to the first half
    case.qkv[6, -2:] = np.inf  # v of KV head 0: head 3
    case.run(device)
    wanted = {(int(case.slots[row]), PAGE_RANGE, -1, page) for row, page in enumerate((n_pages, -1, n_pages + 1))}
    wanted |= {(int(case.slots[row]), POSITION_RANGE, -1, value) for row, value in ((3, -1), (4, first_bad))}
    wanted |= {(int(case.slots[5]), NONFINITE, 1, head_dim + 5), (int(case.slots[6]), NONFINITE, 3, 4 * head_dim - 2)}
    errors = device.take_errors()
    assert len(errors) == len(wanted)
    assert {(e["slot"], e["code"], e["head"], e["value"]) for e in errors} == wanted
    assert {(e["op"], e["layer"]) for e in errors} == {(4, 7)}
    position_of = {int(slot): int(position) for slot, position in zip(case.slots, case.positions)}
    assert all(e["position"] == position_of[e["slot"]] for e in errors)
    assert np.all(case.q[:5] == POISON)
    assert np.isnan(from_bf16(case.q[5, 1])[[*range(5, half), *range(half + 5, head_dim)]]).all()
    assert np.isinf(from_bf16(case.v[case.place(5)])[1, 0, head_dim - 2 : head_dim]).all()
    for padding in (case.q[5:], case.k[case.place(5)], case.v[case.place(5)]):
        assert not np.any(padding[..., head_dim:])
    assert not np.any(case.k[case.place(5)] == POISON)
    case.k[case.place(5)] = POISON
    assert np.all(case.k == POISON)


def check_qkv_post_padding_row(device: Device) -> None:
    """A padding row (slot max_slots) writes its key to the dummy page and reports nothing."""
    case = QkvCase(num_rows=3, num_heads=2, num_kv_heads=1, head_dim=64)
    case.slots[1], case.positions[1] = 3, 0
    case.run(device)
    assert device.take_errors() == []
    assert np.array_equal(case.k[case.num_pages, 0, 0], case.bits()[1][1, 0])

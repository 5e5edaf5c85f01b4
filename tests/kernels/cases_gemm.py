"""Test bodies of the matrix products (kernels/gemm.py), for the emulator and the GPU alike.

`Problem` makes fresh random inputs and the float64 result with a bound on the error of each element; a body runs a
launch on a poisoned output and compares. Everything outside the result must keep its poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import layout
from kernels.gemm import Epilogue
from kernels.launch import Launch, Op
from tests.kernels.cases_rows import BF16_ERROR, Buffer, Device, from_bf16, to_bf16

Array = npt.NDArray[Any]
Launcher = Callable[..., Launch]  # (epilogue, x, w, out, **shape) -> Launch

POISON = 0x7FC1  # a NaN as bf16 bits; two of them are one as fp32
STEP_ERROR = 2.0**-22
"""Bound on what a step of 16 columns may lose, relative to the sum of the terms' magnitudes so far: one rounding or
truncation of the fp32 accumulator (2^-23) and as much for the alignment of the products inside the tensor core (Fasi et
al., "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021: products are truncated to at least 24 bits)."""


@dataclass
class Problem:
    """One product: M rows of x, N rows of W (swiglu: N = 2 I, gate then up), K columns."""

    epilogue: Epilogue
    m: int
    n: int
    k: int
    ld_extra: int
    x: Array  # (m, K) bf16 bits
    w: Array  # (n, K) bf16 bits; swiglu: gate rows, then up rows
    residual: Array  # (m, n) fp32, for add

    @staticmethod
    def random(rng: np.random.Generator, epilogue: Epilogue, m: int, n: int, k: int, ld_extra: int = 8) -> Problem:
        x = to_bf16(rng.standard_normal((m, k)).astype(np.float32))
        w = to_bf16((rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32))
        return Problem(epilogue, m, n, k, ld_extra, x, w, rng.standard_normal((m, n)).astype(np.float32))

    @property
    def columns(self) -> int:
        return self.n // 2 if self.epilogue == "swiglu" else self.n

    @property
    def ld_out(self) -> int:
        return layout.round_up(self.columns, 8) + self.ld_extra

    @property
    def shape(self) -> dict[str, int]:
        n = layout.gate_up_rows(self.n // 2) if self.epilogue == "swiglu" else self.n
        k_pad = layout.padded_columns(self.k)
        return {"num_rows": self.m, "num_outputs": n, "k_pad": k_pad, "ld_x": k_pad + 8, "ld_out": self.ld_out}

    def tiled(self) -> Array:
        if self.epilogue == "swiglu":
            return layout.tile(layout.interleave_gate_up(self.w[: self.n // 2], self.w[self.n // 2 :]))
        return layout.tile(self.w)

    def expected(self, columns: Array | None = None) -> tuple[Array, Array]:
        """The result in float64 and the largest error allowed for each element; all columns, or those."""
        columns = np.arange(self.columns) if columns is None else columns
        x = from_bf16(self.x).astype(np.float64)
        exact, error = self._products(x, columns)
        if self.epilogue == "f32":
            return exact, error
        if self.epilogue == "add":
            total = self.residual[:, columns].astype(np.float64) + exact
            return total, error + 2.0**-24 * np.abs(total)
        (g, dg), (u, du) = (exact, error), self._products(x, columns + self.n // 2)
        silu = g / (1 + np.exp(-g))
        # |silu'| <= 1.1; exp and its argument's rounding: 2^-22 (2 + |g|) relative
        slack = 1.1 * dg * (np.abs(u) + du) + np.abs(silu) * (du + 2.0**-21 * (2 + np.abs(g)) * np.abs(u))
        return silu * u, slack + BF16_ERROR * (np.abs(silu * u) + slack)

    def _products(self, x: Array, rows: Array) -> tuple[Array, Array]:
        """x times those rows of W, and its error in any order of 16-column steps."""
        w = from_bf16(self.w[rows]).astype(np.float64)
        steps = layout.padded_columns(self.k) / 16
        return x @ w.T, steps * STEP_ERROR * (np.abs(x) @ np.abs(w).T)


class Loaded:
    """A problem's inputs in a device's memory."""

    def __init__(self, device: Device, problem: Problem) -> None:
        self.device, self.problem = device, problem
        shape = problem.shape
        x = np.full((problem.m + 1, shape["ld_x"]), POISON, np.uint16)  # NaN outside the padded row, and after the last
        x[: problem.m, : shape["k_pad"]] = 0
        x[: problem.m, : problem.k] = problem.x
        self.x, self.w = device.put(x), device.put(problem.tiled())

    def _out(self, m: int) -> Array:
        problem = self.problem
        dtype = np.uint16 if problem.epilogue == "swiglu" else np.uint32
        out = np.full((m + 2, problem.ld_out), POISON * (0x10001 if dtype == np.uint32 else 1), dtype)
        if problem.epilogue == "add":
            out[:m, : problem.n] = problem.residual[:m].view(np.uint32)
        return out

    def run(self, launcher: Launcher, num_rows: int | None = None) -> Array:
        """Bits of the result (m, columns), or of its first num_rows alone. Asserts that nothing else was written."""
        problem = self.problem
        m = problem.m if num_rows is None else num_rows
        before = self._out(m)
        buffer: Buffer = self.device.put(before)
        addresses = self.x.address, self.w.address, buffer.address
        shape = problem.shape | {"num_rows": m}
        self.device.run(launcher(problem.epilogue, *addresses, **shape, op=Op.QKV, layer=0))
        after = buffer.read().reshape(before.shape)
        result = after[:m, : problem.columns].copy()
        written = shape["num_outputs"] // 2 if problem.epilogue == "swiglu" else problem.n
        assert np.all(after[:m, problem.columns : written] == 0), "padding columns of swiglu must be zero"
        after[:m, :written] = before[:m, :written]
        assert np.array_equal(after, before), "the kernel wrote outside its result"
        return result


def check_close(problem: Problem, bits: Array, columns: Array | None = None) -> None:
    """All columns of the result, or those."""
    values = from_bf16(bits) if problem.epilogue == "swiglu" else bits.view(np.float32)
    values = values if columns is None else values[:, columns]
    wanted, allowed = problem.expected(columns)
    excess = np.abs(values - wanted) - allowed
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert np.all(excess <= 0), (  # also false for NaN
        f"{problem.epilogue} M {problem.m} N {problem.n} K {problem.k}: element {worst} is {values[worst]}, "
        f"wanted {wanted[worst]} within {allowed[worst]}"
    )


def check_same_bits(device: Device, problem: Problem, launchers: dict[str, Launcher]) -> Array:
    """All launchers give the same bits, and they are right."""
    loaded = Loaded(device, problem)
    results = {name: loaded.run(launcher) for name, launcher in launchers.items()}
    name, first = next(iter(results.items()))
    check_close(problem, first)
    for other, bits in results.items():
        different = np.argwhere(bits != first)
        assert len(different) == 0, (
            f"{problem.epilogue} M {problem.m} N {problem.n} K {problem.k}: {other} and {name} differ in "
            f"{len(different)} of {bits.size} elements, first {different[0]}"
        )
    return first


def check_any_number_of_rows(
    device: Device, problem: Problem, launchers: dict[str, Launcher], num_rows: Iterable[int]
) -> None:
    """The first m rows alone have the bits that they have among all, by every launcher; a sample of 64 columns of all
    is right. The first launcher also makes all rows."""
    loaded = Loaded(device, problem)
    whole = loaded.run(next(iter(launchers.values())))
    check_close(problem, whole, np.unique(np.linspace(0, problem.columns - 1, 64).astype(int)))
    for m in num_rows:
        for name, launcher in launchers.items():
            different = np.argwhere(loaded.run(launcher, m) != whole[:m])
            assert len(different) == 0, (
                f"{problem.epilogue} N {problem.n} K {problem.k}: {name} with M {m} differs from M {problem.m} in "
                f"{len(different)} elements, first {different[0]}"
            )

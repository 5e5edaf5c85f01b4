"""Test bodies of the matrix products (kernels/gemm.py), for the emulator and the GPU alike.

`Problem` makes fresh random inputs and the float64 result with a bound on the error of each element; a body runs a
launch on a poisoned output and compares. Everything outside the result must keep its poison.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def expected(self) -> tuple[Array, Array]:
        """The result in float64, and the largest error allowed for each element."""
        x, w = from_bf16(self.x).astype(np.float64), from_bf16(self.w).astype(np.float64)
        exact, steps = x @ w.T, layout.padded_columns(self.k) / 16
        error = steps * STEP_ERROR * (np.abs(x) @ np.abs(w).T)
        if self.epilogue == "f32":
            return exact, error
        if self.epilogue == "add":
            total = self.residual.astype(np.float64) + exact
            return total, error + 2.0**-24 * np.abs(total)
        half = self.n // 2
        g, u, dg, du = exact[:, :half], exact[:, half:], error[:, :half], error[:, half:]
        silu = g / (1 + np.exp(-g))
        # |silu'| <= 1.1; exp and its argument's rounding: 2^-22 (2 + |g|) relative
        slack = 1.1 * dg * (np.abs(u) + du) + np.abs(silu) * (du + 2.0**-21 * (2 + np.abs(g)) * np.abs(u))
        return silu * u, slack + BF16_ERROR * (np.abs(silu * u) + slack)


class Loaded:
    """A problem's inputs in a device's memory."""

    def __init__(self, device: Device, problem: Problem) -> None:
        self.device, self.problem = device, problem
        shape = problem.shape
        x = np.full((problem.m + 1, shape["ld_x"]), POISON, np.uint16)  # NaN outside the padded row, and after the last
        x[: problem.m, : shape["k_pad"]] = 0
        x[: problem.m, : problem.k] = problem.x
        self.x, self.w = device.put(x), device.put(problem.tiled())

    def _out(self) -> Array:
        problem = self.problem
        dtype = np.uint16 if problem.epilogue == "swiglu" else np.uint32
        out = np.full((problem.m + 2, problem.ld_out), POISON * (0x10001 if dtype == np.uint32 else 1), dtype)
        if problem.epilogue == "add":
            out[: problem.m, : problem.n] = problem.residual.view(np.uint32)
        return out

    def run(self, launcher: Launcher) -> Array:
        """Bits of the result (m, columns). Asserts that nothing else was written."""
        problem = self.problem
        before = self._out()
        buffer: Buffer = self.device.put(before)
        self.device.run(
            launcher(
                problem.epilogue, self.x.address, self.w.address, buffer.address, **problem.shape, op=Op.QKV, layer=0
            )
        )
        after = buffer.read().reshape(before.shape)
        result = after[: problem.m, : problem.columns].copy()
        written = problem.shape["num_outputs"] // 2 if problem.epilogue == "swiglu" else problem.n
        assert np.all(after[: problem.m, problem.columns : written] == 0), "padding columns of swiglu must be zero"
        after[: problem.m, :written] = before[: problem.m, :written]
        assert np.array_equal(after, before), "the kernel wrote outside its result"
        return result


def check_close(problem: Problem, bits: Array) -> None:
    values = from_bf16(bits) if problem.epilogue == "swiglu" else bits.view(np.float32)
    wanted, allowed = problem.expected()
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

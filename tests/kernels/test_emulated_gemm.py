"""The matrix product kernels for few rows and for all architectures, on the emulator (tests/kernels/cases_gemm.py)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels.gemm import Epilogue, decode_launch, decode_plan, gemm_launch, portable_launch
from kernels.launch import Launch
from tests.kernels.cases_gemm import Launcher, Problem, check_same_bits
from tests.kernels.emulator import EmulatedExecutor, guarded_array

EPILOGUES: tuple[Epilogue, ...] = ("f32", "add", "swiglu")
SEEDS = (0, 1, 2, 3)  # orders of threads and arrivals of copies: see EmulatedExecutor


class EmulatedBuffer:
    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = guarded_array(array.shape, array.dtype)
        self._array[...] = array
        self.address = self._array.ctypes.data

    def read(self) -> npt.NDArray[Any]:
        return self._array.copy()


class EmulatedDevice:
    """tests/kernels/cases_rows.py:Device."""

    def __init__(self, path: str, seed: int) -> None:
        self.executor = EmulatedExecutor(path, seed)

    def put(self, array: npt.NDArray[Any]) -> EmulatedBuffer:
        return EmulatedBuffer(array)

    def run(self, launch: Launch) -> None:
        self.executor.run(launch)

    def take_errors(self) -> list[dict[str, int]]:
        raise NotImplementedError


def planned(num_multiprocessors: int, **changes: int) -> Launcher:
    """decode_launch with the plan for that many multiprocessors, with some of its fields replaced."""

    def launcher(epilogue: Epilogue, x: int, w: int, out: int, **shape: int) -> Launch:
        import dataclasses

        plan = decode_plan(shape["num_rows"], shape["num_outputs"], shape["k_pad"], num_multiprocessors)
        return decode_launch(dataclasses.replace(plan, **changes), epilogue, x, w, out, **shape)

    return launcher


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64])
def test_decode(epilogue: Epilogue, m: int) -> None:
    seed = SEEDS[m % len(SEEDS)]
    device = EmulatedDevice("hopper", seed)
    rng = np.random.default_rng(1000 + m)
    n, k = int(rng.integers(20, 130)) // 2 * 2, int(rng.integers(1, 7) * 64 - rng.integers(0, 60))
    problem = Problem.random(rng, epilogue, m, n, k)
    check_same_bits(device, problem, {"planned": functools.partial(gemm_launch, device.executor), "portable": portable_launch})

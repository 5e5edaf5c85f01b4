"""The wgmma matrix product on the GPU (tests/kernels/cases_gemm.py): all variants have the portable kernel's bits."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kernels.gemm import Epilogue, portable_launch
from kernels.gemm_prefill import VARIANTS, prefill_launch, prefill_plan, variant_plan
from tests.gpu.device import GpuDevice
from tests.kernels.cases_gemm import Launcher, Problem, check_same_bits

pytestmark = pytest.mark.gpu

EPILOGUES: tuple[Epilogue, ...] = ("f32", "add", "swiglu")


def launchers(problem: Problem, num_multiprocessors: int) -> dict[str, Launcher]:
    """All variants with that many blocks at most, the planned one, and the portable kernel."""
    shape = problem.shape
    m, n, k_pad = shape["num_rows"], shape["num_outputs"], shape["k_pad"]
    plans = {variant.suffix: variant_plan(variant, m, n, num_multiprocessors) for variant in VARIANTS}
    plans["planned"] = prefill_plan(m, n, k_pad, num_multiprocessors)
    return {
        **{name: functools.partial(prefill_launch, plan) for name, plan in plans.items()},
        "portable": portable_launch,
    }


@pytest.fixture(autouse=True)
def _hopper(device: GpuDevice) -> None:
    if device.executor.path != "hopper":
        pytest.skip("gemm_prefill.cu runs on sm_90a only")


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("m", [1, 63, 64, 65, 127, 128, 129, 200, 257, 512, 1000])
def test_rows(device: GpuDevice, m: int, epilogue: Epilogue) -> None:
    """Ragged M, N and K. With 4 blocks each works through many tiles, with all of the GPU each has one at most."""
    rng = np.random.default_rng(m)
    for blocks in (4, device.executor.num_multiprocessors):
        n, k = int(rng.integers(20, 700)) * 2, int(rng.integers(1, 900))
        problem = Problem.random(rng, epilogue, m, n, k)
        check_same_bits(device, problem, launchers(problem, blocks))


@pytest.mark.parametrize("ld_extra", [1, 2, 3])
def test_unaligned_rows(device: GpuDevice, ld_extra: int) -> None:
    """fp32 rows that are no multiple of 16 bytes, as of a vocabulary with added tokens."""
    rng = np.random.default_rng(ld_extra)
    for epilogue in ("f32", "add"):
        problem = Problem.random(rng, epilogue, 150, 403, 200, ld_extra)
        check_same_bits(device, problem, launchers(problem, 4))


@pytest.mark.parametrize(
    ("epilogue", "n", "k"), [("f32", 6144, 4096), ("add", 4096, 4096), ("swiglu", 28672, 4096), ("add", 4096, 14336)]
)
@pytest.mark.parametrize("m", [128, 500])
def test_shapes_of_an_8b_model(device: GpuDevice, m: int, epilogue: Epilogue, n: int, k: int) -> None:
    problem = Problem.random(np.random.default_rng(k + m), epilogue, m, n, k)
    check_same_bits(device, problem, launchers(problem, device.executor.num_multiprocessors))

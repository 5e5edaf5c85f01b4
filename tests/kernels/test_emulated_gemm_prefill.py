"""The wgmma matrix product on the emulator (tests/kernels/cases_gemm.py): tiles, clusters, ragged edges, epilogues."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kernels.gemm import Epilogue, portable_launch
from kernels.gemm_prefill import VARIANTS, Variant, prefill_launch, variant_plan
from tests.kernels.cases_gemm import Launcher, Problem, check_same_bits
from tests.kernels.test_emulated_gemm import EPILOGUES, EmulatedDevice

MULTIPROCESSORS = 4  # few, so that a block has several tiles


def launcher(variant: Variant, problem: Problem) -> Launcher:
    shape = problem.shape
    plan = variant_plan(variant, shape["num_rows"], shape["num_outputs"], MULTIPROCESSORS)
    return functools.partial(prefill_launch, plan)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.suffix)
def test_variants(variant: Variant, epilogue: Epilogue) -> None:
    """Several tiles a block, ragged in M, N and K: the portable kernel's bits, within the bound of float64."""
    width = variant.width * variant.share_x
    rng = np.random.default_rng(width * 10 + variant.cluster)
    m, n, k = int(rng.integers(130, 300)), int(rng.integers(width + 1, 2 * width)) // 2 * 2, int(rng.integers(1, 300))
    problem = Problem.random(rng, epilogue, m, n, k)
    device = EmulatedDevice("hopper", seed=int(rng.integers(4)))
    check_same_bits(device, problem, {"prefill": launcher(variant, problem), "portable": portable_launch})


@pytest.mark.parametrize("m", [1, 63, 64, 65, 127, 128, 129, 200, 257])
def test_rows(m: int) -> None:
    rng = np.random.default_rng(m)
    for epilogue in EPILOGUES:
        problem = Problem.random(rng, epilogue, m, int(rng.integers(10, 70)) * 2, int(rng.integers(1, 130)))
        device = EmulatedDevice("hopper", seed=int(rng.integers(4)))
        launchers = {v.suffix: launcher(v, problem) for v in VARIANTS if v.width <= 128}
        check_same_bits(device, problem, {**launchers, "portable": portable_launch})

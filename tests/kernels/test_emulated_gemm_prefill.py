"""The wgmma matrix product on the emulator (tests/kernels/cases_gemm.py): tiles, clusters, ragged edges, epilogues."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kernels.gemm import Epilogue, portable_launch
from kernels.gemm_prefill import CLUSTERS, WIDTHS, prefill_launch, variant_plan
from tests.kernels.cases_gemm import Launcher, Problem, check_same_bits
from tests.kernels.test_emulated_gemm import EPILOGUES, EmulatedDevice

MULTIPROCESSORS = 4  # few, so that a block has several tiles


def variant(width: int, cluster: int, problem: Problem) -> Launcher:
    shape = problem.shape
    plan = variant_plan(width, cluster, shape["num_rows"], shape["num_outputs"], MULTIPROCESSORS)
    return functools.partial(prefill_launch, plan)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("width", WIDTHS)
def test_variants(width: int, epilogue: Epilogue, cluster: int) -> None:
    """Several tiles a block, ragged in M, N and K: the portable kernel's bits, within the bound of float64."""
    rng = np.random.default_rng(width * 10 + cluster)
    m, n, k = int(rng.integers(130, 300)), int(rng.integers(width + 1, 2 * width)) // 2 * 2, int(rng.integers(1, 300))
    problem = Problem.random(rng, epilogue, m, n, k)
    device = EmulatedDevice("hopper", seed=int(rng.integers(4)))
    check_same_bits(device, problem, {"prefill": variant(width, cluster, problem), "portable": portable_launch})


@pytest.mark.parametrize("m", [1, 63, 64, 65, 127, 128, 129, 200, 257])
def test_rows(m: int) -> None:
    rng = np.random.default_rng(m)
    for epilogue in EPILOGUES:
        problem = Problem.random(rng, epilogue, m, int(rng.integers(10, 70)) * 2, int(rng.integers(1, 130)))
        device = EmulatedDevice("hopper", seed=int(rng.integers(4)))
        launchers = {f"c{cluster}": variant(64, cluster, problem) for cluster in CLUSTERS}
        check_same_bits(device, problem, {**launchers, "portable": portable_launch})

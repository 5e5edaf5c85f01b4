"""The wgmma matrix product on the emulator (tests/kernels/cases_gemm.py): tiles, clusters, ragged edges, epilogues."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.gemm import Epilogue, portable_launch
from kernels.gemm_prefill import VARIANTS, Variant, prefill_launch, prefill_plan, variant_plan
from tests.kernels.cases_gemm import Launcher, Problem, check_same_bits
from tests.kernels.emulated_device import EmulatedDevice
from tests.kernels.test_emulated_gemm import EPILOGUES

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


@given(st.integers(1, 20000), st.integers(1, 200000), st.integers(1, 256), st.integers(8, 160))
def test_plans_fit_the_gpu(num_rows: int, num_outputs: int, k_tiles: int, num_multiprocessors: int) -> None:
    """At most one block a multiprocessor (they wait for each other within a cluster), whole clusters, no block without
    a tile, and no more shared memory than a block of sm_90 may have (CUDA programming guide: 227 KB)."""
    plan = prefill_plan(num_rows, num_outputs, 64 * k_tiles, num_multiprocessors)
    assert 1 <= plan.blocks <= num_multiprocessors
    assert plan.blocks % plan.variant.cluster == 0
    assert plan.blocks <= plan.variant.tiles(num_rows, num_outputs)
    assert plan.variant.shared_bytes <= 227 * 1024


def test_swiglu_refuses_rows_that_are_no_pairs() -> None:
    plan = prefill_plan(100, 40, 64, 132)
    shape = {"num_rows": 100, "k_pad": 64, "ld_x": 64, "op": 7}
    with pytest.raises(ValueError, match="multiple of 16"):
        prefill_launch(plan, "swiglu", 4096, 4096, 4096, num_outputs=40, ld_out=64, **shape)
    with pytest.raises(ValueError, match="one of 8"):
        prefill_launch(plan, "swiglu", 4096, 4096, 4096, num_outputs=48, ld_out=28, **shape)

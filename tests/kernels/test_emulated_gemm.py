"""The matrix product kernels for few rows and for all architectures, on the emulator (tests/kernels/cases_gemm.py)."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np
import pytest

from kernels.gemm import DECODE_ROWS, Epilogue, decode_launch, decode_plan, gemm_launch, portable_launch
from kernels.launch import Launch, Op
from tests.kernels.cases_gemm import Launcher, Loaded, Problem, check_same_bits
from tests.kernels.cases_rows import from_bf16, to_bf16
from tests.kernels.emulated_device import EmulatedDevice
from tests.kernels.emulator import EmulatedExecutor

EPILOGUES: tuple[Epilogue, ...] = ("f32", "add", "swiglu")
SEEDS = (0, 1, 2, 3)  # orders of threads and arrivals of copies: see EmulatedExecutor


def planned(num_multiprocessors: int, **changes: Any) -> Launcher:
    """decode_launch with the plan for that many multiprocessors, with some of its fields replaced."""

    def launcher(epilogue: Epilogue, x: int, w: int, out: int, **shape: int) -> Launch:
        plan = decode_plan(shape["num_rows"], shape["num_outputs"], shape["k_pad"], num_multiprocessors)
        return decode_launch(dataclasses.replace(plan, **changes), epilogue, x, w, out, **shape)

    return launcher


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64])
def test_decode_and_portable_are_right_and_agree(epilogue: Epilogue, m: int) -> None:
    device = EmulatedDevice("hopper", SEEDS[m % len(SEEDS)])
    rng = np.random.default_rng(1000 + m)
    n, k = int(rng.integers(20, 130)) // 2 * 2, int(rng.integers(1, 7) * 64 - rng.integers(0, 60))
    problem = Problem.random(rng, epilogue, m, n, k)
    check_same_bits(device, problem, {"decode": planned(4), "portable": portable_launch})


@pytest.mark.slow
@pytest.mark.parametrize("m", range(1, 68) if os.environ.get("APPLIANCE_FULL") == "1" else (5, 24, 48, 66))
def test_every_number_of_rows(m: int) -> None:
    rng = np.random.default_rng(m)
    for epilogue in EPILOGUES:
        n, k = 16 * int(rng.integers(1, 9)) - 2 * int(rng.integers(0, 8)), 64 * int(rng.integers(1, 6))
        problem = Problem.random(rng, epilogue, m, n, k)
        launchers: dict[str, Launcher] = {"portable": portable_launch}
        if m <= DECODE_ROWS:
            launchers["decode"] = planned(int(rng.integers(1, 12)))
        for seed in SEEDS:
            check_same_bits(EmulatedDevice("hopper", seed), problem, launchers)


@pytest.mark.parametrize("m", [3, 16, 30, 61])
@pytest.mark.parametrize("k", [1, 65, 192, 576])
def test_decode_bits_do_not_depend_on_the_plan(m: int, k: int) -> None:
    """Teams, variant, stages, number of blocks: rings that wrap and rings that never do, blocks with one tile more,
    passes that leave teams without a tile."""
    rng = np.random.default_rng(m * 1000 + k)
    problem = Problem.random(rng, "f32", m, 16 * 13 - 5, k)
    check_same_bits(
        EmulatedDevice("hopper", SEEDS[k % len(SEEDS)]),
        problem,
        {
            "portable": portable_launch,
            "one block": planned(1),
            "uneven": planned(4, stages=3),
            "one team": planned(3, teams=1, stages=2),
            "two passes": planned(2, teams=4),
            "a tile a block": planned(132),
        },
    )


@pytest.mark.parametrize("path", ["hopper", "portable"])
def test_a_row_does_not_depend_on_its_neighbours(path: str) -> None:
    """The same bits alone and in any batch; and a row of NaN or infinities stays alone."""
    rng = np.random.default_rng(5)
    device = EmulatedDevice(path, 2)
    launcher = functools.partial(gemm_launch, device.executor)
    whole = Problem.random(rng, "add", 40, 70, 200)
    bits = Loaded(device, whole).run(launcher)
    for first, last in [(0, 1), (3, 4), (39, 40), (5, 21), (7, 40)]:
        part = dataclasses.replace(whole, m=last - first, x=whole.x[first:last], residual=whole.residual[first:last])
        assert np.array_equal(Loaded(device, part).run(launcher), bits[first:last])
    whole.x[6] = 0x7FC0
    whole.x[30, 5] = 0x7F80
    poisoned = Loaded(device, whole).run(launcher)
    others = np.setdiff1d(np.arange(40), [6, 30])
    assert np.array_equal(poisoned[others], bits[others])
    assert np.all(np.isnan(poisoned[6].view(np.float32)))
    assert not np.any(np.isfinite(poisoned[30].view(np.float32)))


@pytest.mark.parametrize("intermediate", [1, 8, 13, 100])
def test_swiglu_of_an_odd_width(intermediate: int) -> None:
    """gate_up is padded to 8 rows: the columns past I are written as zeros (and nothing else is, see Loaded.run)."""
    rng = np.random.default_rng(intermediate)
    problem = Problem.random(rng, "swiglu", 5, 2 * intermediate, 96)
    check_same_bits(EmulatedDevice("hopper", 1), problem, {"decode": planned(3), "portable": portable_launch})


def test_swiglu_of_large_gates() -> None:
    """e^-g overflows for g < -88: the result is then 0 times u, never NaN."""
    device = EmulatedDevice("hopper", 0)
    rng = np.random.default_rng(8)
    problem = Problem.random(rng, "swiglu", 4, 32, 64)
    problem.w[:16] = to_bf16(np.full((16, 64), -2.0, np.float32))
    problem.x[...] = to_bf16(np.full((4, 64), 1.0, np.float32))  # every gate is -128
    values = from_bf16(Loaded(device, problem).run(planned(4)))
    assert np.all(values == 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 0}, "at least 1"),
        ({"k_pad": 100}, "multiple of 64"),
        ({"ld_x": 100}, "holds 128 columns"),
        ({"ld_out": 8}, "does not hold"),
        ({"num_outputs": 24}, "multiple of 16"),
    ],
)
def test_shapes_no_kernel_takes(change: dict[str, int], message: str) -> None:
    shape = {"num_rows": 3, "num_outputs": 32, "k_pad": 128, "ld_x": 128, "ld_out": 32} | change
    with pytest.raises(ValueError, match=message):
        gemm_launch(EmulatedExecutor(), "swiglu", 4096, 8192, 16384, **shape, op=Op.GATE_UP)


@pytest.mark.parametrize("num_multiprocessors", [1, 4, 78, 114, 132, 148])
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
def test_plans_fit_the_machine(m: int, num_multiprocessors: int) -> None:
    """What a block may have (227 KB, with some left for the small kernels beside it), no more threads than the
    kernel's launch bound, and no block with more tiles than it must have."""
    llama = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    for n, k in [*llama, (960, 576), (49152, 576), (16, 64)]:
        plan = decode_plan(m, n, k, num_multiprocessors)
        tiles = -(-n // 16)
        assert plan.shared_bytes <= 200 * 1024, (n, k, plan)
        assert plan.threads <= 384
        assert plan.stages >= 2
        assert plan.blocks <= num_multiprocessors
        assert -(-tiles // plan.blocks) == -(-tiles // num_multiprocessors)

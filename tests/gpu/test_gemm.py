"""The matrix products of the decode step on the GPU (tests/kernels/cases_gemm.py): every kernel has the same bits, for
every shape of the models and every number of rows."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kernels.gemm import DECODE_ROWS, Epilogue, gemm_launch, portable_launch
from kernels.gemm_prefill import prefill_launch, prefill_plan
from kernels.launch import Launch
from tests.gpu.device import GpuDevice
from tests.kernels.cases_gemm import Launcher, Loaded, Problem, check_any_number_of_rows, check_same_bits

pytestmark = pytest.mark.gpu

EPILOGUES: tuple[Epilogue, ...] = ("f32", "add", "swiglu")
EDGES = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 50, 63, 64, 65, 67)
ALL = tuple(range(1, 68))

SMOLLM2 = [("f32", 960, 576), ("add", 576, 576), ("swiglu", 3072, 576), ("add", 576, 1536), ("f32", 49152, 576)]
LLAMA_3_8B = [("f32", 6144, 4096), ("add", 4096, 4096), ("swiglu", 28672, 4096), ("add", 4096, 14336)]
QWEN2_7B = [("f32", 4608, 3584), ("add", 3584, 3584), ("swiglu", 37888, 3584), ("add", 3584, 18944)]


def launchers(device: GpuDevice) -> dict[str, Launcher]:
    """The kernel that gemm_launch chooses, and the others that this GPU runs."""
    found: dict[str, Launcher] = {
        "portable": portable_launch,
        "chosen": functools.partial(gemm_launch, device.executor),
    }
    if device.path == "hopper":

        def prefill(epilogue: Epilogue, x: int, w: int, out: int, **shape: int) -> Launch:
            multiprocessors = device.executor.num_multiprocessors
            plan = prefill_plan(shape["num_rows"], shape["num_outputs"], shape["k_pad"], multiprocessors)
            return prefill_launch(plan, epilogue, x, w, out, **shape)

        found["prefill"] = prefill
    return found


@pytest.mark.parametrize(("epilogue", "n", "k"), [*SMOLLM2, *LLAMA_3_8B, *QWEN2_7B])
def test_shapes_of_models(device: GpuDevice, epilogue: Epilogue, n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    problem = Problem.random(rng, epilogue, max(ALL), n, k)
    check_any_number_of_rows(device, problem, launchers(device), ALL if n * k <= 4096 * 4096 else EDGES)


def test_vocabulary(device: GpuDevice) -> None:
    problem = Problem.random(np.random.default_rng(1), "f32", 67, 128256, 4096)
    check_any_number_of_rows(device, problem, launchers(device), (1, 8, 9, 32, 33, 64, 65))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("m", ALL)
def test_ragged(device: GpuDevice, epilogue: Epilogue, m: int) -> None:
    """Any N, any K: rings that never fill, blocks with one tile more than others, a last stage of one tile."""
    rng = np.random.default_rng(m)
    for largest in (100, 1000, 20000):
        n, k, extra = int(rng.integers(1, largest)) * 2, int(rng.integers(1, 1000)), int(rng.integers(0, 9))
        extra *= 8 if epilogue == "swiglu" else 1  # rows of bf16 start on 16 bytes, as the engine's do
        check_same_bits(device, Problem.random(rng, epilogue, m, n, k, extra), launchers(device))


def test_a_decode_row_keeps_nan_to_itself(device: GpuDevice) -> None:
    rng = np.random.default_rng(3)
    problem = Problem.random(rng, "f32", DECODE_ROWS, 640, 576)
    clean = check_same_bits(device, problem, launchers(device))
    problem.x[5] = 0x7FC0
    others = np.setdiff1d(np.arange(DECODE_ROWS), [5])
    bits = Loaded(device, problem).run(launchers(device)["chosen"])
    assert np.array_equal(bits[others], clean[others]) and np.all(np.isnan(bits[5].view(np.float32)))

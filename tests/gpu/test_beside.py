"""A launch has the same bits whatever another process does on the same GPU (tests/gpu/repeat.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import repeat
from tests.gpu.device import GpuDevice

TIMES = 10 if os.environ.get("APPLIANCE_FULL") == "1" else 1
LAUNCHES = {"attention": 2_000, "gemm": 300}
"""With a multiple of that at full counts. Before common.cuh:warp_release, 1 launch of 200 at head_dim 128 differed."""
NEIGHBOUR = ("attention-32-8-128", "gemm-f32-16x6144x4096")


@pytest.fixture(scope="module")
def neighbour() -> Iterator[None]:
    """Another process that launches the same kernels all the time."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.repeat", "--cases", *NEIGHBOUR],
        cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "running\n"
        yield
        assert process.poll() is None, "the neighbour ended before the tests did"
        process.stdin.close()
        process.wait(60)


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("case", repeat.CASES)
def test_the_same_bits_beside_another_process(device: GpuDevice, case: str) -> None:
    repeated = repeat.CASES[case](device)
    repeated.run(TIMES * LAUNCHES[case.partition("-")[0]])
    assert len(repeated.seen) == 1, repeated.differences()

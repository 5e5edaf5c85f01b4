"""Options of one backend mean nothing to the other and are refused by name; a GPU that was asked for and is not there
is a refusal (exit 4), never the CPU instead."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.core_config import CoreConfig, scheduler_config, with_defaults
from engine.errors import ConfigError
from engine.serve import core_config, parse_arguments
from engine.spawn import python_env, python_module
from tests.tiny import make_tiny_model


def parsed(*options: str) -> CoreConfig:
    return core_config(parse_arguments(["--model-dir", "m", *options]))


def test_defaults_of_each_backend() -> None:
    cpu, cuda = parsed(), parsed("--backend", "cuda")
    assert (cpu.max_batch_tokens, cpu.prefill_chunk, cpu.plans_in_flight, cpu.memory_fraction) == (256, 128, 1, 0.4)
    assert (cuda.max_batch_tokens, cuda.prefill_chunk, cuda.plans_in_flight) == (8192, 512, 2)
    assert (cuda.gpu_memory_fraction, cuda.device, cuda.cuda_graphs, cuda.profile_kernels) == (0.9, "0", True, False)
    assert cpu.gpu_memory_fraction is None and cuda.memory_fraction is None
    assert with_defaults(cuda) == cuda
    assert scheduler_config(cuda, 4096).max_plans_in_flight == 2


def test_what_is_given_wins() -> None:
    given = parsed("--backend", "cuda", "--max-batch-tokens", "512", "--prefill-chunk", "256", "--plans-in-flight", "1",
                   "--gpu-memory-fraction", "0.5", "--device", "GPU-5fd4", "--no-cuda-graphs", "--profile-kernels",
                   "--step-ring", "/dev/shm/x", "--max-batch-seqs", "256")  # fmt: skip
    assert (given.max_batch_tokens, given.prefill_chunk, given.plans_in_flight) == (512, 256, 1)
    assert (given.gpu_memory_fraction, given.device, given.cuda_graphs, given.profile_kernels) == (
        0.5,
        "GPU-5fd4",
        False,
        True,
    )
    assert (given.step_ring, given.max_batch_seqs) == ("/dev/shm/x", 256)


@pytest.mark.parametrize(
    "options, named",
    [
        (["--backend", "cuda", "--threads", "2"], "num_threads"),
        (["--backend", "cuda", "--memory-fraction", "0.4"], "memory_fraction"),
        (["--backend", "cuda", "--dtype", "float32"], "bfloat16"),
        (["--backend", "cuda", "--max-batch-seqs", "257"], "max_batch_seqs"),
        (["--gpu-memory-fraction", "0.9"], "gpu_memory_fraction"),
        (["--device", "0"], "device"),
        (["--no-cuda-graphs"], "cuda_graphs"),
        (["--profile-kernels"], "profile_kernels"),
        (["--step-ring", "/dev/shm/x"], "step_ring"),
    ],
)
def test_options_of_the_other_backend_are_refused(options: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parsed(*options)
    assert caught.value.hint and caught.value.exit_code == 4


def has_gpu() -> bool:
    from engine.cuda.context import visible_devices

    try:
        return bool(visible_devices())
    except ConfigError:
        return False


def test_cuda_without_a_gpu_is_refused_and_says_what_to_install(tmp_path: Path) -> None:
    if has_gpu():
        pytest.skip("there is a GPU here")
    command = [*python_module("engine"), "--model-dir", str(make_tiny_model(tmp_path / "m")), "--backend", "cuda",
               "--port", "0"]  # fmt: skip
    result: Any = subprocess.run(command, capture_output=True, text=True, env=python_env(), timeout=60)
    assert result.returncode == 4
    assert "make setup-gpu" in result.stderr or "driver" in result.stderr
    assert "Traceback" not in result.stderr

"""The CUDA sampler on the GPU gives engine/sampler.py's tokens, logprob bits and error texts at real vocabularies."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from engine.cuda.memory import copy_to_device, copy_to_host
from engine.sampler import SampleState
from engine.types import SamplingParams
from kernels.launch import Launch
from kernels.sampler import SamplerShape
from tests.gpu.device import GpuDevice
from tests.kernels.cases_sampler import (
    KINDS,
    DeviceSampler,
    Row,
    check,
    check_random_requests,
    make_row,
)

FULL = os.environ.get("APPLIANCE_FULL") == "1"
VOCABS = (49_152, 128_256, 151_936)  # SmolLM2, Llama 3, Qwen 2.5


class GpuMachine:
    """cases_sampler.Machine."""

    def __init__(self, device: GpuDevice) -> None:
        self._device = device

    def zeros(self, num_bytes: int) -> int:
        return self._device.put(np.zeros(num_bytes, np.uint8)).address

    def write(self, address: int, array: np.ndarray) -> None:
        context = self._device.context
        copy_to_device(context, address, np.ascontiguousarray(array).reshape(-1).view(np.uint8), context.compute)
        context.compute.synchronize()

    def read(self, address: int, shape: Any, dtype: Any) -> np.ndarray:
        context = self._device.context
        host = np.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
        copy_to_host(context, host, address, context.compute)
        context.compute.synchronize()
        return host.view(dtype).reshape(shape)

    def run(self, launch: Launch) -> None:
        self._device.run(launch)


def make_sampler(device: GpuDevice, vocab_size: int, rows: int) -> DeviceSampler:
    shape = SamplerShape(num_slots=rows + 1, vocab_size=vocab_size, max_rows=rows, max_edits=64, max_logprobs=20)
    return DeviceSampler(GpuMachine(device), shape)


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_random_requests_in_batches_of_1_to_67(device: GpuDevice, vocab_size: int) -> None:
    sampler = make_sampler(device, vocab_size, 67)
    for num_rows in range(1, 68) if FULL else (1, 3, 8, 67):
        check_random_requests(sampler, 1000 + num_rows, num_rows, steps=3)
        device.take_errors()


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_any_kind_of_row(device: GpuDevice, vocab_size: int) -> None:
    """Ties, -inf and huge logits over the whole vocabulary; nuclei beyond what a list in shared memory holds."""
    options: list[dict[str, Any]] = [
        {},
        {"top_p": 0.6},
        {"top_p": 0.97, "logprobs": 20},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 12_000, "top_p": 0.99},
        {"min_p": 0.02},
    ]
    sampler = make_sampler(device, vocab_size, len(options))
    for kind in KINDS:
        for temperature in (1.0, 0.7):
            states = [
                SampleState(SamplingParams(seed=3, max_tokens=9, temperature=temperature, **item), [], vocab_size, 0)
                for item in options
            ]
            sampler.set_slots(dict(enumerate(states)))
            row = make_row(kind, vocab_size, vocab_size)
            check(sampler, [Row(row, slot, state) for slot, state in enumerate(states)])


def test_a_thousand_runs_of_one_row_among_others_give_one_answer(device: GpuDevice) -> None:
    """Whatever the order of blocks and atomics: token and logprobs have the same bits."""
    sampler = make_sampler(device, 128_256, 16)
    params = SamplingParams(seed=11, max_tokens=9, temperature=1.3, top_p=0.98, logprobs=20)
    states = [SampleState(params, [], 128_256, i) for i in range(16)]
    sampler.set_slots(dict(enumerate(states)))
    rows = [Row(make_row("flat", i, 128_256), i, state) for i, state in enumerate(states)]
    wanted = check(sampler, rows)
    for _ in range(1000 // 16 if FULL else 10):
        assert sampler.step(rows) == wanted

"""Exactness: a request's logits have the same bits whatever else is in the batch, however its prompt is cut, wherever
its pages lie, with one thread or two, in prefill and in decode."""

from __future__ import annotations

import os

import numpy as np
import pytest
from runner_models import VARIANTS, Feeder, make_config, make_weights, prompt

from engine.runner import ModelRunner
from kernels import _cpu

FULL = os.environ.get("APPLIANCE_FULL") == "1"
NAMES = list(VARIANTS) if FULL else ["llama", "window", "qwen2", "qwen3"]
LENGTH = 290  # three pages


def make_runner(name: str, *, bf16: bool = False, threads: int = 2) -> ModelRunner:
    config = make_config(name)
    return ModelRunner(config, make_weights(config, bf16=bf16), num_pages=40, num_threads=threads)


def chunked(runner: ModelRunner, feeder: Feeder, chunk: int, seq: int = 0) -> np.ndarray:
    n = len(feeder.prompts[seq])
    steps = [(seq, start, min(start + chunk, n)) for start in range(0, n, chunk)]
    return np.concatenate([runner.forward(feeder.batch([step])) for step in steps])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_chunking_threads_and_pages_do_not_change_a_bit(name, bf16):
    ids = prompt(LENGTH, 90)
    whole = chunked(make_runner(name, bf16=bf16, threads=1), Feeder([ids], 40), LENGTH)
    assert np.isfinite(whole).all()
    for threads in (1, 2):
        runner = make_runner(name, bf16=bf16, threads=threads)
        for seed, chunk in enumerate((1, 7, 64, 128, LENGTH)):
            np.testing.assert_array_equal(chunked(runner, Feeder([ids], 40, seed), chunk), whole)


@pytest.mark.parametrize("name", NAMES)
def test_neighbours_do_not_change_a_bit(name):
    """Random mixes of prefill chunks and decode tokens of eight sequences against each one alone."""
    lengths = (LENGTH, 1, 2, 64, 130, 17, 128, 129)
    prompts = [prompt(n, 90, seed) for seed, n in enumerate(lengths)]
    runner = make_runner(name)
    feeder = Feeder(prompts, 40)
    alone = [chunked(runner, feeder, len(p), s) for s, p in enumerate(prompts)]
    rng = np.random.default_rng(7)
    for _ in range(10 if FULL else 2):
        done = [0] * len(prompts)
        while any(d < len(p) for d, p in zip(done, prompts)):
            parts = []
            for s in rng.permutation(len(prompts)):
                left = len(prompts[s]) - done[s]
                if left and rng.random() < 0.7:
                    parts.append((int(s), done[s], done[s] + min(left, int(rng.choice([1, 1, 5, 33, 128])))))
            if not parts:
                continue
            logits = runner.forward(feeder.batch(parts))
            row = 0
            for s, start, stop in parts:
                np.testing.assert_array_equal(logits[row : row + stop - start], alone[s][start:stop])
                row, done[s] = row + stop - start, stop


def test_a_shared_prefix_page_gives_the_same_bits_as_computing_it_again():
    ids = prompt(200, 90)
    runner = make_runner("llama")
    feeder = Feeder([ids, ids], 40)
    whole = chunked(runner, feeder, 200, 0)
    feeder.block_tables[1, 0] = feeder.block_tables[0, 0]  # a prefix-cache hit on the first page
    np.testing.assert_array_equal(runner.forward(feeder.batch([(1, 128, 200)])), whole[128:])


def test_bf16_and_its_widened_weights_give_the_same_bits():
    config = make_config("llama")
    narrow = make_weights(config, bf16=True)
    wide = make_weights(config)
    for name, tensor in narrow.tensors.items():
        values = (tensor.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == np.uint16 else tensor
        wide.tensors[name][...] = values
    ids = prompt(50, 90)
    results = [
        chunked(ModelRunner(config, weights, num_pages=2, num_threads=2), Feeder([ids], 2), 9)
        for weights in (narrow, wide)
    ]
    np.testing.assert_array_equal(*results)


def test_the_plain_c_version_gives_the_same_bits():
    if _cpu.isa() == "generic":
        pytest.skip("only one instruction set here")
    runner = make_runner("qwen3")
    feeder = Feeder([prompt(150, 90)], 40)
    fast = chunked(runner, feeder, 150)
    _cpu.set_isa("generic")
    try:
        np.testing.assert_array_equal(chunked(runner, feeder, 150), fast)
    finally:
        _cpu.set_isa("avx2")

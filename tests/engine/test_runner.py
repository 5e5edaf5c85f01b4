"""ModelRunner against the float64 reference, and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from runner_models import VARIANTS, Feeder, make_config, make_weights, prompt, reference_logits

from engine.errors import ConfigError
from engine.runner import ModelRunner, kv_bytes_per_page


def make_runner(name: str = "llama", *, bf16: bool = False, **options) -> ModelRunner:
    config = make_config(name)
    return ModelRunner(config, make_weights(config, bf16=bf16), **{"num_pages": 8, "num_threads": 2, **options})


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_reference(name, bf16):
    runner = make_runner(name, bf16=bf16)
    ids = prompt(200, runner.config.vocab_size)
    expected = reference_logits(runner.config, make_weights(runner.config, bf16=bf16), ids)
    logits = runner.forward(Feeder([ids], 8).batch([(0, 0, 200)]))
    assert logits.shape == (200, runner.config.vocab_size) and logits.dtype == np.float32
    error = np.abs(logits - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() <= 1e-5  # fp32 through three layers; the requirement of the engine is 1e-4


def test_only_the_wanted_rows_are_returned_in_order():
    runner = make_runner()
    feeder = Feeder([prompt(30, 90), prompt(20, 90, 1)], 8)
    parts = [(0, 0, 30), (1, 0, 20)]
    whole = runner.forward(feeder.batch(parts))
    some = runner.forward(feeder.batch(parts, np.array([3, 29, 49], np.int32)))
    np.testing.assert_array_equal(some, whole[[3, 29, 49]])
    none = runner.forward(feeder.batch(parts, np.zeros(0, np.int32)))
    assert none.shape == (0, 90)


def test_logits_of_one_step_survive_the_next():
    runner = make_runner()
    feeder = Feeder([prompt(9, 90)], 8)
    first = runner.forward(feeder.batch([(0, 0, 8)]))
    kept = first.copy()
    runner.forward(feeder.batch([(0, 8, 9)]))
    np.testing.assert_array_equal(first, kept)


def test_nan_weights_of_one_token_spoil_only_sequences_that_hold_it():
    config = make_config("llama")
    weights = make_weights(config)
    weights.tensors["embed"][7] = np.nan
    runner = ModelRunner(config, weights, num_pages=8, num_threads=2)
    good = prompt(40, 90)
    good[good == 7] = 8
    bad = good.copy()
    bad[20] = 7
    feeder = Feeder([good, bad], 8)
    logits = runner.forward(feeder.batch([(0, 0, 40), (1, 0, 40)]))
    assert np.isfinite(logits[:40]).all()
    np.testing.assert_array_equal(logits[40:60], logits[:20])
    assert np.isnan(logits[60:]).all()


def test_kv_bytes_per_page_is_what_the_pool_takes():
    runner = make_runner("qwen3", num_pages=5)
    per_token = 3 * 2 * 2 * 26 * 4  # layers, K and V, KV heads, head_dim, fp32
    assert runner.kv_bytes_per_page == kv_bytes_per_page(runner.config) == 128 * per_token


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"token_ids": np.array([1, 90, 3], np.int32)}, IndexError, "token id 90 at index 1"),
        ({"token_ids": np.array([1, 2, 3])}, TypeError, "ids has element format"),
        ({"positions": np.array([0, 1, 1024], np.int32)}, IndexError, "token 2 has position 1024"),
        ({"seq_index": np.array([0, 5, 0], np.int32)}, IndexError, "token 1 is of sequence 5"),
        ({"block_tables": np.full((1, 2), -1, np.int32)}, IndexError, "token 0 needs page -1"),
        ({"block_tables": np.full((1, 2), 8, np.int32)}, IndexError, "the pool has 8 pages"),
        ({"positions": np.array([0, 1], np.int32)}, ValueError, "size"),
        ({"logits_rows": np.array([3], np.int32)}, IndexError, r"logits_rows must lie in 0..2"),
        ({"logits_rows": np.array([-1], np.int32)}, IndexError, r"logits_rows must lie in 0..2"),
        ({"logits_rows": np.array([0])}, ValueError, "logits_rows must be int32"),
        ({"token_ids": np.zeros(0, np.int32)}, ValueError, "the batch has 0 tokens; wanted 1..16"),
        ({"token_ids": np.zeros(17, np.int32)}, ValueError, "the batch has 17 tokens; wanted 1..16"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_the_runner_goes_on(change, error, text):
    runner = make_runner(max_batch_tokens=16)
    feeder = Feeder([prompt(3, 90)], 8)
    good = feeder.batch([(0, 0, 3)])
    before = runner.forward(good)
    with pytest.raises(error, match=text):
        runner.forward(dataclasses.replace(good, **change))
    np.testing.assert_array_equal(runner.forward(good), before)


def test_a_missing_earlier_page_is_refused_before_the_pool_is_touched():
    runner = make_runner(num_pages=4)
    feeder = Feeder([prompt(300, 90)], 4)
    batch = feeder.batch([(0, 0, 300)])
    runner.forward(batch)
    pool = runner._pool.copy()
    hole = batch.block_tables.copy()
    hole[0, 1] = -1  # the new token's own page is fine
    with pytest.raises(IndexError, match=r"needs page -1 \(entry 1 of block table 0\)"):
        runner.forward(dataclasses.replace(feeder.batch([(0, 290, 300)]), block_tables=hole))
    np.testing.assert_array_equal(runner._pool, pool)


@pytest.mark.parametrize("name", ["embed", "lm_head", "final_norm", "layers.2.qkv", "layers.0.down"])
def test_weights_that_do_not_fit_are_refused_by_name(name):
    config = make_config("llama")
    weights = make_weights(config)
    for damage in ("missing", "shape", "dtype"):
        tensors = dict(weights.tensors)
        if damage == "missing":
            del tensors[name]
        else:
            tensors[name] = tensors[name][1:] if damage == "shape" else tensors[name].astype(np.float64)
        with pytest.raises(ConfigError, match=name):
            ModelRunner(config, dataclasses.replace(weights, tensors=tensors), num_pages=1, num_threads=1)

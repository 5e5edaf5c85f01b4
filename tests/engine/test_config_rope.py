"""Rotary settings in all the forms the Hub has, and every combination that must not be guessed at."""

from __future__ import annotations

import os

import pytest
from checkpoint_files import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ModelConfig, RopeConfig
from engine.errors import ConfigError

FULL = os.environ.get("APPLIANCE_FULL") == "1"

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


def parse(**changes):
    return ModelConfig.from_json(tiny_config(**changes))


def rope(**changes) -> RopeConfig:
    return parse(**changes).rope


def test_the_three_spellings_mean_the_same():
    expected = RopeConfig(5e5, "llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    old = {"type": "llama3", **LLAMA3}
    new = {"rope_type": "llama3", **LLAMA3}
    assert rope(rope_theta=5e5, rope_scaling=old) == expected
    assert rope(rope_theta=5e5, rope_scaling=new) == expected
    assert rope(rope_theta=5e5, rope_scaling={**old, **new}) == expected
    newest = {"rope_theta": 5e5, **new}
    assert rope(rope_theta=None, rope_parameters=newest) == expected
    assert rope(rope_theta=5e5, rope_parameters=newest, rope_scaling=newest) == expected
    assert rope(rope_theta=None, rope_parameters={"full_attention": newest}) == expected
    assert rope(rope_theta=None, rope_parameters={"full_attention": newest, "sliding_attention": newest}) == expected


def test_no_scaling():
    assert rope(rope_theta=None) == RopeConfig(10000.0, "default")
    assert rope(rope_scaling=None).kind == "default"
    assert rope(rope_scaling={}).kind == "default"
    assert rope(rope_parameters={"rope_theta": 10000, "rope_type": "default"}) == RopeConfig(10000.0, "default")


def test_linear_and_dynamic():
    # vicuna-7b-v1.5-16k
    assert rope(rope_scaling={"factor": 4.0, "type": "linear"}) == RopeConfig(10000.0, "linear", 4.0)
    assert rope(rope_scaling={"factor": 2, "type": "dynamic"}) == RopeConfig(10000.0, "dynamic", 2.0, 128)
    assert parse(rope_scaling={"factor": 2.5, "type": "dynamic"}).max_position == 320
    assert parse(rope_scaling={"factor": 4.0, "type": "linear"}).max_position == 128  # trained length unknown
    known = {"factor": 4.0, "type": "linear", "original_max_position_embeddings": 128}
    assert parse(rope_scaling=known).max_position == 512


def test_yarn_defaults_and_context():
    config = parse(rope_scaling={"type": "yarn", **YARN})
    assert config.rope == RopeConfig(10000.0, "yarn", 4.0, 128, beta_fast=32.0, beta_slow=1.0)
    assert config.rope.truncate
    assert config.rope.attention_factor is None
    assert config.max_position == 512  # Qwen's README: 32768 x 4 with max_position_embeddings left at 32768
    assert parse(max_position_embeddings=512, rope_scaling={"type": "yarn", **YARN}).max_position == 512
    assert rope(rope_scaling={"type": "yarn", "factor": 4.0}).original_max_position == 128


def test_yarn_options():
    got = rope(
        rope_scaling={
            "rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25, "mscale": 0.7,
            "mscale_all_dim": 1, "truncate": False,
        }
    )  # fmt: skip
    assert (got.beta_fast, got.beta_slow, got.attention_factor, got.mscale, got.mscale_all_dim, got.truncate) == (
        16.0, 2.0, 1.25, 0.7, 1.0, False,
    )  # fmt: skip


def test_yarn_null_factor_is_the_ratio_of_lengths():
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}
    assert rope(rope_scaling=scaling).factor == 4.0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "su"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "mrope"),
        ({"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, "type"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", **YARN}}, "differ"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "alpha"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}}, "original_max"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 1, "beta_slow": 2}}, "beta_fast"),
        ({"rope_scaling": {"type": "yarn", **YARN, "attention_factor": -1}}, "attention_factor"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": 1}}, "truncate"),
        ({"rope_scaling": {"type": "yarn", **YARN, "original_max_position_embeddings": 0}}, "original_max_position"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, "differ"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "rope_theta"),  # 10000 outside
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
         "layer types"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": -10000.0}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
    ],
)  # fmt: skip
def test_refused_naming_the_key(changes, key):
    with pytest.raises(ConfigError, match=key):
        parse(**changes)


VALUES = st.none() | st.booleans() | st.floats() | st.integers(-2, 300) | st.sampled_from(["yarn", "llama3", "x"])
ROPE_KEYS = [
    "type",
    "rope_type",
    "rope_theta",
    *LLAMA3,
    "beta_fast",
    "beta_slow",
    "mscale",
    "truncate",
    "attention_factor",
]


@settings(max_examples=5000 if FULL else 200, deadline=None)
@given(
    st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]),
    st.dictionaries(st.sampled_from(ROPE_KEYS), VALUES, max_size=4),
)
def test_any_values_give_finite_settings_or_a_config_error(kind, changes):
    base = {"rope_type": kind, **(LLAMA3 if kind == "llama3" else {} if kind == "default" else {"factor": 2.0})}
    try:
        got = rope(rope_theta=None, rope_scaling=base | changes)
    except ConfigError:
        return
    assert 1 < got.theta < float("inf")
    assert 1 <= got.factor < float("inf")
    assert got.low_freq_factor < got.high_freq_factor
    assert got.beta_fast > got.beta_slow > 0
    if got.kind in ("dynamic", "llama3", "yarn"):
        assert got.original_max_position is not None

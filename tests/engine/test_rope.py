"""The rope tables against transformers (rope_golden.npz) and closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from make_rope_golden import CASES, POSITIONS

from engine.config import RopeConfig
from engine.errors import ConfigError
from engine.rope import attention_scaling, inverse_frequencies, rope_table

RENAMED = {"rope_type": "kind", "rope_theta": "theta", "original_max_position_embeddings": "original_max_position"}


def config(name: str) -> tuple[int, RopeConfig]:
    head_dim, rope = CASES[name]
    values = {RENAMED.get(key, key): value for key, value in rope.items()}
    if values["kind"] == "dynamic":
        values["original_max_position"] = 2048
    return head_dim, RopeConfig(**values)


@pytest.mark.parametrize("name", CASES)
def test_tables_are_those_of_transformers(name):
    """To 2e-7 (two units of a cosine) even at position 100,000, where an inverse frequency that is rounded otherwise
    than in transformers is off by up to 1e-2. torch's float32 pow is not correctly rounded, so one frequency in fifty
    may be a unit off, and its column then by that much times the angle."""
    head_dim, rope = config(name)
    golden = np.load(Path(__file__).with_name("rope_golden.npz"))
    cos, sin = rope_table(rope, head_dim, 100001)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == (100001, head_dim // 2)
    one_off = 2e-7 + 1.3e-7 * np.array(POSITIONS)[:, None] * inverse_frequencies(rope, head_dim)
    for table, part in ((cos, "cos"), (sin, "sin")):
        error = np.abs(table[POSITIONS] - golden[f"{name}.{part}"])
        assert (error <= one_off).all()
        assert (error > 2e-7).mean() <= 0.02


def test_default_frequencies_are_powers_of_theta():
    inv_freq = inverse_frequencies(RopeConfig(theta=10000.0, kind="default"), 8)
    np.testing.assert_allclose(inv_freq, [1, 0.1, 0.01, 0.001], rtol=1e-7)


def test_llama3_keeps_fast_and_divides_slow_frequencies():
    _, rope = config("llama31")
    plain, scaled = (inverse_frequencies(RopeConfig(5e5, "default"), 128), inverse_frequencies(rope, 128))
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 2048 / 4, wavelength > 2048
    np.testing.assert_array_equal(scaled[fast], plain[fast])
    np.testing.assert_allclose(scaled[slow], plain[slow] / 8, rtol=1e-7)
    assert fast.any() and slow.any() and (~fast & ~slow).any()


def test_yarn_attention_scaling():
    assert attention_scaling(config("yarn")[1]) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_scaling(config("yarn_attention_factor")[1]) == 1.25
    assert attention_scaling(config("default")[1]) == 1.0
    assert attention_scaling(RopeConfig(1e4, "yarn", factor=0.5, original_max_position=10)) == 1.0


def test_a_dynamic_position_does_not_depend_on_the_table_length():
    head_dim, rope = config("dynamic")
    short, long = rope_table(rope, head_dim, 2500), rope_table(rope, head_dim, 9000)
    plain = rope_table(RopeConfig(10000.0, "default"), head_dim, 2048)
    for a, b, c in zip(short, long, plain):
        np.testing.assert_array_equal(a, b[:2500])
        np.testing.assert_array_equal(a[:2048], c)
        assert not np.array_equal(b[2048], rope_table(RopeConfig(10000.0, "default"), head_dim, 2049)[0][2048])


def test_what_cannot_be_computed_is_refused():
    with pytest.raises(ConfigError, match="even number"):
        rope_table(RopeConfig(1e4, "default"), 63, 10)
    for kind in ("dynamic", "llama3", "yarn"):
        with pytest.raises(ConfigError, match="original_max_position"):
            rope_table(RopeConfig(1e4, kind, factor=2.0), 64, 10)
    with pytest.raises(ConfigError, match="not supported"):
        rope_table(RopeConfig(1e4, "longrope"), 64, 10)

"""Philox4x32-10 against its authors' vectors and, through a generic implementation, against numpy's Philox4x64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from engine.rng import philox4x32, token_bits

# Random123, tests/kat_vectors: rounds, counter (4), key (2), output (4).
KNOWN_ANSWERS = """
7  00000000 00000000 00000000 00000000 00000000 00000000 5f6fb709 0d893f64 4f121f81 4f730a48
7  ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 5207ddc2 45165e59 4d8ee751 8c52f662
7  243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 4dfccaba 190a87f0 c47362ba b6b5242a
10 00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
10 ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
10 243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
""".strip().splitlines()


def parse(line: str) -> tuple[int, list[int]]:
    rounds, *words = line.split()
    return int(rounds), [int(word, 16) for word in words]


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_known_answers_of_random123(line):
    rounds, words = parse(line)
    assert list(philox4x32(tuple(words[:4]), tuple(words[4:6]), rounds)) == words[6:]


def generic_philox4(counter, key, width, multipliers, weyl, rounds=10):
    """Philox 4xW from section 3.3 of the paper, for any word size: an oracle that numpy can check at W = 64."""
    mask = (1 << width) - 1
    x, k = list(counter), list(key)
    for _ in range(rounds):
        low0, high0 = (multipliers[0] * x[0]) & mask, (multipliers[0] * x[0]) >> width
        low1, high1 = (multipliers[1] * x[2]) & mask, (multipliers[1] * x[2]) >> width
        x = [high1 ^ x[1] ^ k[0], low1, high0 ^ x[3] ^ k[1], low0]
        k = [(k[0] + weyl[0]) & mask, (k[1] + weyl[1]) & mask]
    return x


WORDS64 = st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4)
WORDS32 = st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4)


@given(WORDS64.filter(lambda w: w[0] > 0), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_the_generic_oracle_is_numpys_philox(counter, k0, k1):
    start = [counter[0] - 1, *counter[1:]]  # numpy increments the counter before it uses it
    generator = np.random.Philox(counter=np.array(start, np.uint64), key=np.array([k0, k1], np.uint64))
    multipliers, weyl = (0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
    assert generic_philox4(counter, (k0, k1), 64, multipliers, weyl) == generator.random_raw(4).tolist()


@given(WORDS32, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(1, 16))
def test_philox4x32_is_the_generic_oracle_at_32_bits(counter, k0, k1, rounds):
    multipliers, weyl = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
    expected = generic_philox4(counter, (k0, k1), 32, multipliers, weyl, rounds)
    assert list(philox4x32(tuple(counter), (k0, k1), rounds)) == expected


def test_token_bits_places_seed_choice_and_position_as_documented():
    # The third vector's words as an input in our layout: key = seed low, high; counter = position, choice, 0, 0.
    out = philox4x32((0x243F6A88, 0x85A308D3, 0, 0), (0xA4093822, 0x299F31D0))
    assert token_bits(0x299F31D0_A4093822, 0x85A308D3, 0x243F6A88) == out[0] << 32 | out[1]
    assert token_bits(0, 0, 0) == 0x6627E8D5_E169C58D  # first two words of the all-zero vector


def test_neighbouring_seeds_choices_and_positions_never_share_a_draw():
    draws = [token_bits(s, c, p) for s, c, p in itertools.product(range(20), range(20), range(50))]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_uniform_and_uncorrelated_along_each_axis(axis):
    draws = np.array([token_bits(**{"seed": 1, "choice": 2, "position": 3, axis: i}) / 2**64 for i in range(16_384)])
    counts, _, _ = np.histogram2d(draws[:-1:2], draws[1::2], bins=16, range=[[0, 1], [0, 1]])
    assert scipy.stats.chisquare(counts.ravel()).pvalue > 1e-4  # pairs of neighbours, uniform over the square


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (2**64, 0, 0), (0, -1, 0), (0, 2**32, 0), (0, 0, -1), (0, 0, 2**32)])
def test_out_of_range_is_refused(arguments):
    with pytest.raises(ValueError, match="must be in"):
        token_bits(*arguments)

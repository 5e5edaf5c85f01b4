"""The fast paths give exactly the documented definition: full sort, Python integers, weights of scalar arithmetic."""

from __future__ import annotations

import functools
import math
import os
import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_oracle import make_params

import engine.sampler
from engine.fixed_softmax import MAX_VOCAB, SCALE_BITS, log_sum_exp, softmax_weights
from engine.rng import token_bits
from engine.sampler import SampleState, sample

FULL = os.environ.get("APPLIANCE_FULL") == "1"
ONE = 1 << SCALE_BITS


def scalar_weight(logit: float, top: float, temperature: float) -> int:
    """The docstring of softmax_weights in Python floats: IEEE doubles, each operation rounded once, no vector unit."""
    z = max((logit - top) / temperature, -32.0)
    n = round(z * -92.33248261893243)  # half to even, as rint
    r = z + n * (0.6931471805599453 / 64)
    p = r * (1 / 120)
    for coefficient in (1 / 24, 1 / 6, 0.5, 1.0):
        p = (p + coefficient) * r
    p += 1.0
    return round(power_of_two(n) * p)


@functools.cache
def power_of_two(n: int) -> float:
    """2**(44 - n / 64), correctly rounded."""
    with localcontext() as context:
        context.prec = 60
        return float(Decimal(2) ** (Decimal(SCALE_BITS) - Decimal(n) / 64))


def definition_token(row: np.ndarray, weights: np.ndarray, params, choice: int, position: int) -> int:
    """Steps 6-10 of engine/sampler.py by a full sort and Python integers."""
    top = float(row.max())
    rank = [int(i) for i in np.lexsort((np.arange(len(row)), -row))]
    if params.min_p > 0:
        threshold = np.float32(top + params.temperature * math.log(params.min_p))
        rank = [i for i in rank if row[i] >= threshold]
    if 0 < params.top_k < len(rank):
        rank = rank[: params.top_k]
    if params.top_p < 1:
        total, running = sum(int(weights[i]) for i in rank), 0
        share = math.ceil(params.top_p * 2**53)
        for count, i in enumerate(rank, 1):
            running += int(weights[i])
            if running * 2**53 >= share * total:
                rank = rank[:count]
                break
    r = token_bits(params.seed, choice, position) * sum(int(weights[i]) for i in rank) >> 64
    running = 0
    for i in sorted(rank):
        running += int(weights[i])
        if running > r:
            return i
    raise AssertionError("r is beyond the total")


def check_row(row: np.ndarray, params, draws: int) -> None:
    weights = softmax_weights(row, float(row.max()), params.temperature)
    state = SampleState(params, [], len(row), 1)
    for position in range(draws):
        state.num_generated = position
        assert sample(row[None, :], [state])[0].token_id == definition_token(row, weights, params, 1, position)


ROWS = {
    "peaked": lambda rng, n: rng.normal(0, 3, n) + 12 * (rng.random(n) < 0.01),
    "flat": lambda rng, n: rng.normal(0, 0.1, n),
    "equal": lambda rng, n: np.zeros(n),
    "ties": lambda rng, n: np.round(rng.normal(0, 1, n)),
    "two values": lambda rng, n: np.where(rng.random(n) < 0.5, 1.0, 2.0),
    "some -inf": lambda rng, n: np.where(rng.random(n) < 0.3, -np.inf, rng.normal(0, 1, n)),
    "only one finite": lambda rng, n: np.where(np.arange(n) == n // 2, 3.0, -np.inf),
    "huge": lambda rng, n: rng.choice([-3e38, 3e38, 1e38, 0.0], n),
    "tiny steps": lambda rng, n: 1000 + rng.integers(0, 5, n) * 6e-5,
    "cauchy": lambda rng, n: rng.standard_cauchy(n),
    "clumped": lambda rng, n: np.where(rng.random(n) < 0.9, rng.normal(0, 1e-6, n), rng.normal(-15, 5, n)),
}
FILTERS = [
    {},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.99999},
    {"top_p": 1e-12},
    {"top_k": 50, "top_p": 0.9},
    {"min_p": 0.3},
    {"min_p": 0.01, "top_k": 700, "top_p": 0.7},
]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("size", [1, 2, 700, 5000])
def test_fast_paths_equal_the_full_sort(kind, size):
    rng = np.random.default_rng(size)
    row = ROWS[kind](rng, size).astype(np.float32)
    if not np.isfinite(row.max()):
        row[0] = 0
    for options in FILTERS:
        for temperature in (1.0, 0.1, 1.7):
            check_row(row, make_params(seed=size, temperature=temperature, **options), 16 if FULL else 3)


@pytest.mark.parametrize("kind", ["peaked", "flat", "ties"])
def test_fast_paths_equal_the_full_sort_at_a_real_vocabulary(kind):
    row = ROWS[kind](np.random.default_rng(1), 49_152).astype(np.float32)
    for options in FILTERS:
        check_row(row, make_params(**options), 8 if FULL else 2)


@settings(deadline=None)
@given(
    st.lists(
        st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100) | st.integers(-3, 3), min_size=1
    ),
    st.floats(1e-5, 1e6),
    st.floats(0, 1, exclude_min=True),
    st.integers(0, 12),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
)
def test_any_row_and_any_parameters_equal_the_full_sort(values, temperature, top_p, top_k, min_p, seed):
    params = make_params(seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    check_row(np.array(values, np.float32), params, 2)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_ends_of_the_random_range_give_the_first_and_the_last_kept_token(options, monkeypatch):
    """u = 0 must not choose a token of weight 0 before the first, u just below 1 none after the last."""
    row = ROWS["some -inf"](np.random.default_rng(6), 2000).astype(np.float32)
    row[[0, -1]] = -np.inf
    params = make_params(**options)
    drawn = {}
    for bits in (0, 2**64 - 1):
        for module in (engine.sampler, sys.modules[__name__]):
            monkeypatch.setattr(module, "token_bits", lambda *_, bits=bits: bits)
        check_row(row, params, 1)
        drawn[bits] = sample(row[None, :], [SampleState(params, [], 2000, 0)])[0].token_id
        assert np.isfinite(row[drawn[bits]])
    assert drawn[0] <= drawn[2**64 - 1]


@pytest.mark.parametrize("temperature", [1e30, 1e308])
def test_a_nucleus_at_an_absurd_temperature(temperature):
    row = ROWS["some -inf"](np.random.default_rng(7), 2000).astype(np.float32)
    check_row(row, make_params(temperature=temperature, top_p=0.4), 4)


def test_a_wrong_histogram_only_costs_time(monkeypatch):
    """Its sums are rounded floats, so its answer is checked: here it always points to a wrong bin."""
    monkeypatch.setattr(engine.sampler, "_histogram", lambda bins, weights: np.zeros(engine.sampler._BINS))
    row = ROWS["flat"](np.random.default_rng(2), 3000).astype(np.float32)
    check_row(row, make_params(top_p=0.9), 2)


def test_weights_are_the_scalar_definition_bit_for_bit():
    rng = np.random.default_rng(3)
    # Most of them near the top, where the last bit of any step shows in the weight.
    logits = np.concatenate([rng.uniform(37, 40, 9000), rng.normal(0, 12, 1000), [-np.inf, -3e38, 40.0]])
    logits = np.minimum(logits, 40.0).astype(np.float32)
    for temperature in (1.0, 0.3, 1.9):
        expected = [scalar_weight(logit, 40.0, temperature) for logit in logits.tolist()]
        assert softmax_weights(logits, 40.0, temperature).tolist() == expected


def test_weights_are_the_exponential_to_one_unit():
    """Against 50-digit decimal arithmetic; one unit is 2**-44 of the most probable token."""
    rng = np.random.default_rng(4)
    logits = np.concatenate([-np.geomspace(1e-8, 40, 1500), -rng.uniform(0, 33, 1500), [0.0]]).astype(np.float32)
    for temperature in (1.0, 0.7):
        weights = softmax_weights(logits, 0.0, temperature)
        with localcontext() as context:
            context.prec = 50
            for logit, weight in zip(logits.tolist(), weights.tolist()):
                exact = (Decimal(logit) / Decimal(temperature)).exp() * ONE
                assert abs(weight - exact) <= 1
    assert int(weights[-1]) == ONE


def test_weights_do_not_depend_on_place_or_alignment():
    logits = np.random.default_rng(5).normal(0, 5, 20_000).astype(np.float32)
    top = float(logits.max())
    whole = softmax_weights(logits, top, 0.8)
    for start, stop in [(0, 1), (1, 8), (3, 8195), (8191, 8193), (19_999, 20_000)]:
        assert np.array_equal(softmax_weights(logits[start:stop], top, 0.8), whole[start:stop])


def test_largest_vocabulary_cannot_overflow():
    """All logits equal is the largest sum there can be."""
    row = np.zeros(MAX_VOCAB - 1, np.float32)
    total = int(softmax_weights(row, 0.0, 1.0).sum())
    assert total == (MAX_VOCAB - 1) * ONE < 2**63
    assert log_sum_exp(row, 0.0) == pytest.approx(math.log(MAX_VOCAB - 1), abs=1e-12)
    state = SampleState(make_params(top_p=0.5), [], MAX_VOCAB - 1, 0)
    assert 0 <= sample(row[None, :], [state])[0].token_id <= MAX_VOCAB // 2  # ties: the nucleus is the lower half
    with pytest.raises(ValueError, match="vocab_size must be in"):
        SampleState(make_params(), [], MAX_VOCAB, 0)

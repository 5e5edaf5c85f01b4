"""What comes out of the sampler is distributed as the papers say. Seeds are fixed: a test passes always or never."""

from __future__ import annotations

import os

import numpy as np
import pytest
from sampler_oracle import chi_square_p, draw_many, make_params, processed_logits, reference_probabilities

from engine.sampler import SampleState, sample

DRAWS = 50_000 if os.environ.get("APPLIANCE_FULL") == "1" else 2_000
ROW = np.random.default_rng(5).normal(0, 2, 60).astype(np.float32)

OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 60},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 1.5},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 0.02, "temperature": 1.3},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_k": 12, "top_p": 0.8, "temperature": 1.2},
    {"top_k": 5, "top_p": 0.95},
    {"logit_bias": {3: 5.0, 4: -100.0, 5: 100.0}, "temperature": 2.0},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7, "top_p": 0.9},
    {"min_tokens": 10**9, "eos_token_ids": (7,), "stop_token_ids": (int(ROW.argmax()),)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_follow_the_reference_distribution(options):
    prompt = [1, 2, 2, int(ROW.argmax()), int(ROW.argmin())]
    params = make_params(**options)
    counts = draw_many(ROW, params, DRAWS, prompt)
    assert chi_square_p(counts, reference_probabilities(ROW, params, prompt)) > 1e-3


def test_closed_form_of_four_tokens():
    """Logits ln 1, ln 2, ln 3, ln 4: probabilities 0.1 .. 0.4; with top_p 0.6 the nucleus is {3, 2}: 4/7 and 3/7."""
    row = np.log(np.array([1, 2, 3, 4], np.float32))
    assert chi_square_p(draw_many(row, make_params(), DRAWS), np.array([0.1, 0.2, 0.3, 0.4])) > 1e-3
    counts = draw_many(row, make_params(top_p=0.6), DRAWS)
    assert chi_square_p(counts, np.array([0, 0, 3 / 7, 4 / 7])) > 1e-3
    # At temperature 1/2 the weights are squared: 1, 4, 9, 16 of 30.
    squared = draw_many(row, make_params(temperature=0.5), DRAWS)
    assert chi_square_p(squared, np.array([1, 4, 9, 16]) / 30) > 1e-3


def test_the_chi_square_would_notice_a_small_error():
    """Power of the tests above: a temperature wrong by 10 %, or a nucleus with one token more, is rejected."""
    counts = draw_many(ROW, make_params(temperature=1.1), 5_000)
    assert chi_square_p(counts, reference_probabilities(ROW, make_params())) < 1e-3
    counts = draw_many(ROW, make_params(top_k=8), 5_000)
    with pytest.raises(AssertionError, match="outside the distribution"):
        chi_square_p(counts, reference_probabilities(ROW, make_params(top_k=7)))


def test_choices_are_independent_of_each_other():
    """Joint distribution of choice 0 and 1 at the same position is the product of the two (B-12: n children)."""
    row = np.log(np.array([1, 2, 3, 4], np.float32))[None, :]
    params = make_params()
    states = [SampleState(params, [], 4, choice) for choice in (0, 1)]
    joint = np.zeros((4, 4), np.int64)
    for _ in range(DRAWS):
        tokens = [result.token_id for result in sample(np.repeat(row, 2, 0), states)]
        joint[tuple(tokens)] += 1
        for state, token in zip(states, tokens):
            state.append(token)
    p = np.array([0.1, 0.2, 0.3, 0.4])
    assert chi_square_p(joint.ravel(), np.outer(p, p).ravel()) > 1e-3


@pytest.mark.parametrize("seed", range(8))
def test_penalised_greedy_follows_the_reference_step_by_step(seed):
    """A whole generation in float64, dense: every chosen token is its maximum (to float32 rounding)."""
    rng = np.random.default_rng(seed)
    vocab = 40
    params = make_params(
        temperature=0.0,
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        frequency_penalty=float(rng.uniform(-2, 2)),
        presence_penalty=float(rng.uniform(-2, 2)),
        logit_bias={int(i): float(rng.uniform(-3, 3)) for i in rng.integers(0, vocab, 5)},
        min_tokens=20,
        eos_token_ids=(3,),
        stop_token_ids=(5, 6, vocab + 10),
    )
    prompt = rng.integers(0, vocab, 10).tolist()
    state = SampleState(params, prompt, vocab, 0)
    reference_params = make_params(
        **{
            f: getattr(params, f) for f in params.__struct_fields__ if f not in ("seed", "max_tokens", "stop_token_ids")
        },
        stop_token_ids=(5, 6),
    )
    output: list[int] = []
    for _ in range(60):
        row = rng.normal(0, 2, vocab).astype(np.float32)
        token = sample(row[None, :], [state])[0].token_id
        expected = processed_logits(row, reference_params, prompt, output)
        assert expected[token] >= expected.max() - 1e-5
        state.append(token)
        output.append(token)
    assert not {3, 5, 6} & set(output[:20])

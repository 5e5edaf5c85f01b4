"""What a user or engine-core notices of the sampler: exactness, ties, limits, logprobs, errors of one row."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_oracle import make_params

from engine.errors import NumericError
from engine.sampler import LOGPROB_FLOOR, SampleState, sample, token_logprobs

VOCAB = 3000
INF = np.inf


def rows_of(count: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (count, vocab)).astype(np.float32)


def one(row, *, prompt=(), choice=0, output=(), **options):
    """Result of a single row; `output` are tokens generated before it."""
    row = np.asarray(row, np.float32)
    state = SampleState(make_params(**options), list(prompt), row.shape[0], choice)
    for token in output:
        state.append(token)
    return sample(row[None, :], [state])[0]


MIX = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 5},
    {"temperature": 0.0, "top_p": 0.5, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2, "logprobs": 0},
    {"temperature": 0.0, "frequency_penalty": 1.0, "logit_bias": {5: 3.0}},
    {"temperature": 1.5, "min_tokens": 10, "eos_token_ids": (1, 2)},
]


def states_of(options_list, vocab=VOCAB) -> list[SampleState]:
    states = []
    for i, options in enumerate(options_list):
        state = SampleState(make_params(seed=100 + i, **options), [1, 2, 3, i], vocab, i % 2)
        for token in range(i):
            state.append(token)
        states.append(state)
    return states


# ---- exactness ------------------------------------------------------------------------------------------------------


def test_a_row_alone_and_in_any_batch_gives_the_same_bits():
    """B-27: greedy and sampled rows mixed, with rows of -inf, NaN and +inf among them, in any order."""
    logits = rows_of(len(MIX))
    logits[:, ::3] = -INF
    alone = [sample(logits[i : i + 1], [state])[0] for i, state in enumerate(states_of(MIX))]
    assert all(result.error is None for result in alone)
    bad = rows_of(3, seed=9)
    bad[0, 7], bad[1, :], bad[2, 9] = np.nan, -INF, INF
    everything = np.concatenate([logits, bad])
    options = [*MIX, MIX[0], MIX[1], MIX[3]]
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(everything))
        states = states_of(options)
        results = sample(everything[order], [states[i] for i in order])
        for place, i in enumerate(order):
            if i < len(MIX):
                assert results[place] == alone[i]
            else:
                assert results[place].error is not None


def test_layout_of_the_logits_in_memory_does_not_matter():
    logits = rows_of(len(MIX))
    expected = sample(logits, states_of(MIX))
    wide = np.zeros((len(MIX), 2 * VOCAB + 1), np.float32)
    wide[:, 1::2][:, :VOCAB] = logits  # every second column, from an odd offset
    assert sample(wide[:, 1::2], states_of(MIX)) == expected
    assert sample(np.asfortranarray(logits), states_of(MIX)) == expected


def test_logits_and_states_are_only_read():
    logits = rows_of(len(MIX))
    logits.flags.writeable = False
    states = states_of(MIX)
    assert sample(logits, states) == sample(logits, states)


def test_same_seed_same_text_whatever_happened_in_between():
    """A generation rebuilt from its tokens (preemption, B-35; replay on another GPU) goes on the same."""
    options = {"temperature": 1.3, "repetition_penalty": 1.1, "presence_penalty": 0.5, "top_p": 0.95}
    logits = rows_of(30)

    def generate(rebuild_at):
        state = SampleState(make_params(seed=7, **options), [4, 5], VOCAB, 0)
        tokens = []
        for i, row in enumerate(logits):
            if i == rebuild_at:
                state = SampleState(make_params(seed=7, **options), [4, 5], VOCAB, 0)
                for token in tokens:
                    state.append(token)
            tokens.append(sample(row[None, :], [state])[0].token_id)
            state.append(tokens[-1])
        return tokens

    assert generate(None) == generate(11) == generate(29)


def test_choices_and_seeds_differ_and_repeat():
    """B-12: the n children differ, are reproducible, and choice 1 of a seed is not choice 0 of the next."""

    def text(seed, choice):
        state = SampleState(make_params(seed=seed), [], 50, choice)
        tokens = []
        for _ in range(20):
            tokens.append(sample(np.zeros((1, 50), np.float32), [state])[0].token_id)
            state.append(tokens[-1])
        return tuple(tokens)

    texts = [text(seed, choice) for seed in (0, 1, 2**64 - 1) for choice in range(4)]
    assert len(set(texts)) == 12
    assert texts == [text(seed, choice) for seed in (0, 1, 2**64 - 1) for choice in range(4)]


# ---- greedy, ties and limits ----------------------------------------------------------------------------------------


def test_greedy_ties_go_to_the_lowest_id():
    assert one([1, 3, 2, 3], temperature=0.0).token_id == 1
    assert one([-0.0, 0.0], temperature=0.0).token_id == 0
    assert one([-INF, -5, -5], temperature=0.0).token_id == 1
    assert one([1, 3, 2, 3], temperature=0.0, logit_bias={0: 2.0}).token_id == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 9.9e-6])
def test_tiny_temperature_is_greedy_whatever_the_filters(temperature):
    row = [0, 1e-3, 1e-3, 0]
    for seed in range(20):
        assert one(row, seed=seed, temperature=temperature, top_p=0.9, top_k=3, min_p=0.1).token_id == 1


@pytest.mark.parametrize("temperature", [1e-5, 2e-5])
def test_the_lowest_sampling_temperature_is_stable(temperature):
    assert one([30000, -30000, 29999, -INF], temperature=temperature).token_id == 0
    assert {one([3e38, 3e38, -3e38], seed=s, temperature=temperature).token_id for s in range(40)} == {0, 1}


@pytest.mark.parametrize("temperature", [1e4, 1e38, 1e300])
def test_enormous_temperature_is_uniform_over_the_finite(temperature):
    drawn = {one([50, -INF, 0, -50], seed=s, temperature=temperature).token_id for s in range(60)}
    assert drawn == {0, 2, 3}


@pytest.mark.parametrize("options", [{"top_p": 1e-300}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-300, "top_k": 9}])
def test_narrowest_filters_keep_the_best_token(options):
    assert {one([1, 5, 4, 2], seed=s, **options).token_id for s in range(30)} == {1}


def test_filters_at_a_tie_keep_the_lower_ids():
    assert {one([2, 2, 2, 2], seed=s, top_k=2).token_id for s in range(40)} == {0, 1}
    assert {one([2, 2, 2, 2], seed=s, top_p=0.5).token_id for s in range(40)} == {0, 1}
    assert {one([2, 2, 2, 2], seed=s, top_p=0.51).token_id for s in range(60)} == {0, 1, 2}
    assert {one([2, 2, 2, 2], seed=s, min_p=1.0).token_id for s in range(60)} == {0, 1, 2, 3}


def test_top_k_of_the_vocabulary_or_more_is_off():
    row = rows_of(1, vocab=20)[0]
    for seed in range(20):
        assert len({one(row, seed=seed, temperature=2.0, top_k=k).token_id for k in (0, 20, 21, 10**9)}) == 1


def test_forbidden_tokens_are_never_drawn():
    row = np.full(50, -INF, np.float32)
    row[[3, 9]] = 0.0, -1.0
    for options in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 1e-9}, {"logit_bias": {5: 100.0}}):
        assert {one(row, seed=s, temperature=2.0, **options).token_id for s in range(40)} == {3, 9}


def test_a_vocabulary_of_one():
    for options in ({"temperature": 0.0}, {"top_k": 5, "top_p": 0.5, "min_p": 0.5, "logprobs": 3}):
        assert one([-7.0], **options).token_id == 0


# ---- min_tokens, penalties, bias ------------------------------------------------------------------------------------


def test_min_tokens_masks_eos_and_stop_ids_until_then():
    row = [1.0, 9.0, 8.0, 2.0]
    options = {"temperature": 0.0, "min_tokens": 3, "eos_token_ids": (1,), "stop_token_ids": (2, 77)}
    assert [one(row, output=[0] * n, **options).token_id for n in range(5)] == [3, 3, 3, 1, 1]
    assert one(row, **options, ignore_eos=True).token_id == 3
    # A bias cannot lift the mask, whatever its size.
    assert one(row, **options, logit_bias={1: 100.0}).token_id == 3


def test_repetition_penalty_covers_prompt_and_output_the_others_only_the_output():
    row = [2.0, 1.9, 1.8]
    assert one(row, temperature=0.0, prompt=[0], repetition_penalty=1.2).token_id == 1
    assert one(row, temperature=0.0, prompt=[0], output=[1], repetition_penalty=1.2).token_id == 2
    assert one(row, temperature=0.0, prompt=[0, 0, 0], presence_penalty=2.0, frequency_penalty=2.0).token_id == 0
    assert one(row, temperature=0.0, output=[0], presence_penalty=0.15).token_id == 1
    assert one(row, temperature=0.0, output=[0, 0, 1], frequency_penalty=0.15).token_id == 2
    # Negative logits are multiplied: a penalty must lower them too.
    assert one([-1.0, -1.1], temperature=0.0, prompt=[0], repetition_penalty=1.2).token_id == 1


def test_bias_comes_before_the_penalties_as_in_vllm():
    # (0.6 + 1.5) / 2 = 1.05 < 1.2; the other order, 0.6 / 2 + 1.5 = 1.8, would choose token 0.
    assert one([0.6, 1.2], temperature=0.0, prompt=[0], repetition_penalty=2.0, logit_bias={0: 1.5}).token_id == 1


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=6),
    st.floats(1e-320, 1e300),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(-100, 100),
    st.floats(0, 2),
)
@settings(deadline=None)
def test_no_finite_row_is_turned_into_an_error(values, repetition, presence, frequency, bias, temperature):
    """Penalties of huge logits saturate; they must not make an infinity that is then blamed on the model."""
    result = one(
        values,
        prompt=[0, 1],
        output=[1, 2, 2],
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={0: bias},
        logprobs=2,
    )
    assert result.error is None
    assert 0 <= result.token_id < len(values)


def test_penalty_counts_survive_many_distinct_tokens():
    """The sparse table grows: 300 distinct tokens, then the only one not yet used wins."""
    output = [i for i in range(301) if i != 200]
    assert one(np.zeros(301), temperature=0.0, output=output, presence_penalty=0.1).token_id == 200
    assert one(np.zeros(301), temperature=0.0, output=[*output, 200, 200], frequency_penalty=0.1).token_id == 0


# ---- logprobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 50, 49_152])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 1e4])
def test_logprobs_are_log_softmax_of_the_raw_logits(vocab, scale):
    row = (np.random.default_rng(vocab).normal(0, 1, vocab) * scale).astype(np.float32)
    expected = np.maximum(scipy.special.log_softmax(row.astype(np.float64)), LOGPROB_FLOOR)
    for token in {0, vocab // 2, vocab - 1, int(row.argmax())}:
        got = token_logprobs(row, token, min(20, vocab))
        assert got.token_id == token
        assert got.logprob == pytest.approx(expected[token], abs=1e-8, rel=1e-12)
        assert [i for i, _ in got.top] == np.argsort(-row, kind="stable")[:20].tolist()
        assert [value for _, value in got.top] == pytest.approx([expected[i] for i, _ in got.top], abs=1e-8, rel=1e-12)


def test_logprobs_ignore_temperature_filters_penalties_and_bias():
    row = rows_of(1, vocab=30)[0]
    plain = one(row, temperature=0.0, logprobs=4).logprob
    for options in (
        {"temperature": 2.0, "top_k": 3},
        {"repetition_penalty": 1.5, "prompt": [0, 1, 2]},
        {"logit_bias": {7: 100.0}, "temperature": 0.0},
        {"min_tokens": 5, "eos_token_ids": (plain.token_id,)},
    ):
        got = one(row, logprobs=4, **options)
        assert got.logprob.top == plain.top
        assert got.logprob == token_logprobs(row, got.token_id, 4)


def test_top_logprobs_ties_and_counts():
    row = np.array([1, 2, 2, 2, 0], np.float32)
    assert [i for i, _ in token_logprobs(row, 4, 2).top] == [1, 2]
    assert [i for i, _ in token_logprobs(row, 4, 4).top] == [1, 2, 3, 0]
    assert len(token_logprobs(row, 4, 99).top) == 5  # more than the vocabulary: all of it
    assert token_logprobs(row, 4, 0).top == []
    assert one(row, temperature=0.0).logprob is None
    assert one(row, temperature=0.0, logprobs=0).logprob.top == []


def test_logprobs_of_impossible_tokens_are_finite_json():
    row = np.array([0.0, -INF, -3e38], np.float32)
    got = token_logprobs(row, 1, 3)
    assert got.logprob == -9999.0
    assert [i for i, _ in got.top] == [0, 2, 1]
    json.dumps([got.logprob, got.top], allow_nan=False)
    assert math.copysign(1, got.top[0][1]) * got.top[0][1] == 0.0


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.5, "logprobs": 2}], ids=str)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({3: np.nan}, r"logits contain NaN: 1 of 10, the first at token id 3"),
        ({3: np.nan, 2: INF, 9: np.nan}, r"logits contain NaN: 2 of 10, the first at token id 3"),
        ({0: INF, 9: INF}, r"logits contain \+inf: 2 of 10, the first at token id 0"),
        (dict.fromkeys(range(10), -INF), r"all 10 logits are -inf"),
        ({**dict.fromkeys(range(10), -INF), 4: np.nan}, r"logits contain NaN: 1 of 10, the first at token id 4"),
    ],
    ids=["nan", "nan and inf", "inf", "all -inf", "-inf and nan"],
)
def test_bad_rows_are_named_with_their_position(options, damage, message):
    row = np.zeros(10, np.float32)
    for i, value in damage.items():
        row[i] = value
    result = one(row, prompt=[1, 2, 3], output=[4, 5], **options)
    assert (result.token_id, result.logprob) == (-1, None)
    with pytest.raises(AssertionError, match=f"^{message} \\(logits of the token at position 5, generated token 2\\)$"):
        raise AssertionError(result.error)
    with pytest.raises(NumericError, match=f"^{message}$"):
        token_logprobs(row, 0, 2)


def test_masking_the_only_possible_token_is_an_error_of_that_row():
    row = np.array([[-INF, 1.0]] * 2, np.float32)
    states = [SampleState(make_params(min_tokens=n, eos_token_ids=(1,)), [], 2, 0) for n in (1, 0)]
    masked, free = sample(row, states)
    assert "masked by min_tokens" in masked.error
    assert free.token_id == 1


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (np.zeros((1, 4), np.float64), "must be float32"),
        (np.zeros(4, np.float32), "must be float32"),
        (np.zeros((2, 4), np.float32), "2 rows of logits for 1 states"),
        (np.zeros((1, 5), np.float32), "5 columns, the state was made for 4"),
    ],
)
def test_logits_that_do_not_fit_are_refused(logits, message):
    with pytest.raises(ValueError, match=message):
        sample(logits, [SampleState(make_params(), [], 4, 0)])


def test_token_ids_outside_the_vocabulary_are_refused():
    for bad in (-1, 4):
        with pytest.raises(ValueError, match="in the prompt is outside"):
            SampleState(make_params(repetition_penalty=1.1), [0, bad], 4, 0)
        with pytest.raises(ValueError, match="in logit_bias is outside"):
            SampleState(make_params(logit_bias={bad: 1.0}), [], 4, 0)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            SampleState(make_params(), [], 4, 0).append(bad)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            token_logprobs(np.zeros(4, np.float32), bad, 1)
    with pytest.raises(ValueError, match="seed must be in"):
        SampleState(make_params(seed=-1), [], 4, 0)


def test_no_rows_no_results():
    assert sample(np.zeros((0, 4), np.float32), []) == []

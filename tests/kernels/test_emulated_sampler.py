"""The CUDA sampler on the emulator gives engine/sampler.py's tokens, logprob bits and error texts."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fixed_softmax import softmax_weights
from engine.sampler import SampleState
from engine.types import SamplingParams
from kernels.sampler import SamplerShape, pack_slot, pack_updates
from tests.kernels.cases_sampler import BAD_KINDS, KINDS, DeviceSampler, Row, check, check_random_requests, make_row
from tests.kernels.emulator import EmulatedExecutor

FULL = os.environ.get("APPLIANCE_FULL") == "1"


class EmulatedMachine:
    def __init__(self, seed: int = 0) -> None:
        self.executor = EmulatedExecutor(path="portable", seed=seed)
        self._arrays: dict[int, np.ndarray] = {}

    def zeros(self, num_bytes: int) -> int:
        array = self.executor.array(num_bytes, np.uint8)
        self._arrays[array.ctypes.data] = array
        return array.ctypes.data

    def write(self, address: int, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._arrays[address][: data.size] = data

    def read(self, address: int, shape, dtype) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._arrays[address][:size].copy().view(dtype).reshape(shape)

    def run(self, launch) -> None:
        self.executor.run(launch)


def make_device(vocab_size: int, rows: int = 8, seed: int = 0, **options) -> DeviceSampler:
    shape = SamplerShape(num_slots=rows + 1, vocab_size=vocab_size, max_rows=rows, max_edits=64, max_logprobs=20)
    return DeviceSampler(EmulatedMachine(seed), shape, **options)


def sampling(seed: int = 1, **options) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=100, **options)


def run_states(device: DeviceSampler, row: np.ndarray, states: list[SampleState], **options) -> list:
    device.set_slots(dict(enumerate(states)))
    return check(device, [Row(row, slot, state) for slot, state in enumerate(states)], **options)


FILTERS = [
    {},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 1e-12},
    {"top_k": 50, "top_p": 0.9},
    {"min_p": 0.3},
    {"min_p": 0.01, "top_k": 700, "top_p": 0.7},
    {"top_k": 3},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 700] + ([5000, 9000] if FULL else []))
def test_any_kind_of_row(kind, size):
    device = make_device(size, rows=len(FILTERS))
    for temperature, logprobs in ((1.0, 4), (0.1, None), (1.7, 20)):
        states = [
            SampleState(sampling(seed=size, temperature=temperature, logprobs=logprobs, **options), [], size, 1)
            for options in FILTERS
        ]
        run_states(device, make_row(kind, size, size), states)


LARGE = [
    {},
    {"top_p": 0.6},
    {"top_p": 0.97},
    {"top_k": 2500, "top_p": 0.9},
    {"top_k": 9000},
    {"top_k": 12_000, "top_p": 0.99},
    {"top_k": 12_000, "top_p": 0.2},
    {"top_k": 5000, "min_p": 0.001},
]


@pytest.mark.parametrize("kind", KINDS if FULL else ["peaked", "flat", "equal", "ties", "clumped", "far below"])
def test_rows_of_several_chunks_and_more_candidates_than_a_list_holds(kind):
    """Rows of 4 chunks of 8192 tokens; ties and nuclei beyond the 8192 entries of the list."""
    size = 30_001
    device = make_device(size, rows=len(LARGE))
    for temperature in (1.0, 0.7):
        states = [
            SampleState(sampling(seed=5, temperature=temperature, logprobs=20, **options), [], size, 0)
            for options in LARGE
        ]
        run_states(device, make_row(kind, 1, size), states)


@pytest.mark.parametrize("kind", BAD_KINDS)
@pytest.mark.parametrize("size", [1, 5, 3000])
def test_a_bad_row_is_an_error_of_that_row_only(kind, size):
    device = make_device(size, rows=4)
    good, bad = make_row("peaked", 1, size), make_row(kind, 2, size)
    options = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.0, "logprobs": 2}, {"temperature": 1.0})
    states = [SampleState(sampling(**item), [0], size, 0) for item in options]
    device.set_slots(dict(enumerate(states)))
    for wrong in range(4):
        for target in (None, 0):
            device.machine.executor.slot_errors[:] = 0  # a new step
            check(device, [Row(bad if slot == wrong else good, slot, states[slot], target=target) for slot in range(4)])
    entries = device.machine.executor.error_entries
    assert len(entries) == 8 and set(entries["code"]) == {5} and set(entries["position"]) == {7}


def test_a_row_whose_finite_logits_are_all_masked():
    size = 40
    row = np.full(size, -np.inf, np.float32)
    row[[3, 8]] = 1.0
    device = make_device(size, rows=3)
    states = [
        SampleState(sampling(temperature=t, min_tokens=2, stop_token_ids=(3, 8, 9), logprobs=k), [1, 2], size, 0)
        for t, k in ((0.0, None), (0.0, 1), (1.0, None))
    ]
    first = run_states(device, row, states)
    assert all("masked by min_tokens" in result.error for result in first)
    for state in states:
        state.num_generated = 2
    device.machine.executor.clear_errors()
    second = check(device, [Row(row, slot, state) for slot, state in enumerate(states)])
    assert [result.token_id for result in second][:2] == [3, 3]


def test_errors_of_earlier_kernels_fail_the_row():
    device = make_device(50, rows=2)
    states = [SampleState(sampling(), [], 50, 0) for _ in range(2)]
    device.set_slots(dict(enumerate(states)))
    device.machine.executor.slot_errors[1] = 1 << 4
    row = make_row("peaked", 1, 50)
    good, bad = device.step([Row(row, 0, states[0]), Row(row, 1, states[1])])
    assert good.error is None and good.token_id >= 0
    assert bad.token_id == -1 and "reported NaN or Inf" in bad.error
    assert "reported NaN or Inf" in device.step([Row(row, 1, states[1], target=3)])[0]


def test_a_target_outside_the_vocabulary():
    device = make_device(50, rows=1)
    state = SampleState(sampling(), [], 50, 0)
    device.set_slots({0: state})
    for target in (50, -1):
        with pytest.raises(ValueError, match=f"token id {target} is outside the vocabulary"):
            device.step([Row(make_row("peaked", 1, 50), 0, state, target=target)])


@settings(deadline=None, max_examples=1000 if FULL else 100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.sampled_from(sorted(KINDS)), st.integers(0, 5))
def test_random_requests_over_many_steps(seed, vocab_size, kind, order):
    device = make_device(vocab_size, rows=5, seed=order, num_multiprocessors=(1, 132)[seed % 2])
    check_random_requests(device, seed, 4, kinds=[kind])


def test_penalties_on_counts_of_many_steps_and_after_a_rebuild():
    """Few tokens, so that they repeat; then the slot is given to another and the first returns elsewhere."""
    size = 30
    device = make_device(size, rows=3, update_words=256)
    params = sampling(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    state = SampleState(params, [1, 2, 2, 3], size, 0)
    other = SampleState(sampling(temperature=0.9, frequency_penalty=2.0), [4], size, 0)
    device.set_slots({0: state})
    for step in range(60):
        row = make_row("peaked", step, size)
        if step == 30:  # preempted and back; its old slot has another tenant, with the counts of nobody
            device.set_slots({0: other, 2: state})
        slot = 0 if step < 30 else 2
        rows = [Row(row, slot, state)] + ([Row(row, 0, other)] if step >= 30 else [])
        for item, result in zip(rows, check(device, rows)):
            item.state.append(result.token_id)
    assert state.penalised()[1].max() > 1


def test_bias_and_penalties_saturate():
    size = 12
    row = np.array([3.4e38, -3.4e38, -np.inf, 0, 1, -1, 3e38, -3e38, -np.inf, 5, 6, 7], np.float32)
    bias = {0: 100.0, 1: -100.0, 2: 100.0, 9: -100.0}
    device = make_device(size, rows=4)
    states = [
        SampleState(
            sampling(temperature=t, repetition_penalty=r, presence_penalty=-2.0, frequency_penalty=f, logit_bias=bias),
            list(range(size)),
            size,
            0,
        )
        for t, r, f in ((0.0, 0.01, -2.0), (1.0, 10.0, 2.0), (1e30, 0.01, 2.0), (0.0, 1.0, 0.0))
    ]
    for state in states:
        for token in (0, 1, 2, 6, 7, 7):
            state.append(token)
    run_states(device, row, states)


@pytest.mark.parametrize("seed", range(4 if FULL else 2))
def test_the_split_over_blocks_never_shows(seed):
    """Blocks and threads in another order, another number of them: one answer."""
    size = 9000
    row = make_row("ties", 3, size)
    answers = []
    for multiprocessors in (1, 132):
        device = make_device(size, rows=1, seed=seed, num_multiprocessors=multiprocessors)
        state = SampleState(sampling(top_p=0.8, logprobs=5), [], size, 0)
        answers.append(run_states(device, row, [state]))
    assert answers[0] == answers[1]


def test_greedy_only_needs_one_kernel_and_takes_the_lowest_of_equals():
    size = 5000
    device = make_device(size, rows=4)
    states = [SampleState(sampling(temperature=0.0, min_tokens=i, stop_token_ids=(7,)), [], size, 0) for i in range(3)]
    row = np.full(size, -1.0, np.float32)
    row[[7, 4000, 4999]] = [0.0, -0.0, 0.0]
    assert not any(pack_slot(device.shape, state).needs_more for state in states)
    assert [r.token_id for r in run_states(device, row, states, greedy_only=True)] == [7, 4000, 4000]


def test_weights_are_those_of_fixed_softmax_bit_for_bit():
    """Totals of single tokens beside a top that is known: every entry of the power table, divisions of all kinds."""
    rng = np.random.default_rng(1)
    device = make_device(2, rows=8)
    for logit in -rng.uniform(0, 33, 400 if FULL else 60).astype(np.float32):
        rows = []
        for slot in range(8):
            state = SampleState(sampling(logprobs=0), [], 2, 0)
            rows.append(Row(np.array([0, logit * (slot + 1) / 8], np.float32), slot, state, target=1))
        device.set_slots({row.slot: row.state for row in rows})
        check(device, rows)
        for row in rows:
            assert softmax_weights(row.logits, 0.0, 1.0)[1] <= 1 << 44


def test_padding_rows_do_nothing():
    device = make_device(100, rows=4)
    before = device.last_tokens().copy()
    assert device.step([None] * 4) == [None] * 4
    assert np.array_equal(device.last_tokens(), before)


def test_updates_larger_than_the_buffer_are_continued():
    size = 3000
    shape = SamplerShape(num_slots=3, vocab_size=size, max_rows=2, max_edits=64, max_logprobs=5)
    params = sampling(repetition_penalty=2.0, logit_bias={5: 1.0, 6: -2.0})
    state = SampleState(params, list(range(0, size, 2)), size, 0)
    small = SampleState(sampling(temperature=0.0), [], size, 0)
    packed = [(0, pack_slot(shape, state)), (1, pack_slot(shape, small))]
    buffers = pack_updates(packed, 500)
    assert len(buffers) > 6 and all(buffer.size <= 500 for buffer, _ in buffers)
    with pytest.raises(ValueError, match="too small for 2 edits and a token"):
        pack_updates(packed, 36)
    device = DeviceSampler(EmulatedMachine(), shape, update_words=500)
    run_states(device, make_row("peaked", 1, size), [state, small])


def test_limits_of_the_shape_are_told():
    with pytest.raises(ValueError, match="at most 2047 together on a GPU"):
        SamplerShape(num_slots=2, vocab_size=10, max_rows=1, max_edits=2048, max_logprobs=5)
    shape = SamplerShape(num_slots=2, vocab_size=10, max_rows=1, max_edits=2, max_logprobs=5)
    with pytest.raises(ValueError, match="3 ids with a bias or masked"):
        params = sampling(logit_bias={1: 1.0, 2: 1.0}, min_tokens=1, stop_token_ids=(4,))
        pack_slot(shape, SampleState(params, [], 10, 0))
    with pytest.raises(ValueError, match="6 logprobs"):
        pack_slot(shape, SampleState(sampling(logprobs=6), [], 10, 0))

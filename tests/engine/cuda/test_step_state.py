"""What the host uploads for a step: unpacked again by a reader that follows the words of the layout, and who gets which
slot as sequences come, end, and are preempted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.step_state import HEADER_WORDS, SlotTable, StepLimits, StepRecords, pack
from engine.sequence import SeqState, Sequence

WORD = st.integers(-(2**31), 2**31 - 1)
RECORD = st.tuples(WORD, WORD, WORD, WORD)


def unpack(words: np.ndarray) -> dict[str, Any]:
    """The module docstring, read literally."""
    names = ("decode", "items", "tokens", "tiles", "logits", "runs")
    counts = dict(zip(names, words[2:8].tolist()))
    starts = dict(zip((*names[:2], "tokens", "tiles", "logits", "runs", "pages"), words[8:15].tolist()))
    widths = {"decode": 4, "items": 4, "tokens": 1, "tiles": 2, "logits": 4, "runs": 4}
    found = {name: words[starts[name] : starts[name] + counts[name] * widths[name]].reshape(-1, widths[name])
             for name in names}  # fmt: skip
    assert all(start % 4 == 0 for start in starts.values())
    return {**{name: array.tolist() for name, array in found.items()}, "pages": words[starts["pages"] : words[15]]}


@settings(max_examples=60, deadline=None)
@given(
    decode=st.lists(RECORD, max_size=5),
    items=st.lists(RECORD, max_size=3),
    tokens=st.lists(WORD, max_size=9),
    tiles=st.lists(st.tuples(WORD, WORD), max_size=5),
    logits=st.lists(RECORD, max_size=5),
    runs=st.lists(RECORD, max_size=3),
    pages=st.lists(WORD, max_size=9),
)
def test_what_is_packed_can_be_read_back(**sections: Any) -> None:
    records = StepRecords(
        7, sections["decode"], sections["items"], np.array(sections["tokens"], np.int32),
        np.array(sections["tiles"], np.int32).reshape(-1, 2), sections["logits"], sections["runs"], sections["pages"],
    )  # fmt: skip
    out = np.full(300, 0x7777, np.int32)
    used = pack(records, out)
    assert used % 4 == 0 and used == out[15] and out[0] == 1 and out[1] == 7
    assert np.all(out[used:] == 0x7777)
    found = unpack(out[:used])
    for name in ("decode", "items", "tiles", "logits", "runs"):
        assert [tuple(record) for record in found[name]] == [tuple(record) for record in sections[name]]
    assert [value for (value,) in found["tokens"]] == sections["tokens"]
    assert found["pages"][: len(sections["pages"])].tolist() == sections["pages"]


def test_an_upload_that_does_not_fit_is_refused() -> None:
    records = StepRecords(1, [(0, 0, 0, 0)] * 10, [], np.zeros(0, np.int32), np.zeros((0, 2), np.int32), [], [], [])
    with pytest.raises(ValueError, match="limits"):
        pack(records, np.zeros(HEADER_WORDS + 39, np.int32))
    assert pack(records, np.zeros(HEADER_WORDS + 40, np.int32)) == HEADER_WORDS + 40


def test_the_largest_step_fits_its_limits() -> None:
    """Everything at its limit at once."""
    limits = StepLimits(max_slots=7, table_width=9, num_pages=50, max_rows=33, max_decode_rows=8, max_logits_rows=41,
                        max_tiles=13)  # fmt: skip
    record = (0, 0, 0, 0)
    records = StepRecords(
        1, [record] * 8, [record] * 7, np.zeros(33, np.int32), np.zeros((13, 2), np.int32), [record] * 41,
        [record] * 7, [0] * (7 * 9),
    )  # fmt: skip
    assert pack(records, np.zeros(limits.upload_words(), np.int32)) <= limits.upload_words()


def sequence(seq_id: int, pages: list[int]) -> Sequence:
    seq = Sequence(seq_id, [1, 2, 3], max_tokens=5)
    seq.state = SeqState.RUNNING
    seq.block_table = list(pages)
    return seq


def test_a_sequence_keeps_its_slot_and_sends_each_page_once() -> None:
    table = SlotTable(3)
    a, b = sequence(1, [10, 11]), sequence(2, [20])
    slot, new = table.assign(a)
    assert new and table.new_pages(slot) == (0, [10, 11])
    other, _ = table.assign(b)
    assert other != slot
    a.block_table.append(12)
    assert table.assign(a) == (slot, False)
    assert table.new_pages(slot) == (2, [12])
    assert table.new_pages(slot) == (3, [])


def test_slots_of_the_ended_and_the_preempted_are_taken_when_needed() -> None:
    table = SlotTable(2)
    a, b, c, d = (sequence(i, [i]) for i in range(4))
    slots = {table.assign(a)[0], table.assign(b)[0]}
    assert slots == {0, 1}
    with pytest.raises(ValueError, match="more than 2 sequences"):
        table.assign(c)
    a.state = SeqState.FINISHED
    slot, new = table.assign(c)
    assert new and slot in slots
    b.state = SeqState.DRAINING
    assert table.assign(d)[0] == (slots - {slot}).pop()


def test_a_preempted_sequence_starts_again_from_its_first_page() -> None:
    table = SlotTable(2)
    a = sequence(1, [10, 11])
    slot, _ = table.assign(a)
    table.new_pages(slot)
    a.state, a.num_preemptions, a.block_table = SeqState.RUNNING, 1, [30]
    again, new = table.assign(a)
    assert new and table.new_pages(again) == (0, [30])


def test_a_refused_upload_is_sent_again() -> None:
    table = SlotTable(2)
    a = sequence(1, [10, 11])
    slot, _ = table.assign(a)
    table.new_pages(slot)
    table.forget([a, sequence(2, [])])
    slot, new = table.assign(a)
    assert new and table.new_pages(slot) == (0, [10, 11])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["step", "end", "preempt", "grow"])), max_size=80))
def test_no_two_running_sequences_share_a_slot(events: list[tuple[int, str]]) -> None:
    """The device's block tables, as the runs build them, are those of the sequences, whatever happened before."""
    table, device = SlotTable(4), [[] for _ in range(4)]  # type: list[int]
    live: dict[int, Sequence] = {}
    serial = iter(range(1000, 100_000))
    for name, event in events:
        seq = live.get(name)
        if event == "end" and seq is not None:
            seq.state = SeqState.FINISHED
            del live[name]
        elif event == "preempt" and seq is not None:
            seq.num_preemptions += 1
            seq.block_table = [next(serial)]
        elif event == "grow" and seq is not None:
            seq.block_table.append(next(serial))
        elif event == "step":
            if seq is None and len(live) < 4:
                live[name] = sequence(next(serial), [next(serial), next(serial)])
            slots = {}
            for running in live.values():
                slot, new = table.assign(running)
                first, pages = table.new_pages(slot)
                assert not new or first == 0
                device[slot] = device[slot][:first] + pages
                slots[slot] = running
            assert len(slots) == len(live)
            for slot, running in slots.items():
                assert device[slot] == running.block_table

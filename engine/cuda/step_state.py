"""What a step needs to know on the device: the arrays the kernels read, and the one packed upload that refreshes them.

Per step the host sends one int32 buffer (one copy, pinned to device); kernels/step_prepare.cu, the first kernel of the
step, unpacks it into arrays at fixed addresses, so that a captured graph never changes. All of it is in stream order:
step n+1 may be uploaded while step n runs, and a slot may change hands between the two.

Slots. A running sequence owns a slot 0..max_slots-1 (max_slots = max_batch_seqs): a row of `block_tables`, its sampler
parameters and counts, `last_token` and `slot_errors`. Slot max_slots is the dummy of padding rows: all entries of its
block table are the dummy page (index num_pages, one page beyond the pool).

Rows. A step has `num_rows` token rows: decode rows first, padded to `decode_rows` (a graph's bucket; eager steps are
not padded), then the prefill items end to end. Rows that belong to nobody are padding: token 0, position 0, slot
max_slots.

Layout of the upload, in 32-bit words. Every section starts at a multiple of 4 words, records of 4 words can be read as
one int4. Header:

    0 LAYOUT_VERSION      4 num_prefill_tokens   8 decode_at    12 logits_at
    1 step (for reports)  5 num_tiles            9 items_at     13 runs_at
    2 num_decode          6 num_logits          10 tokens_at    14 pages_at
    3 num_items           7 num_runs            11 tiles_at     15 number of words in all

Sections (`x_at` is the word where section x starts):

    decode  num_decode x (slot, position, token, 0)      row i; token -1: the input is last_token[slot], which the step
                                                         before this one sampled
    items   num_items x (slot, first_row, count, first_position)   prefill: rows first_row .. first_row + count - 1
    tokens  num_prefill_tokens                           of row decode_rows + i
    tiles   num_tiles x (first_row, count)               prefill attention, as kernels/attention.py wants them
    logits  num_logits x (row, slot, num_generated, target)   rows whose logits are computed: first those that sample
                                                         (target -1), then those that only score the token `target`;
                                                         num_generated = tokens generated before this one (RNG counter)
    runs    num_runs x (slot, first_index, count, offset)   block_tables[slot][first_index + i] = pages[offset + i], and
                                                         every entry after the last of them = the dummy page. At most
                                                         one run a slot, so runs are independent of each other
    pages   page indices

step_prepare(Common, const int32_t* upload,
             int32_t* token_ids, int32_t* positions, int32_t* slots,        (num_rows,) out
             int32_t* block_tables,                                         (max_slots + 1, table_width) in, out
             int32_t* tiles,                                                (num_tiles, 2) out
             int32_t* logits_rows,                                          (num_logits_rows,) out
             int32_t* descriptors,                                          (num_logits_rows, 5) out
             int32_t* page_prefix,                                          (decode_rows + 1,) out
             const int32_t* last_token,                                     (max_slots + 1,) in
             int num_rows, int decode_rows, int num_logits_rows,            of the launch, padding included
             int max_slots, int table_width, int dummy_page, int window,    window 0 = none
             int vocab)
It also clears common.slot_errors (max_slots + 1). descriptors: kernels/sampler_state.cuh:RowDescriptor, that is slot,
num_generated, mode (0 padding, 1 sample, 2 score), target, position of the token that is chosen or scored (the row's
+ 1). Padding logits rows (num_logits .. num_logits_rows - 1): row = min(r, num_rows - 1), slot max_slots.
page_prefix[0] = 0 and page_prefix[i + 1] = page_prefix[i] + p/128 - max(0, p - window + 1)/128 + 1 with p the position
of decode row i (padding rows too: position 0, 1 page).
A slot, row, page, position or token out of range is reported and its row becomes padding, so that no later kernel can
leave its arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.sequence import SeqState
from engine.types import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.sequence import Sequence
    from engine.types import Int32Array

LAYOUT_VERSION = 1
HEADER_WORDS = 16
PENDING = -1
"""Token of a decode row whose input the step before samples, and target of a logits row that samples."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes of the arrays: the largest step there can be."""

    max_slots: int  # slots 0..max_slots-1; the dummy is max_slots
    table_width: int  # entries of a block table
    num_pages: int  # also the index of the dummy page
    max_rows: int  # token rows of a launch
    max_decode_rows: int
    max_logits_rows: int
    max_tiles: int

    def arrays(self) -> dict[str, int]:
        """Name and 32-bit words of each array on the device, in the order of step_prepare's parameters."""
        return {
            "upload": self.upload_words(),
            "token_ids": self.max_rows,
            "positions": self.max_rows,
            "slots": self.max_rows,
            "block_tables": (self.max_slots + 1) * self.table_width,
            "tiles": 2 * self.max_tiles,
            "logits_rows": self.max_logits_rows,
            "descriptors": 5 * self.max_logits_rows,
            "page_prefix": self.max_decode_rows + 1,
            "last_token": self.max_slots + 1,
        }

    def upload_words(self) -> int:
        """The most words of one upload: every slot may get a whole new block table."""
        records = self.max_decode_rows + 3 * self.max_slots + self.max_logits_rows
        data = self.max_rows + 2 * self.max_tiles + self.max_slots * self.table_width
        return HEADER_WORDS + 4 * records + data + 4 * 8  # sections start at multiples of 4 words


@dataclass(slots=True)
class StepRecords:
    """What one upload says, as Python lists of records (see the layout above)."""

    step: int
    decode: list[tuple[int, int, int, int]]
    items: list[tuple[int, int, int, int]]
    tokens: Int32Array
    tiles: Int32Array  # (num_tiles, 2)
    logits: list[tuple[int, int, int, int]]
    runs: list[tuple[int, int, int, int]]
    pages: list[int]


def pack(records: StepRecords, out: Int32Array) -> int:
    """Write the upload into `out` (pinned memory); returns its number of words, a multiple of 4. ValueError if it does
    not fit; `out` is then worth nothing."""
    sections = (
        records.decode,
        records.items,
        records.tokens,
        records.tiles,
        records.logits,
        records.runs,
        records.pages,
    )
    starts, at = [], HEADER_WORDS
    for section in sections:
        data = np.asarray(section, np.int32).reshape(-1)
        starts.append(at)
        if at + len(data) > len(out):
            raise ValueError(f"an upload of more than {len(out)} words: the limits of the step do not fit together")
        out[at : at + len(data)] = data
        at += -(-len(data) // 4) * 4
    decode_at, items_at, tokens_at, tiles_at, logits_at, runs_at, pages_at = starts
    out[:HEADER_WORDS] = (
        LAYOUT_VERSION, records.step & 0x7FFFFFFF, len(records.decode), len(records.items),
        len(records.tokens), len(records.tiles), len(records.logits), len(records.runs),
        decode_at, items_at, tokens_at, tiles_at,
        logits_at, runs_at, pages_at, at,
    )  # fmt: skip
    return at


@dataclass(slots=True)
class _Slot:
    seq: Sequence
    admission: int  # seq.num_preemptions when it got the slot: another number is another life
    num_pages: int = 0  # entries of its block table that the device has


class SlotTable:
    """Which running sequence has which slot.

    A slot is given up lazily, when another sequence needs one and its owner has ended or was preempted. A plan in
    flight may still hold that owner: it reads the slot before the upload that overwrites it, in stream order.
    """

    def __init__(self, num_slots: int) -> None:
        self._owners: list[_Slot | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_seq: dict[int, int] = {}  # sequence id -> slot

    def assign(self, seq: Sequence) -> tuple[int, bool]:
        """(slot, is it new): new means that nothing of this sequence's present life is on the device yet."""
        slot = self._by_seq.get(seq.seq_id)
        if slot is not None:
            owner = self._owners[slot]
            assert owner is not None
            if owner.admission == seq.num_preemptions:
                return slot, False
        else:
            slot = self._take()
            self._by_seq[seq.seq_id] = slot
        self._owners[slot] = _Slot(seq, seq.num_preemptions)
        return slot, True

    def _take(self) -> int:
        if not self._free:
            for slot, owner in enumerate(self._owners):
                if owner is not None and not _is_alive(owner):
                    self._drop(slot, owner)
        if not self._free:
            raise ValueError(f"more than {len(self._owners)} sequences run: the scheduler's limit is not ours")
        return self._free.pop()

    def _drop(self, slot: int, owner: _Slot) -> None:
        self._owners[slot] = None
        del self._by_seq[owner.seq.seq_id]
        self._free.append(slot)

    def new_pages(self, slot: int) -> tuple[int, list[int]]:
        """(first index, pages) of the block table that the device does not have yet; from now on it counts as sent."""
        owner = self._owners[slot]
        assert owner is not None
        first, table = owner.num_pages, owner.seq.block_table
        owner.num_pages = len(table)
        return first, table[first:]

    def forget(self, seqs: Iterable[Sequence]) -> None:
        """The upload that was to say all this was never sent: these sequences start again."""
        for seq in seqs:
            slot = self._by_seq.get(seq.seq_id)
            if slot is not None:
                owner = self._owners[slot]
                assert owner is not None
                self._drop(slot, owner)


def _is_alive(owner: _Slot) -> bool:
    return owner.seq.state is SeqState.RUNNING and owner.seq.num_preemptions == owner.admission


def table_width(max_model_len: int) -> int:
    return -(-max_model_len // PAGE_TOKENS)

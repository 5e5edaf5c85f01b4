"""Test bodies of step_prepare: random steps, packed as engine/cuda/step_state.py says, against plain Python."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernels import rows
from kernels.layout import PAGE_TOKENS, round_up
from tests.kernels.cases_rows import PAGE_RANGE, POSITION_RANGE, TOKEN_RANGE

if TYPE_CHECKING:
    from tests.kernels.cases_rows import Device

Array = npt.NDArray[Any]
POISON = -0x5EED
VOCAB = 1000


@dataclasses.dataclass
class Step:
    """A step's content, as lists of records."""

    decode: list[tuple[int, int, int]]  # slot, position, token (-1: pending)
    items: list[tuple[int, int, int]]  # slot, first position, count; their rows follow the padded decode rows
    logits: list[tuple[int, int, int, int]]  # row, slot, generated, target
    runs: list[tuple[int, int, list[int]]]  # slot, first index, pages
    decode_rows: int
    num_rows: int  # padding included
    num_logits_rows: int
    prefill_tokens: list[int]
    tiles: list[tuple[int, int]]

    def pack(self) -> npt.NDArray[np.int32]:
        first_row, items = self.decode_rows, []
        for slot, position, count in self.items:
            items.append((slot, first_row, count, position))
            first_row += count
        pages, runs = [], []
        for slot, index, run_pages in self.runs:
            runs.append((slot, index, len(run_pages), len(pages)))
            pages += run_pages
        decode = [(*record, 0) for record in self.decode]
        sections: list[Any] = [decode, items, self.prefill_tokens, self.tiles, self.logits, runs, pages]
        words, places = [0] * 16, []
        for section in sections:
            places.append(len(words))
            words += np.asarray(section, np.int64).reshape(-1).tolist()
            words += [0x7777] * (round_up(len(words), 4) - len(words))
        counts = [1, 0, len(decode), len(items), len(self.prefill_tokens), len(self.tiles), len(self.logits), len(runs)]
        words[:16] = [*counts, *places, len(words)]
        return np.array(words, np.int32)


@dataclasses.dataclass
class Machine:
    """The arrays of one engine, in the device's memory, and what they should hold."""

    device: Device
    max_slots: int = 5
    table_width: int = 9
    num_pages: int = 40
    window: int = 0

    def __post_init__(self) -> None:
        self.tables = np.full((self.max_slots + 1, self.table_width), self.num_pages, np.int32)
        self.tables_d = self.device.put(self.tables)

    def run(self, step: Step, last_token: list[int], words: Array | None = None) -> dict[str, Array]:
        """The arrays after the kernel. `words`: an upload other than step.pack()."""

        def empty(*shape: int) -> Array:
            return np.full(shape, POISON, np.int32)

        shapes = {
            "token_ids": (step.num_rows,), "positions": (step.num_rows,), "slots": (step.num_rows,),
            "tiles": (len(step.tiles) + 1, 2), "logits_rows": (step.num_logits_rows,),
            "descriptors": (step.num_logits_rows, 5), "page_prefix": (step.decode_rows + 1,),
        }  # fmt: skip
        out = {name: self.device.put(empty(*shape)) for name, shape in shapes.items()}
        upload = self.device.put(step.pack() if words is None else words)
        last = self.device.put(np.array(last_token, np.int32))
        self.device.run(
            rows.step_prepare(
                upload.address, **{name: buffer.address for name, buffer in out.items()},
                block_tables=self.tables_d.address, last_token=last.address, num_rows=step.num_rows,
                decode_rows=step.decode_rows, num_logits_rows=step.num_logits_rows, max_slots=self.max_slots,
                table_width=self.table_width, num_pages=self.num_pages, vocab_size=VOCAB, window=self.window,
            )
        )  # fmt: skip
        return {name: buffer.read() for name, buffer in out.items()} | {"block_tables": self.tables_d.read()}

    def expected(self, step: Step, last_token: list[int]) -> dict[str, Array]:
        """A loop over the records; for valid steps."""
        table = np.array([(0, 0, self.max_slots)] * step.num_rows, np.int32)  # token, position, slot
        for row, (slot, position, token) in enumerate(step.decode):
            table[row] = (last_token[slot] if token == -1 else token, position, slot)
        row = step.decode_rows
        for slot, position, count in step.items:
            for i in range(count):
                table[row] = (step.prefill_tokens[row - step.decode_rows], position + i, slot)
                row += 1
        for slot, index, pages in step.runs:
            self.tables[slot, index:] = self.num_pages
            self.tables[slot, index : index + len(pages)] = pages
        prefix = [0]
        for position in table[: step.decode_rows, 1].tolist():
            visible = range(max(0, position - self.window + 1) if self.window else 0, position + 1)
            prefix.append(prefix[-1] + len({p // PAGE_TOKENS for p in visible}))
        padding = [(min(r, step.num_rows - 1), self.max_slots, 0, -1) for r in range(step.num_logits_rows)]
        logits = np.array([*step.logits, *padding[len(step.logits) :]], np.int32).reshape(-1, 4)
        mode = np.where(logits[:, 3] < 0, 1, 2) * (np.arange(len(logits)) < len(step.logits))
        position = table[logits[:, 0], 1] + 1
        return {
            "token_ids": table[:, 0], "positions": table[:, 1], "slots": table[:, 2],
            "tiles": np.array([*step.tiles, (POISON, POISON)], np.int32), "logits_rows": logits[:, 0],
            "descriptors": np.stack([logits[:, 1], logits[:, 2], mode, logits[:, 3], position], axis=1),
            "page_prefix": np.array(prefix, np.int32), "block_tables": self.tables,
        }  # fmt: skip

    def check(self, step: Step, last_token: list[int]) -> None:
        got, wanted = self.run(step, last_token), self.expected(step, last_token)
        for name, array in wanted.items():
            assert np.array_equal(got[name], array), name
        assert self.device.take_errors() == []


def random_step(rng: np.random.Generator, machine: Machine, *, longest_item: int) -> Step:
    """Any mix of decode rows, prefill items and padding; each slot in at most one of them."""

    def some_position(last: int) -> int:
        """Every other one next to a page's border."""
        near_border = (
            int(rng.integers(0, machine.table_width)) * PAGE_TOKENS + machine.window + int(rng.integers(-2, 3))
        )
        return min(last, max(0, near_border)) if rng.integers(0, 2) else int(rng.integers(0, last + 1))

    slots = rng.permutation(machine.max_slots).tolist()
    num_decode = int(rng.integers(0, machine.max_slots + 1))
    num_items = int(rng.integers(0, machine.max_slots - num_decode + 1))
    last_position = machine.table_width * PAGE_TOKENS - 1
    decode = [
        (slot, some_position(last_position), int(rng.choice([-1, rng.integers(0, VOCAB)])))
        for slot in slots[:num_decode]
    ]
    items = []
    for slot in slots[num_decode : num_decode + num_items]:
        count = int(rng.integers(1, longest_item + 1))
        items.append((slot, some_position(last_position + 1 - count), count))
    num_prefill = sum(count for _, _, count in items)
    decode_rows = num_decode + int(rng.integers(0, 4))
    num_rows = max(1, decode_rows + num_prefill + int(rng.integers(0, 4)))
    num_logits = int(rng.integers(0, num_rows + 1))
    logits = [
        (int(rng.integers(0, num_rows)), int(rng.integers(0, machine.max_slots)), int(rng.integers(0, 99)), int(target))
        for target in rng.integers(-1, 50, num_logits)
    ]
    runs = []
    for slot in slots[: int(rng.integers(0, machine.max_slots + 1))]:
        first = int(rng.integers(0, machine.table_width + 1))
        count = int(rng.integers(0, machine.table_width - first + 1))
        runs.append((slot, first, rng.integers(0, machine.num_pages, count).tolist()))
    return Step(
        decode, items, logits, runs, decode_rows, num_rows, num_logits + int(rng.integers(0, 3)),
        rng.integers(0, VOCAB, num_prefill).tolist(), [(i, 2 * i + 1) for i in range(int(rng.integers(0, 5)))],
    )  # fmt: skip


def check_random_steps(
    device: Device, *, steps: int, max_slots: int, longest_item: int, window: int = 0, seed: int = 0
) -> None:
    """A row of steps on the same arrays, so that block tables carry over."""
    rng = np.random.default_rng((seed, max_slots, window))
    machine = Machine(device, max_slots=max_slots, window=window)
    for _ in range(steps):
        last_token = rng.integers(0, VOCAB, max_slots + 1).tolist()
        machine.check(random_step(rng, machine, longest_item=longest_item), last_token)


def check_bad_records(device: Device) -> None:
    """What later kernels could not index with becomes a padding row, and fails the slot it belongs to."""
    machine = Machine(device)
    last_position = machine.table_width * PAGE_TOKENS - 1
    step = Step(
        decode=[(0, last_position, 5), (1, last_position + 1, 5), (2, 3, VOCAB), (9, 0, 1), (3, 0, -1)],
        items=[(4, last_position, 2)],
        logits=[(0, 0, 1, -1), (7, 1, 1, -1), (1, 9, 1, -1)],
        runs=[(0, 0, [1, 40, 2]), (1, 8, [3, 4]), (-1, 0, [5]), (2, 1, [41, -2])],
        decode_rows=5, num_rows=7, num_logits_rows=3, prefill_tokens=[8, 9], tiles=[],
    )  # fmt: skip
    got = machine.run(step, last_token=[1, 1, 1, -1, 1, 1])
    assert got["slots"].tolist() == [0, 5, 5, 5, 5, 4, 5]
    assert got["positions"].tolist() == [last_position, 0, 0, 0, 0, last_position, 0]
    assert got["token_ids"].tolist() == [5, 0, 0, 0, 0, 8, 0]
    assert got["page_prefix"].tolist() == [0, 9, 10, 11, 12, 13]
    assert got["logits_rows"].tolist() == [0, 1, 2]
    assert got["descriptors"].tolist() == [[0, 1, 1, -1, last_position + 1], [5, 0, 0, -1, 1], [5, 0, 0, -1, 1]]
    assert got["block_tables"][0].tolist() == [1, 40, 2] + [40] * 6  # the dummy page may be named
    assert np.all(got["block_tables"][1:] == 40)
    faults = {
        (1, POSITION_RANGE): {last_position + 1}, (2, TOKEN_RANGE): {VOCAB}, (3, TOKEN_RANGE): {-1},
        (4, POSITION_RANGE): {last_position + 1}, (5, PAGE_RANGE): {1, 9}, (5, POSITION_RANGE): {1, -1},
        (2, PAGE_RANGE): {41, -2},
    }  # fmt: skip
    errors = device.take_errors()  # one a slot and code, whichever came first
    assert sorted((e["slot"], e["code"]) for e in errors) == sorted(faults)
    assert all(e["value"] in faults[e["slot"], e["code"]] for e in errors)


def check_bad_item(device: Device) -> None:
    """A prefill item whose rows are not all in the launch writes none."""
    machine = Machine(device)
    step = Step([(0, 1, 2)], [(1, 0, 3)], [], [], 1, 4, 0, [1, 2, 3], [])
    for first_row, count in ((2, 3), (0, 3), (1, -1), (5, 1)):
        words = step.pack()
        words[words[9] + 1 : words[9] + 3] = first_row, count
        got = machine.run(step, [0] * 6, words)
        assert got["slots"].tolist() == [0, 5, 5, 5]
        assert [(e["slot"], e["code"], e["value"]) for e in device.take_errors()] == [(5, PAGE_RANGE, first_row)]


def check_many_decode_rows(device: Device, decode_rows: int) -> None:
    """Decode rows only, every slot several times (a step never does that, but the sums do not mind)."""
    rng = np.random.default_rng(decode_rows)
    machine = Machine(device)
    positions = rng.integers(0, machine.table_width * PAGE_TOKENS, decode_rows - 7).tolist()
    decode = [(i % machine.max_slots, position, i % VOCAB) for i, position in enumerate(positions)]
    machine.check(Step(decode, [], [], [], decode_rows, decode_rows, 3, [], []), [0] * (machine.max_slots + 1))

"""CudaRunner: the CUDA `Backend`. Uploads a plan, launches its kernels, reads back what was sampled.

A step in stream order: event, one upload, (slots of new sequences), the kernels, one copy back, event. A decode-only
step is one graph launch, of the smallest bucket that holds its rows; a step with prefill is launched kernel by kernel
from prepared launches. The host never waits in launch(): everything it decides for step n+1 is known without step n
(the tokens in between stay on the device, engine/cuda/step_state.py).

Nothing here may change a bit of a result: bucket, padding, graph or not, chunks and company of a row are free choices.
No CUDA is imported here; the device is a StepDevice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backend import Failure, Pending, StepResult, StepWork
from engine.cuda.arena import WeightArena
from engine.cuda.prepared import PreparedLaunches
from engine.cuda.probe_pass import ProbePass
from engine.cuda.program import LOGITS_ROWS, UPDATE_WORDS, Program, row_bucket, slot_errors_bytes
from engine.cuda.step_device import Faults
from engine.cuda.step_ring import Kind
from engine.cuda.step_state import PENDING, SlotTable, StepRecords, pack
from engine.cuda.step_trace import StepTimes
from engine.cuda.transfer import Transfer, make_transfer
from engine.errors import NumericError
from engine.log import log_event
from engine.rope import rope_table
from kernels import attention, sampler
from kernels.sampler_slots import PackedSlot, pack_slot, pack_updates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from engine.config import ModelConfig
    from engine.cuda.program import StepSizes
    from engine.cuda.step_device import StepDevice
    from engine.cuda.step_ring import StepRingWriter
    from engine.jobs import Job
    from engine.sampler import SampleState
    from engine.types import DeviceId, Float32Array, StepBatch

log = logging.getLogger("appliance.cuda")


@dataclass(slots=True)
class _Step(Pending):
    """A step in flight."""

    work: StepWork
    slots: list[int]  # of plan.items
    sampled: list[int]  # indices of plan.items, in the order of their logits rows
    scored: list[tuple[int, int]]  # index of plan.items, number of logits rows, after the sampled ones
    transfer: Transfer
    kind: Kind
    num_rows: int
    num_tokens: int
    queued_behind: bool  # another step was in flight when it was launched


@dataclass(slots=True)
class _Layout:
    """Where everything of a plan stands in the step."""

    records: StepRecords
    slots: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    scored: list[tuple[int, int]] = field(default_factory=list)
    updates: list[tuple[int, PackedSlot]] = field(default_factory=list)
    decode_rows: int = 0
    num_rows: int = 0


class CudaRunner:
    """`Backend` on a StepDevice.

    weights: canonical name -> device address, tiled (kernels/layout.py). buffers: as program.workspace(), and "pool",
    "weights" and "scratch" (of the checksum). arena_bytes, weights_checksum: kernels/checksum.py of the arena.
    `cuda_graphs` False launches every step kernel by kernel. `ring`: where step times go.
    """

    name = "cuda"

    def __init__(
        self,
        device: StepDevice,
        model: ModelConfig,
        sizes: StepSizes,
        *,
        device_id: DeviceId,
        num_pages: int,
        weights: Mapping[str, int],
        buffers: Mapping[str, int],
        arena_bytes: int,
        weights_checksum: str,
        cuda_graphs: bool = True,
        plans_in_flight: int = 2,
        ring: StepRingWriter | None = None,
        profile: bool = False,
    ) -> None:
        self.device_id = device_id
        self.num_pages, self.plans_in_flight = num_pages, plans_in_flight
        self.max_batch_tokens, self.max_model_len = sizes.max_batch_tokens, sizes.max_model_len
        self.weights_bytes, self.weights_checksum = arena_bytes, weights_checksum
        self.model, self.sizes, self.device = model, sizes, device
        self.buffers = buffers
        self.program = Program(device.executor, model, sizes, num_pages, weights, buffers)
        self.limits = self.program.limits
        self.prepared = PreparedLaunches(device, self.program)
        self._arena = WeightArena(
            device, self.prepared, start=buffers["weights"], nbytes=arena_bytes, scratch=buffers["scratch"],
            weights=weights, checksum=weights_checksum,
        )  # fmt: skip
        self.faults = Faults(device)
        self._use_graphs = cuda_graphs
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        self._slots = SlotTable(sizes.max_batch_seqs)
        self._needs_more: dict[int, bool] = {}  # slot -> its rows need more than the first sampler kernel
        self._transfers = [make_transfer(device, self.program, model.num_layers) for _ in range(plans_in_flight + 1)]
        self._next_transfer = 0
        self._in_flight = 0
        self._ring, self._profile = ring, profile
        self._times = None if ring is None else StepTimes(ring, model.num_layers)
        self._closed = False
        self._upload_tables()

    # ---- start and end ---------------------------------------------------------------------------------------------

    def _upload_tables(self) -> None:
        """What no step changes: rope angles, and block tables that know only the dummy page."""
        cos, sin = rope_table(self.model.rope, self.model.head_dim, self.max_model_len)
        tables = np.full((self.limits.max_slots + 1, self.limits.table_width), self.num_pages, np.int32)
        for name, array in (("cos", cos), ("sin", sin), ("block_tables", tables)):
            self.device.upload(self.buffers[name], np.ascontiguousarray(array))
        self.device.synchronize()

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Run every bucket once on padding alone and capture its graphs. progress(done, total): buckets."""
        empty = StepRecords(0, [], [], np.zeros(0, np.int32), np.zeros((0, 2), np.int32), [], [], [])
        transfer = self._transfers[0]
        buckets = self.sizes.buckets if self._use_graphs else ()
        for number, bucket in enumerate(buckets, 1):
            words = pack(empty, transfer.upload)
            for greedy_only in (True, False):
                self.device.upload(self.buffers["upload"], transfer.upload[:words])
                launches = self.prepared.decode_step(bucket, greedy_only=greedy_only)
                self.device.run(launches)
                self.device.synchronize()
                replay = self.device.capture(f"decode {bucket} {greedy_only}", launches)
                replay()
                self.device.synchronize()
                self._graphs[bucket, greedy_only] = replay
            if progress is not None:
                progress(number, len(buckets))
        self.faults.clear()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.device.close()
            if self._ring is not None:
                self._ring.close()

    # ---- a step ----------------------------------------------------------------------------------------------------

    def check(self, state: SampleState) -> None:
        """ValueError for parameters that the sampler's kernels were not made for."""
        pack_slot(self.program.sampler, state)

    def launch(self, work: StepWork) -> _Step:
        if self._in_flight >= self.plans_in_flight:
            raise RuntimeError(f"{self._in_flight} steps are in flight; collect the oldest first")
        transfer = self._transfers[self._next_transfer]
        self._next_transfer = (self._next_transfer + 1) % len(self._transfers)  # also if this fails half-way
        try:
            layout = self._lay_out(work)
            words = pack(layout.records, transfer.upload)
        except BaseException:
            self._slots.forget(item.seq for item in work.plan.items)  # the device was told nothing
            raise
        transfer.begin.record()
        self.device.upload(self.buffers["upload"], transfer.upload[:words])
        self._update_slots(layout.updates, transfer)
        kind = self._run(layout)
        self._read_back(layout, transfer)
        transfer.end.record()
        step = _Step(
            work, layout.slots, layout.sampled, layout.scored, transfer, kind, layout.num_rows, work.plan.num_tokens,
            self._in_flight > 0,
        )  # fmt: skip
        self._in_flight += 1
        return step

    def _lay_out(self, work: StepWork) -> _Layout:
        """Slots, rows and records of a plan."""
        plan = work.plan
        records = StepRecords(plan.step, [], [], np.zeros(0, np.int32), np.zeros((0, 2), np.int32), [], [], [])
        layout = _Layout(records)
        for item, state in zip(plan.items, work.states, strict=True):
            slot, new = self._slots.assign(item.seq)
            layout.slots.append(slot)
            if new:
                packed = pack_slot(self.program.sampler, state)
                self._needs_more[slot] = packed.needs_more
                layout.updates.append((slot, packed))
            first, pages = self._slots.new_pages(slot)
            if pages:
                records.runs.append((slot, first, len(pages), len(records.pages)))
                records.pages.extend(pages)
        num_decodes = plan.num_decodes
        for item, slot in zip(plan.items[:num_decodes], layout.slots):
            token = PENDING if item.token_pending else item.seq.token_ids[item.start]
            records.decode.append((slot, item.start, token, 0))
        prefill = [
            (item.start, item.seq.token_ids[item.start : item.start + item.count]) for item in plan.items[num_decodes:]
        ]
        first_rows = self._place_rows(layout, num_decodes, prefill, layout.slots[num_decodes:])
        self._place_logits(layout, work, first_rows)
        return layout

    def _place_rows(
        self, layout: _Layout, num_decodes: int, prefill: list[tuple[int, list[int]]], slots: list[int]
    ) -> list[int]:
        """Decode rows 0 .., then each prefill item (first position, tokens); returns the first row of every item."""
        records = layout.records
        layout.decode_rows = self._bucket(num_decodes) if num_decodes else 0
        row, first_rows = layout.decode_rows, list(range(num_decodes))
        for slot, (start, tokens) in zip(slots, prefill, strict=True):
            records.items.append((slot, row, len(tokens), start))
            first_rows.append(row)
            row += len(tokens)
        layout.num_rows = layout.decode_rows
        if prefill:
            records.tokens = np.array([token for _, tokens in prefill for token in tokens], np.int32)
            chunks = [(first_row, count, start) for _, first_row, count, start in records.items]
            records.tiles = np.array(attention.prefill_tiles(chunks, self.program.tile_tokens), np.int32)
            layout.num_rows = row_bucket(row)
        return first_rows

    @staticmethod
    def _place_logits(layout: _Layout, work: StepWork, first_rows: list[int]) -> None:
        """Rows that sample come first, then those that score prompt tokens."""
        logits = layout.records.logits
        for i, (item, slot, row) in enumerate(zip(work.plan.items, layout.slots, first_rows, strict=True)):
            if item.samples:
                generated = item.start + item.count - item.seq.num_prompt_tokens
                logits.append((row + item.count - 1, slot, generated, PENDING))
                layout.sampled.append(i)
        for i, (item, slot, row) in enumerate(zip(work.plan.items, layout.slots, first_rows, strict=True)):
            if (scoring := work.scoring.get(item.seq.seq_id)) is not None:
                first = row + scoring.first - item.start
                logits.extend((first + j, slot, 0, target) for j, target in enumerate(scoring.targets))
                layout.scored.append((i, len(scoring.targets)))

    def _bucket(self, num_decodes: int) -> int:
        return next(size for size in self.sizes.buckets if size >= num_decodes)

    def _update_slots(self, updates: list[tuple[int, PackedSlot]], transfer: Transfer) -> None:
        """Sampling parameters and counts of sequences that were (re)admitted."""
        if not updates:
            return
        for i, (buffer, count) in enumerate(pack_updates(updates, UPDATE_WORDS)):
            source = buffer
            if i == 0:  # the rest goes from pageable memory, which the driver copies before it returns
                source = transfer.updates[: len(buffer)]
                source[:] = buffer
            self.device.upload(self.buffers["updates"], source)
            self.device.run(self.prepared.untimed([self.program.update_slots(count)]))

    def _run(self, layout: _Layout) -> Kind:
        greedy_only = not any(self._needs_more[layout.slots[i]] for i in layout.sampled)
        if not layout.records.items and not layout.scored:
            replay = self._graphs.get((layout.decode_rows, greedy_only))
            if replay is not None:
                replay()
                return Kind.DECODE_GRAPH
            self.device.run(self.prepared.decode_step(layout.decode_rows, greedy_only=greedy_only))
            return Kind.EAGER
        logits, prepared = len(layout.records.logits), self.prepared
        self.device.run(prepared.first(layout.num_rows, layout.decode_rows, logits))
        self.device.run(prepared.body(layout.num_rows, layout.decode_rows, len(layout.records.tiles)))
        if layout.sampled:
            self.device.run(prepared.head(len(layout.sampled), greedy_only=greedy_only))
        for first, count in groups(len(layout.sampled), logits):
            launches = [*self.program.head(count, first), *self.program.sample(count, first)]
            self.device.run(prepared.untimed(launches))
        return Kind.EAGER

    def _read_back(self, layout: _Layout, transfer: Transfer) -> None:
        """slot_errors and results in one copy; scores only where somebody wants them."""
        rows, buffers = len(layout.records.logits), self.buffers
        used = slot_errors_bytes(self.limits) + rows * sampler.ROW_RESULT.itemsize
        self.device.download(transfer.results[:used], buffers["results"])
        if layout.scored or any(self._needs_more[layout.slots[i]] for i in layout.sampled):
            used = rows * self.program.sampler.scores.itemsize
            self.device.download(transfer.scores[:used], buffers["scores"])
        if self._profile:
            self.device.download(transfer.trace, buffers["trace"])

    # ---- results ---------------------------------------------------------------------------------------------------

    def collect(self, pending: Pending) -> StepResult:
        assert isinstance(pending, _Step)
        step, transfer = pending, pending.transfer
        transfer.end.wait()
        self._in_flight -= 1
        if self._times is not None:
            self._times.write(
                step.kind, step.work.plan, transfer.begin, transfer.end, num_rows=step.num_rows,
                queued_behind=step.queued_behind,
            )  # fmt: skip
            if self._profile:
                self._times.write_kernels(step.work.plan, transfer.trace)
        result, work = StepResult(), step.work
        skip = slot_errors_bytes(self.limits)
        errors = transfer.results[: 4 * (self.limits.max_slots + 1)].view(np.uint32)
        results = transfer.results[skip:].view(sampler.ROW_RESULT)
        scores = transfer.scores.view(self.program.sampler.scores)
        states = [work.states[i] for i in step.sampled]
        sampled_rows = sampler.sample_results(results[: len(states)], scores[: len(states)], states)
        for i, sampled in zip(step.sampled, sampled_rows, strict=True):
            seq_id = work.plan.items[i].seq.seq_id
            result.samples[seq_id] = sampled
            if sampled.error is not None:
                result.failures[seq_id] = Failure(sampled.error)
        self._read_scores(step, results, scores, result)
        if errors.any():
            self._read_errors(step, errors, result)
        return result

    def _read_scores(self, step: _Step, results: Any, scores: Any, result: StepResult) -> None:
        row = len(step.sampled)
        for i, count in step.scored:
            seq_id = step.work.plan.items[i].seq.seq_id
            known = result.scores[seq_id] = []
            try:
                for j in range(row, row + count):
                    known.append(sampler.prompt_logprob(results[j], scores[j], self.model.vocab_size))
            except NumericError as error:
                result.failures[seq_id] = Failure(error.message)
            row += count

    def _read_errors(self, step: _Step, errors: Any, result: StepResult) -> None:
        """Requests that a kernel has marked; the error ring says where."""
        for item, slot in zip(step.work.plan.items, step.slots, strict=True):
            if errors[slot]:
                fault = self.faults.of_slot(slot)
                where = None if fault is None else fault.where()
                before = result.failures.get(item.seq.seq_id)
                text = before.text if before else f"the device reported {fault.error if fault else int(errors[slot])}"
                result.failures[item.seq.seq_id] = Failure(text, where)
        if errors[self.limits.max_slots]:
            fault = self.faults.of_slot(self.limits.max_slots)
            note = "a kernel reported a row that belongs to nobody: a bug of ours"
            log_event(log, logging.ERROR, "padding_fault", note, **(fault.where() if fault else {}))

    # ---- beside the traffic ----------------------------------------------------------------------------------------

    def forward(self, batch: StepBatch) -> Float32Array:
        """Rows of length 1 are computed as decode rows, others as prefill. ValueError for more sequences than there are
        probe slots or more tokens than a step takes, EngineError if a kernel reports more than NaN."""
        return ProbePass(self, batch).logits()

    def find_nonfinite(self, batch: StepBatch) -> tuple[int | None, str, int] | None:
        """Runs the batch kernel by kernel and looks at what each wrote. Slow."""
        return ProbePass(self, batch).find_nonfinite()

    def checksum(self) -> Job:
        return self._arena.check()

    def tensor_offsets(self) -> dict[str, int]:
        return self._arena.tensor_offsets()

    def flip_bit(self, offset: int, bit: int) -> tuple[int, int]:
        return self._arena.flip_bit(offset, bit)


def groups(first: int, end: int) -> Iterable[tuple[int, int]]:
    """(first, count) of at most LOGITS_ROWS rows each."""
    return ((start, min(LOGITS_ROWS, end - start)) for start in range(first, end, LOGITS_ROWS))

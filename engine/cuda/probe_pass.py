"""One forward pass beside the traffic: logits at any rows, or the first op that gave NaN or Inf.

It uses the buffers of a step, after whatever is in flight, and slots of its own; the host waits for it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cuda.program import LOGITS_ROWS, row_bucket
from engine.cuda.step_state import StepRecords, pack
from engine.errors import EngineError
from kernels import attention
from kernels.layout import padded_columns, padded_head_dim

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from engine.cuda.runner import CudaRunner
    from engine.types import Float32Array, Int32Array, StepBatch
    from kernels.launch import Launch

HARMLESS = ("nonfinite", "logits")
"""Faults that leave NaN in the logits, for the caller to see."""


class ProbePass:
    """A StepBatch laid out as a step. ValueError or IndexError as ModelRunner.forward's, before anything runs."""

    def __init__(self, runner: CudaRunner, batch: StepBatch) -> None:
        self._runner, self._batch = runner, batch
        self._device, self._program = runner.device, runner.program
        self._check()
        self._rows = np.zeros(len(batch.token_ids), np.int32)  # device row of each token
        self._slots: list[int] = []
        records = self._lay_out()
        upload = np.zeros(runner.limits.upload_words(), np.int32)
        words = pack(records, upload)
        self._num_tiles = len(records.tiles)
        self._upload = upload[:words]
        self._device.upload(runner.buffers["upload"], self._upload)

    def _check(self) -> None:
        batch, runner = self._batch, self._runner
        count, table = len(batch.token_ids), batch.block_tables
        if not 1 <= count <= runner.max_batch_tokens:
            raise ValueError(f"the batch has {count} tokens; wanted 1..{runner.max_batch_tokens}")
        if len(table) > runner.sizes.probe_slots:
            raise ValueError(f"{len(table)} sequences at once; there are slots for {runner.sizes.probe_slots}")
        if batch.token_ids.min() < 0 or batch.token_ids.max() >= runner.model.vocab_size:
            raise IndexError(f"a token id is outside 0..{runner.model.vocab_size - 1}")
        if batch.positions.min() < 0 or batch.positions.max() >= runner.max_model_len:
            raise IndexError(f"a position is outside 0..{runner.max_model_len - 1}")
        if table.max(initial=0) >= runner.num_pages:
            raise IndexError(f"a page is outside 0..{runner.num_pages - 1}")
        if len(batch.logits_rows) and not 0 <= batch.logits_rows.min() <= batch.logits_rows.max() < count:
            raise IndexError(f"logits_rows must lie in 0..{count - 1}")

    def _lay_out(self) -> StepRecords:
        """Runs of consecutive positions of one sequence: those of length 1 are decode rows, the others prefill."""
        batch, runner = self._batch, self._runner
        records = StepRecords(0, [], [], np.zeros(0, np.int32), np.zeros((0, 2), np.int32), [], [], [])
        first_slot = runner.sizes.max_batch_seqs
        for sequence, table in enumerate(batch.block_tables):
            pages = table[: np.argmax(table < 0)] if (table < 0).any() else table
            slot = first_slot + sequence
            self._slots.append(slot)
            records.runs.append((slot, 0, len(pages), len(records.pages)))
            records.pages.extend(pages.tolist())
        breaks = (np.diff(batch.seq_index) != 0) | (np.diff(batch.positions) != 1)
        starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(batch.token_ids)]
        runs = [(start, end - start) for start, end in itertools.pairwise(starts)]
        for start, count in runs:
            if count == 1:
                self._rows[start] = len(records.decode)
                slot = first_slot + int(batch.seq_index[start])
                records.decode.append((slot, int(batch.positions[start]), int(batch.token_ids[start]), 0))
        self._decode_rows = row = len(records.decode)
        tokens: list[Int32Array] = []
        for start, count in runs:
            if count > 1:
                self._rows[start : start + count] = np.arange(row, row + count)
                slot = first_slot + int(batch.seq_index[start])
                records.items.append((slot, row, count, int(batch.positions[start])))
                tokens.append(batch.token_ids[start : start + count])
                row += count
        if tokens:
            records.tokens = np.concatenate(tokens)
            chunks = [(first, count, position) for _, first, count, position in records.items]
            records.tiles = np.array(attention.prefill_tiles(chunks, self._program.tile_tokens), np.int32)
        self._num_rows = row_bucket(row) if tokens else row
        dummy = runner.limits.max_slots
        records.logits = [(int(self._rows[token]), dummy, 0, -1) for token in batch.logits_rows]
        return records

    def logits(self) -> Float32Array:
        """(num_logits, vocab) float32."""
        self._run([self._prepare()])
        self._device.run(self._runner.prepared.body(self._num_rows, self._decode_rows, self._num_tiles))
        logits = self._head()
        self._finish()
        return logits

    def _prepare(self) -> Launch:
        return self._program.prepare(self._num_rows, self._decode_rows, max(1, len(self._batch.logits_rows)))

    def _run(self, launches: list[Launch]) -> None:
        self._device.run(self._runner.prepared.untimed(launches))

    def _head(self) -> Float32Array:
        total, vocab = len(self._batch.logits_rows), self._runner.model.vocab_size
        logits = np.empty((total, vocab), np.float32)
        for first in range(0, total, LOGITS_ROWS):
            count = min(LOGITS_ROWS, total - first)
            self._run(self._program.head(count, first))
            wide = np.empty((count, self._program.ld_logits), np.float32)
            self._device.download(wide, self._runner.buffers["logits"])
            self._device.synchronize()
            logits[first : first + count] = wide[:, :vocab]
        return logits

    def _finish(self) -> None:
        self._device.synchronize()
        for slot in self._slots:
            fault = self._runner.faults.of_slot(slot)
            if fault is not None and fault.error not in HARMLESS:
                raise EngineError(f"the device reported {fault.error} in a probe: {fault.where()}")

    # ---- where NaN begins ------------------------------------------------------------------------------------------

    def find_nonfinite(self) -> tuple[int | None, str, int] | None:
        """(layer or None, op, index of the token) of the first op, in the order of the arithmetic, whose output for a
        token of the batch is not finite."""
        self._run([self._prepare()])
        found = None
        for layer, op, launches, buffer, columns, kind in self._ops():
            self._run(launches)
            if (token := self._first_bad(buffer, columns, kind)) is not None:
                found = layer, op, token
                break
        if found is None:
            bad = np.flatnonzero(~np.isfinite(self._head()).all(axis=1))
            found = (None, "lm_head", int(self._batch.logits_rows[bad[0]])) if len(bad) else None
        self._finish()
        return found

    def _ops(self) -> Iterator[tuple[int | None, str, list[Launch], str, int, Any]]:
        """(layer, op, launches, buffer written, its row length, dtype) in order. bf16 is given as uint16."""
        program, model, rows = self._program, self._runner.model, self._num_rows
        hidden, f32, bf16 = model.hidden_size, np.float32, np.uint16
        k_hidden = padded_columns(hidden)
        q_width = model.num_heads * padded_head_dim(model.head_dim)
        qkv_width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        yield None, "embed", [program.embed(rows)], "x", hidden, f32
        for layer in range(model.num_layers):
            norm, qkv, rope = program.before_attention(layer, rows)
            yield layer, "attn_norm", [norm], "normed", k_hidden, bf16
            yield layer, "qkv", [qkv], "qkv", qkv_width, f32
            yield layer, "rope", [rope], "q", q_width, bf16
            attend = [program.decode_attention(layer, self._decode_rows)] if self._decode_rows else []
            if self._num_tiles:
                attend.append(program.prefill_attention(layer, self._num_tiles))
            yield layer, "attention", attend, "attended", padded_columns(model.num_heads * model.head_dim), bf16
            o, mlp_norm, gate_up, down = program.after_attention(layer, rows)
            yield layer, "o", [o], "x", hidden, f32
            yield layer, "mlp_norm", [mlp_norm], "normed", k_hidden, bf16
            yield layer, "swiglu", [gate_up], "mlp", padded_columns(model.intermediate_size), bf16
            yield layer, "down", [down], "x", hidden, f32

    def _first_bad(self, buffer: str, columns: int, kind: Any) -> int | None:
        output: npt.NDArray[Any] = np.empty((self._num_rows, columns), kind)
        self._device.download(output, self._runner.buffers[buffer])
        self._device.synchronize()
        finite = np.isfinite(output) if kind is np.float32 else (output & 0x7F80) != 0x7F80
        bad = np.flatnonzero(~finite.all(axis=1)[self._rows])
        return int(bad[0]) if len(bad) else None

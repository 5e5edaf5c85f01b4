"""What the CUDA sampler keeps of a choice (a slot): parameters, edits of logits, and the tokens so far.

pack_slot when a sequence gets its slot or comes back after a preemption, pack_updates for the upload; then the kernels
keep the counts of what they sample themselves. Layouts: sampler_state.cuh, sampler.cu:SlotUpdate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.fixed_softmax import ZERO_BELOW
from engine.sampler import GREEDY_BELOW
from engine.types import Int32Array, Int64Array
from kernels.sampler_layout import MAX_COUNT, SLOT_PARAMS, SLOT_UPDATE, SamplerShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.sampler import SampleState

GREEDY, PENALISES, BIASED, STOPS = 1, 2, 4, 8  # SlotFlags
_HEADER_WORDS = SLOT_UPDATE.itemsize // 4
_IN_PROMPT = np.uint32(1 << 31)
_EDIT_SHIFT = np.uint32(20)


@dataclass(frozen=True, slots=True)
class PackedSlot:
    """A choice's sampling state as the kernels keep it."""

    params: npt.NDArray[np.void]  # SLOT_PARAMS ()
    edits: Int32Array  # (n, 2): bits of the float32 bias, is a stop
    words: Int32Array  # (n, 2): token id, its word of `seen`

    @property
    def flags(self) -> int:
        return int(self.params["flags"])

    @property
    def needs_more(self) -> bool:
        """Its rows need more than the first kernel (sampler.py:sample_launches, greedy_only)."""
        return not self.flags & GREEDY or int(self.params["logprobs"]) >= 0


def pack_slot(shape: SamplerShape, state: SampleState) -> PackedSlot:
    """The choice as it is now. ValueError where it exceeds the shape's limits."""
    wanted = state.params
    if state.vocab_size != shape.vocab_size:
        raise ValueError(f"the state was made for {state.vocab_size} tokens, the sampler for {shape.vocab_size}")
    if wanted.logprobs is not None and wanted.logprobs > shape.max_logprobs:
        raise ValueError(f"{wanted.logprobs} logprobs, the sampler was made for {shape.max_logprobs}")
    stops = state.masked_ids if wanted.min_tokens > 0 else state.masked_ids[:0]
    edit_ids = np.union1d(state.bias_ids, stops)
    if edit_ids.size > shape.max_edits:
        raise ValueError(
            f"{edit_ids.size} ids with a bias or masked by min_tokens, the sampler was made for {shape.max_edits}"
        )
    edits = np.zeros((edit_ids.size, 2), np.int32)
    edits[np.searchsorted(edit_ids, state.bias_ids), 0] = state.bias_values.view(np.int32)
    edits[np.searchsorted(edit_ids, stops), 1] = 1
    return PackedSlot(_params(state, has_stops=stops.size > 0), edits, _words(state, edit_ids))


def _params(state: SampleState, *, has_stops: bool) -> npt.NDArray[np.void]:
    wanted = state.params
    penalises = wanted.presence_penalty != 0.0 or wanted.frequency_penalty != 0.0 or state.repetition != 1.0
    params = np.zeros((), SLOT_PARAMS)
    params["temperature"] = wanted.temperature
    params["floor"] = max(ZERO_BELOW, math.log(min(wanted.min_p, 1.0))) if wanted.min_p > 0.0 else ZERO_BELOW
    params["top_p_share"] = math.ceil(wanted.top_p * 2.0**53) if wanted.top_p < 1.0 else 1 << 53
    params["seed"], params["choice"] = wanted.seed, state.seed_index
    params["top_k"] = min(max(wanted.top_k, 0), 2**31 - 1)
    params["min_tokens"] = min(wanted.min_tokens, 2**31 - 1)
    params["logprobs"] = -1 if wanted.logprobs is None else wanted.logprobs
    params["repetition"] = state.repetition
    params["frequency"], params["presence"] = wanted.frequency_penalty, wanted.presence_penalty
    params["flags"] = (
        GREEDY * (wanted.temperature < GREEDY_BELOW)
        | PENALISES * bool(penalises)
        | BIASED * (state.bias_ids.size > 0)
        | STOPS * has_stops
    )
    return params


def _words(state: SampleState, edit_ids: Int64Array) -> Int32Array:
    counted_ids, counts = state.penalised()
    if counts.size and counts.max() > MAX_COUNT:
        raise ValueError(f"a token was generated {int(counts.max())} times; penalties on a GPU count to {MAX_COUNT}")
    ids = np.union1d(edit_ids, counted_ids)
    words = np.zeros(ids.size, np.uint32)
    words[np.searchsorted(ids, edit_ids)] |= np.arange(1, edit_ids.size + 1, dtype=np.uint32) << _EDIT_SHIFT
    # Without a count it is there for the repetition penalty over the prompt.
    words[np.searchsorted(ids, counted_ids)] |= np.where(counts > 0, counts.astype(np.uint32), _IN_PROMPT)
    return np.stack([ids.astype(np.int32), words.view(np.int32)], axis=1)


def pack_updates(updates: Sequence[tuple[int, PackedSlot]], capacity: int) -> list[tuple[Int32Array, int]]:
    """(buffer, number of updates in it) for sampler.py:update_launch, in order; buffers of at most `capacity` int32.

    A slot whose words do not fit is continued in the next buffer. ValueError if `capacity` cannot hold a slot's edits.
    """
    buffers: list[tuple[Int32Array, int]] = []
    buffer = _Buffer(capacity)
    for slot, packed in updates:
        start, edits = 0, packed.edits
        while True:
            room = buffer.room - _HEADER_WORDS - edits.size
            if room < min(2, packed.words.size - 2 * start):
                if buffer.is_empty:
                    raise ValueError(
                        f"an update buffer of {capacity} words is too small for {len(edits)} edits and a token"
                    )
                buffers.append(buffer.finish())
                buffer = _Buffer(capacity)
                continue
            words = packed.words[start : start + room // 2]
            buffer.add(slot, packed, edits, words, is_first=start == 0)
            start, edits = start + len(words), packed.edits[:0]
            if start == len(packed.words):
                break
    if not buffer.is_empty:
        buffers.append(buffer.finish())
    return buffers


class _Buffer:
    """The SlotUpdates, then their lists."""

    def __init__(self, capacity: int) -> None:
        self.room = capacity
        self._headers: list[npt.NDArray[np.void]] = []
        self._lists: list[Int32Array] = []
        self._listed = 0

    @property
    def is_empty(self) -> bool:
        return not self._headers

    def add(self, slot: int, packed: PackedSlot, edits: Int32Array, words: Int32Array, *, is_first: bool) -> None:
        header = np.zeros((), SLOT_UPDATE)
        header["params"], header["slot"] = packed.params, slot
        header["clears"] = is_first and bool(packed.flags & (PENALISES | BIASED | STOPS))
        for name, part in (("edits", edits), ("words", words)):
            header[f"num_{name}"], header[name] = len(part), self._listed
            self._lists.append(part.reshape(-1))
            self._listed += part.size
        self._headers.append(header)
        self.room -= _HEADER_WORDS + edits.size + words.size

    def finish(self) -> tuple[Int32Array, int]:
        headers = np.stack(self._headers)
        for name in ("edits", "words"):
            headers[name] += len(headers) * _HEADER_WORDS
        return np.concatenate([headers.view(np.int32).reshape(-1), *self._lists]), len(headers)

"""The CUDA sampler (sampler.cu) from the host: its memory, its launches, what comes back.

Same tokens, logprobs and error texts as engine/sampler.py for the same logits. A step: a ROW_DESCRIPTOR for every row
of logits -> sample_launches -> sample_results and prompt_logprob. Before the first step of a slot's new sequence:
sampler_slots.py:pack_slot -> pack_updates -> update_launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.errors import NumericError
from engine.fixed_softmax import MAX_VOCAB, SCALE_BITS
from engine.sampler import LOGPROB_FLOOR
from engine.types import SampleResult, TokenLogprob
from kernels.launch import CommonArgument, Launch, address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.sampler import SampleState

OP_SAMPLER = 10  # common.cuh:OpId
MAX_COUNT = (1 << 20) - 1
"""Of one token in one output: 20 bits of a word of `seen`."""

PADDING, SAMPLE, SCORE = 0, 1, 2  # sampler_state.cuh:RowMode

SLOT_PARAMS = np.dtype(
    [
        ("temperature", "<f8"),
        ("floor", "<f8"),
        ("top_p_share", "<u8"),
        ("seed", "<u8"),
        ("choice", "<u4"),
        ("top_k", "<i4"),
        ("min_tokens", "<i4"),
        ("logprobs", "<i4"),
        ("repetition", "<f4"),
        ("frequency", "<f4"),
        ("presence", "<f4"),
        ("flags", "<u4"),
        ("pad", "<u4", (4,)),
    ]
)
"""sampler_state.cuh:SlotParams, 80 bytes."""

SLOT_UPDATE = np.dtype(
    [
        ("params", SLOT_PARAMS),
        ("slot", "<i4"),
        ("clears", "<i4"),
        ("num_edits", "<i4"),
        ("edits", "<i4"),
        ("num_words", "<i4"),
        ("words", "<i4"),
        ("pad", "<i4", (6,)),
    ]
)
"""sampler.cu:SlotUpdate, 128 bytes."""

ROW_DESCRIPTOR = np.dtype(
    [("slot", "<i4"), ("num_generated", "<i4"), ("mode", "<i4"), ("target", "<i4"), ("position", "<i4")]
)
"""sampler_state.cuh:RowDescriptor, 20 bytes: one for every logits row. `mode`: PADDING (nothing is done), SAMPLE, or
SCORE (the logprob of token `target`). `num_generated`: index of the token to be sampled among those of its choice.
`position`: of that token in its sequence, only for reports."""

ROW_RESULT = np.dtype([("token", "<i4"), ("error", "<u4"), ("count", "<i4"), ("first", "<i4")])
"""sampler_state.cuh:RowResult, 16 bytes."""

_NAN, _POSITIVE_INF, _NEGATIVE_INF, _MASKED, _DEVICE, _TARGET, _UNFINISHED = 1, 2, 3, 4, 5, 6, 7  # RowError
_DEVICE_ERRORS = ("", "a page outside the KV pool", "a position outside its table", "a token id outside the vocabulary",
                  "NaN or Inf", "unusable logits")  # common.cuh:ErrorCode  # fmt: skip

_BINS, _GROUP, _CHUNK = 512, 128, 8192  # sampler_select.cuh
_TOP_THREADS, _FINISH_THREADS, _UPDATE_THREADS = 256, 512, 256
_TOP_SHARE = 2048  # tokens of a block: what its threads load at once
_TOP_BLOCKS_PER_SM = 8
_UPDATE_BLOCKS = 16
_FINISH_SHARED = 92 << 10
_MAX_EDITS = 2047  # 11 bits of a word of `seen`
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class SamplerShape:
    """Sizes that are fixed at start. ValueError for those the kernels cannot have."""

    num_slots: int  # with the dummy slot of padding rows
    vocab_size: int
    max_rows: int  # logits rows of a step
    max_edits: int  # of a slot: ids with a bias or that min_tokens masks (the API's limits on logit_bias and stop ids)
    max_logprobs: int  # >= 1

    def __post_init__(self) -> None:
        if not 0 < self.vocab_size < MAX_VOCAB:
            raise ValueError(f"vocab_size must be in [1, {MAX_VOCAB}), got {self.vocab_size}")
        if not 0 <= self.max_edits <= _MAX_EDITS:
            raise ValueError(
                f"logit_bias entries and stop ids of a request: at most {_MAX_EDITS} together on a GPU, the limits "
                f"allow {self.max_edits}; lower max_logit_bias or max_stop_token_ids"
            )
        if not 1 <= self.max_logprobs <= _BINS:
            raise ValueError(f"max_logprobs must be 1 to {_BINS} on a GPU, got {self.max_logprobs}")
        if self.num_slots < 1 or not 1 <= self.max_rows < 65536:
            raise ValueError(f"{self.num_slots} slots, {self.max_rows} rows: 1 or more, and fewer than 65536 rows")

    @property
    def scores(self) -> np.dtype[Any]:
        """What comes back of a row with logprobs: sampler_state.cuh:RowScores and the best tokens."""
        k = self.max_logprobs
        return np.dtype(
            [("total", "<u8"), ("logit", "<f4"), ("top", "<f4"), ("num_best", "<i4"), ("pad", "<i4"),
             ("ids", "<i4", (k,)), ("logits", "<f4", (k,))]
        )  # fmt: skip

    def layout(self) -> dict[str, tuple[int, int]]:
        """(offset, bytes) of each array in the sampler's memory, which is all zero before its first use."""
        groups = -(-self.vocab_size // _GROUP)
        sizes = {
            "params": self.num_slots * SLOT_PARAMS.itemsize,
            "edits": self.num_slots * max(self.max_edits, 1) * 8,
            "seen": self.num_slots * -(-self.vocab_size // 4) * 16,
            "states": self.max_rows * 64,
            "weights": self.max_rows * _BINS * 8,
            "counts": self.max_rows * _BINS * 4,
            "raw_counts": self.max_rows * _BINS * 4,
            "tops": self.max_rows * groups * 4,
            "raw_tops": self.max_rows * groups * 4,
            "group_sums": self.max_rows * groups * 8,
        }
        offset, layout = 0, {}
        for name, size in sizes.items():
            layout[name] = (offset, size)
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        return layout

    @property
    def num_bytes(self) -> int:
        offset, size = self.layout()["group_sums"]
        return offset + size


# ---- launches --------------------------------------------------------------------------------------------------------


def update_launch(shape: SamplerShape, memory: int, buffer: int, num_updates: int) -> Launch:
    """Give slots what pack_updates has written at `buffer`."""
    at = {name: address(memory + offset) for name, (offset, _) in shape.layout().items()}
    arguments = (
        CommonArgument(OP_SAMPLER), address(buffer), at["params"], at["edits"], np.int32(max(shape.max_edits, 1)),
        at["seen"], np.int32(shape.vocab_size),
    )  # fmt: skip
    return Launch("sampler", "sampler_update", (_UPDATE_BLOCKS, num_updates, 1), (_UPDATE_THREADS, 1, 1), arguments)


def sample_launches(
    shape: SamplerShape,
    memory: int,
    *,
    logits: int,
    ld: int,
    rows: int,
    num_rows: int,
    last_token: int,
    results: int,
    scores: int,
    greedy_only: bool = False,
    num_multiprocessors: int = 132,
) -> tuple[Launch, ...]:
    """Sample or score `num_rows` rows of logits (num_rows, ld) fp32; addresses of device memory.

    `rows`: ROW_DESCRIPTOR (num_rows,). Written: `last_token` int32 (num_slots,) for the slots that sampled, `results`
    ROW_RESULT (num_rows,), `scores` shape.scores (num_rows,) for rows with logprobs (others: untouched).
    `greedy_only`: no row draws or wants logprobs, so the first kernel is enough. Which blocks share a row depends on
    num_rows and num_multiprocessors; results never do.
    """
    if ld < shape.vocab_size or ld % 4 or logits % 16:
<<<<<<< HEAD
        raise ValueError(
            f"rows of logits must be 16-byte aligned and hold {shape.vocab_size}: ld {ld}, address {logits:#x}"
        )
=======
        raise ValueError(f"rows of logits, 16-byte aligned, of {shape.vocab_size}: got ld {ld}, address {logits:#x}")
>>>>>>> step
    if not 1 <= num_rows <= shape.max_rows:
        raise ValueError(f"{num_rows} rows, the sampler's memory is for 1 to {shape.max_rows}")
    at = {name: address(memory + offset) for name, (offset, _) in shape.layout().items()}
    vocab = np.int32(shape.vocab_size)
    row = (CommonArgument(OP_SAMPLER), address(logits), np.int64(ld), address(rows), at["params"], at["edits"],
           np.int32(max(shape.max_edits, 1)), at["seen"], at["states"])  # fmt: skip
    sums = tuple(at[name] for name in ("weights", "counts", "raw_counts", "tops", "raw_tops", "group_sums"))
    blocks = max(1, _TOP_BLOCKS_PER_SM * num_multiprocessors // num_rows)
    share = -(-shape.vocab_size // (blocks * _TOP_SHARE)) * _TOP_SHARE
    top = Launch(
        "sampler", "sampler_top", (-(-shape.vocab_size // share), num_rows, 1), (_TOP_THREADS, 1, 1),
        (*row, vocab, np.int32(share), address(last_token), address(results)),
    )  # fmt: skip
    if greedy_only:
        return (top,)
    weigh = Launch(
        "sampler",
        "sampler_weigh",
        (-(-shape.vocab_size // _CHUNK), num_rows, 1),
        (_FINISH_THREADS, 1, 1),
        (*row, *sums, vocab),
    )
    finish = Launch(
        "sampler", "sampler_finish", (num_rows, 1, 1), (_FINISH_THREADS, 1, 1),
        (*row, *sums, vocab, address(last_token), address(results), address(scores),
         np.int32(shape.scores.itemsize), np.int32(shape.max_logprobs)), _FINISH_SHARED,
    )  # fmt: skip
    return top, weigh, finish


<<<<<<< HEAD
# ---- what goes up ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedSlot:
    """A choice's sampling state as the kernels keep it."""

    params: npt.NDArray[np.void]  # SLOT_PARAMS ()
    edits: Int32Array  # (n, 2): bits of the float32 bias, is a stop
    words: Int32Array  # (n, 2): token id, its word of `seen`

    @property
    def needs_more(self) -> bool:
        """Its rows need more than the first kernel (see sample_launches: greedy_only)."""
        return not int(self.params["flags"]) & GREEDY or int(self.params["logprobs"]) >= 0


def pack_slot(shape: SamplerShape, state: SampleState) -> PackedSlot:
    """The choice as it is now: parameters, and the tokens so far. ValueError where it exceeds the shape's limits."""
    wanted = state.params
    if state.vocab_size != shape.vocab_size:
        raise ValueError(f"the state was made for {state.vocab_size} tokens, the sampler for {shape.vocab_size}")
    if wanted.logprobs is not None and wanted.logprobs > shape.max_logprobs:
        raise ValueError(f"{wanted.logprobs} logprobs, the sampler was made for {shape.max_logprobs}")
    stops = state.masked_ids if wanted.min_tokens > 0 else state.masked_ids[:0]
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
        | STOPS * (stops.size > 0)
    )

    edit_ids = np.union1d(state.bias_ids, stops)
    if edit_ids.size > shape.max_edits:
        raise ValueError(
            f"{edit_ids.size} ids with a bias or masked by min_tokens, the sampler was made for {shape.max_edits}"
        )
    edits = np.zeros((edit_ids.size, 2), np.int32)
    edits[np.searchsorted(edit_ids, state.bias_ids), 0] = state.bias_values.view(np.int32)
    edits[np.searchsorted(edit_ids, stops), 1] = 1

    counted_ids, counts = state.penalised()
    if counts.size and counts.max() > _MAX_COUNT:
        raise ValueError(f"a token was generated {int(counts.max())} times; penalties on a GPU count to {_MAX_COUNT}")
    ids = np.union1d(edit_ids, counted_ids)
    words = np.zeros(ids.size, np.uint32)
    words[np.searchsorted(ids, edit_ids)] |= np.arange(1, edit_ids.size + 1, dtype=np.uint32) << np.uint32(20)
    words[np.searchsorted(ids, counted_ids)] |= np.where(counts > 0, counts.astype(np.uint32), np.uint32(1 << 31))
    return PackedSlot(params, edits, np.stack([ids.astype(np.int32), words.view(np.int32)], axis=1))


def pack_updates(updates: Sequence[tuple[int, PackedSlot]], capacity: int) -> list[tuple[Int32Array, int]]:
    """Buffers for update_launch, in order, each at most `capacity` int32, with the number of updates in it.

    A slot with more words than fit is continued in the next buffer. ValueError if `capacity` is below what the largest
    list of edits needs.
    """
    buffers: list[tuple[Int32Array, int]] = []
    headers: list[npt.NDArray[np.void]] = []
    lists: list[Int32Array] = []
    used = 0
    header_words = SLOT_UPDATE.itemsize // 4

    def flush() -> None:
        nonlocal used
        if headers:
            offset = len(headers) * header_words
            for header in headers:
                header["edits"] += offset
                header["words"] += offset
            parts = [np.stack(headers).view(np.int32).reshape(-1), *(part.reshape(-1) for part in lists)]
            buffers.append((np.concatenate(parts), len(headers)))
        headers.clear()
        lists.clear()
        used = 0

    for slot, packed in updates:
        start, first = 0, True
        while first or start < len(packed.words):
            edits = packed.edits if first else packed.edits[:0]
            room = capacity - used - header_words - edits.size
            if room < min(2, packed.words.size):
                if not headers:
                    raise ValueError(
                        f"an update buffer of {capacity} words cannot hold {edits.size // 2} edits and a token"
                    )
                flush()
                continue
            words = packed.words[start : start + room // 2]
            header = np.zeros((), SLOT_UPDATE)
            base = sum(part.size for part in lists)
            header["params"], header["slot"] = packed.params, slot
            header["clears"] = first and bool(int(packed.params["flags"]) & (PENALISES | BIASED | STOPS))
            header["num_edits"], header["edits"] = len(edits), base
            header["num_words"], header["words"] = len(words), base + edits.size
            headers.append(header)
            lists += [edits, words]
            used += header_words + edits.size + words.size
            start += len(words)
            first = False
    flush()
    return buffers


=======
>>>>>>> step
# ---- what comes back -------------------------------------------------------------------------------------------------


def sample_results(
    results: npt.NDArray[np.void], scores: npt.NDArray[np.void], states: Sequence[SampleState]
) -> list[SampleResult]:
    """engine/sampler.py:sample's answer, from ROW_RESULT and shape.scores (rows,) of sampled rows; states as before the
    tokens are appended."""
    out = []
<<<<<<< HEAD
    for i, (token, error, state) in enumerate(
        zip(results["token"].tolist(), results["error"].tolist(), states, strict=True)
    ):
=======
    tokens, errors = results["token"].tolist(), results["error"].tolist()
    for i, (token, error, state) in enumerate(zip(tokens, errors, states, strict=True)):
>>>>>>> step
        if error:
            text = _what_is_wrong(results[i], state.vocab_size)
            position = state.num_prompt_tokens + state.num_generated
            place = f"(logits of the token at position {position}, generated token {state.num_generated})"
            out.append(SampleResult(-1, error=f"{text} {place}"))
        elif state.params.logprobs is None:
            out.append(SampleResult(token))
        else:
            out.append(SampleResult(token, logprob=_token_logprob(token, scores[i])))
    return out


def prompt_logprob(result: np.void, scores: np.void, vocab_size: int) -> TokenLogprob:
    """engine/sampler.py:token_logprobs' answer, from the ROW_RESULT and shape.scores of a SCORE row. Raises as it does:
    NumericError where the row has no usable logits (or an earlier kernel failed), ValueError for a bad target."""
    if int(result["error"]) == _TARGET:
        raise ValueError(f"token id {int(result['first'])} is outside the vocabulary (0..{vocab_size - 1})")
    if int(result["error"]):
        raise NumericError(_what_is_wrong(result, vocab_size), op="logits")
    return _token_logprob(int(result["token"]), scores)


def _token_logprob(token: int, scores: np.void) -> TokenLogprob:
    shift = float(scores["top"]) + math.log(int(scores["total"]) / (1 << SCALE_BITS))
    count = int(scores["num_best"])
    ids, logits = scores["ids"][:count].tolist(), scores["logits"][:count].tolist()
    best = [(i, max(logit - shift, LOGPROB_FLOOR)) for i, logit in zip(ids, logits, strict=True)]
    return TokenLogprob(token, max(float(scores["logit"]) - shift, LOGPROB_FLOOR), best)


def _what_is_wrong(result: np.void, vocab_size: int) -> str:
    error, count, first = int(result["error"]), int(result["count"]), int(result["first"])
    if error in (_NAN, _POSITIVE_INF):
        name = "NaN" if error == _NAN else "+inf"
        return f"logits contain {name}: {count} of {vocab_size}, the first at token id {first}"
    if error == _NEGATIVE_INF:
        return f"all {vocab_size} logits are -inf"
    if error == _MASKED:
        return "every token with a finite logit is masked by min_tokens"
    if error == _UNFINISHED:
        return "this row needs all kernels of sample_launches, not greedy_only"
    if error == _DEVICE:
        names = [name for bit, name in enumerate(_DEVICE_ERRORS) if name and count >> bit & 1]
        return f"a kernel before the sampler reported {' and '.join(names) or hex(count)}"
    raise ValueError(f"unknown error {error} in a sampler result")

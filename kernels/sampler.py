"""The CUDA sampler (sampler.cu) from the host: its launches, and what comes back.

Same tokens, logprobs and error texts as engine/sampler.py for the same logits. A step: a ROW_DESCRIPTOR for every row
of logits -> sample_launches -> sample_results and prompt_logprob. Before the first step of a slot's new sequence:
pack_slot -> pack_updates -> update_launch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.errors import NumericError
from engine.fixed_softmax import SCALE_BITS
from engine.sampler import LOGPROB_FLOOR
from engine.types import SampleResult, TokenLogprob
from kernels.launch import CommonArgument, Launch, address
from kernels.sampler_layout import PADDING, ROW_DESCRIPTOR, ROW_RESULT, SAMPLE, SCORE, SamplerShape
from kernels.sampler_slots import PackedSlot, pack_slot, pack_updates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.sampler import SampleState

__all__ = [
    "PADDING",
    "ROW_DESCRIPTOR",
    "ROW_RESULT",
    "SAMPLE",
    "SCORE",
    "PackedSlot",
    "SamplerShape",
    "pack_slot",
    "pack_updates",
    "prompt_logprob",
    "sample_launches",
    "sample_results",
    "update_launch",
]

OP_SAMPLER = 10  # common.cuh:OpId

_NAN, _POSITIVE_INF, _NEGATIVE_INF, _MASKED, _DEVICE, _TARGET, _UNFINISHED = 1, 2, 3, 4, 5, 6, 7  # RowError
_DEVICE_ERRORS = ("", "a page outside the KV pool", "a position outside its table", "a token id outside the vocabulary",
                  "NaN or Inf", "unusable logits")  # common.cuh:ErrorCode  # fmt: skip

_CHUNK = 8192  # tokens of a block of sampler_weigh
_TOP_THREADS, _FINISH_THREADS, _UPDATE_THREADS = 256, 512, 256
_TOP_SHARE = 2048  # tokens of a block: what its threads load at once
_TOP_BLOCKS_PER_SM = 8
_UPDATE_BLOCKS = 16
_FINISH_SHARED = 92 << 10


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
        raise ValueError(f"rows of logits, 16-byte aligned, of {shape.vocab_size}: got ld {ld}, address {logits:#x}")
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


# ---- what comes back -------------------------------------------------------------------------------------------------


def sample_results(
    results: npt.NDArray[np.void], scores: npt.NDArray[np.void], states: Sequence[SampleState]
) -> list[SampleResult]:
    """engine/sampler.py:sample's answer, from ROW_RESULT and shape.scores (rows,) of sampled rows; states as before the
    tokens are appended."""
    out = []
    tokens, errors = results["token"].tolist(), results["error"].tolist()
    for i, (token, error, state) in enumerate(zip(tokens, errors, states, strict=True)):
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

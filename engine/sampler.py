"""Sampler: one token for every row of logits, each row on its own, the same bits in any batch and on any machine.

Definition (the CUDA sampler must give the same tokens). For a row of float32 logits and the state of its choice:

 1. A row with NaN, with +inf or with nothing but -inf is an error of that row only.
 2. logit_bias: logit += bias.
 3. min_tokens: while fewer tokens were generated, EOS and stop ids get -inf.
 4. Penalties, in this order: repetition (CTRL, arXiv 1909.05858, over prompt and output: logit > 0 is divided by it,
    others are multiplied), frequency (logit -= penalty * count), presence (logit -= penalty), both over the output.
    Steps 2-4 are float32, each operation rounded once; a finite logit saturates at +-FLT_MAX, -inf stays -inf.
 5. temperature < 1e-5: greedy, the highest logit, ties to the lowest id; steps 6-10 are skipped.
 6. Tokens are ranked by (logit descending, id ascending). Every filter keeps a prefix of this ranking.
 7. min_p (arXiv 2407.01082): keep logit >= float32(max + temperature * ln(min_p)), which is p >= min_p * p_max.
 8. top_k: keep the first k; 0 or k >= vocabulary = off.
 9. top_p (nucleus, arXiv 1904.09751) over what is left, renormalised: keep the shortest prefix whose weight is at least
    top_p of their total weight. At least one token stays.
10. Inverse CDF over the kept tokens in the order of their ids: with weights from fixed_softmax (integers, so sums have
    no order) and 64 random bits of Philox keyed by (seed, choice, index of the generated token),
    r = bits * total >> 64; the token is the first whose running sum is greater than r.

The order of 2-9 is vLLM's (v1/sample/sampler.py: bias and min_tokens come before the penalties). Logprobs are vLLM's
default: of the model's raw logits, before step 2. The inverse CDF was chosen over Gumbel-max because it takes one draw
a token instead of one per vocabulary entry (152k Philox calls in numpy), and in id order because then nothing needs a
sort: a filter is a threshold (found with a histogram, here and on a GPU), the walk is one prefix sum, and both are
exact in integers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.errors import NumericError
from engine.fixed_softmax import MAX_VOCAB, ZERO_BELOW, log_sum_exp, softmax_weights
from engine.rng import token_bits
from engine.types import Float32Array, Int64Array, SampleResult, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy (vLLM's limit)."""

LOGPROB_FLOOR = -9999.0
"""Lowest logprob reported, for tokens of probability 0: OpenAI's value, and JSON has no -inf."""

_FLOAT_MAX = float(np.finfo(np.float32).max)
_FLOAT_TINY = float(np.finfo(np.float32).tiny)
_SORT_AT_MOST = 512  # candidates that are sorted outright when looking for the end of the nucleus
_BINS = 2048  # of the histogram that narrows more of them down
_BLOCK = 8192  # tokens
_HISTOGRAM_PASSES = 3  # then sort whatever is left: bounds the work on rows that will not spread


class SampleState:
    """What the sampler knows of one choice: parameters, the tokens so far as sparse counts, the RNG position.

    `prompt_ids` are the prompt's token ids, `seed_index` the index of the choice (0..n-1). After a preemption the state
    simply lives on; rebuilt from scratch and fed the same tokens through `append`, it samples the same.
    Raises ValueError for a token id outside the vocabulary (in the prompt, logit_bias or append).
    """

    __slots__ = (
        "_counts",
        "_ids",
        "_num_ids",
        "_penalises",
        "_slot",
        "bias_ids",
        "bias_values",
        "masked_ids",
        "num_generated",
        "num_prompt_tokens",
        "params",
        "repetition",
        "seed_index",
        "vocab_size",
    )

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, seed_index: int) -> None:
        if not 0 < vocab_size < MAX_VOCAB:
            raise ValueError(f"vocab_size must be in [1, {MAX_VOCAB}), got {vocab_size}")
        self.params = params
        self.vocab_size = vocab_size
        self.seed_index = seed_index
        self.num_prompt_tokens = len(prompt_ids)
        self.num_generated = 0
        token_bits(params.seed, seed_index, 0)  # a bad seed is refused now, not at the first token

        self.bias_ids = np.array(sorted(params.logit_bias), np.int64)
        self._check_ids(params.logit_bias, "logit_bias")
        self.bias_values = np.array([params.logit_bias[int(i)] for i in self.bias_ids], np.float32)
        # An id beyond the vocabulary can never be sampled, so there is nothing to mask.
        stops = {i for i in (*params.eos_token_ids, *params.stop_token_ids) if 0 <= i < vocab_size}
        self.masked_ids = np.array(sorted(stops), np.int64)

        self.repetition = np.float32(min(max(params.repetition_penalty, _FLOAT_TINY), _FLOAT_MAX))
        counted = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._penalises = counted or self.repetition != 1.0
        seen: Iterable[int] = ()
        if self.repetition != 1.0:
            self._check_ids(prompt_ids, "the prompt")
            seen = sorted(set(prompt_ids))
        self._ids = np.array(list(seen), np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._num_ids = len(self._ids)
        self._slot = {int(token_id): i for i, token_id in enumerate(self._ids)}

    def _check_ids(self, ids: Iterable[int], where: str) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} in {where} is outside the vocabulary (0..{self.vocab_size - 1})")

    def append(self, token_id: int) -> None:
        """Count the token that was chosen for this step (the sampled one, or another that replaced it)."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary (0..{self.vocab_size - 1})")
        self.num_generated += 1
        if not self._penalises:
            return
        slot = self._slot.setdefault(token_id, self._num_ids)
        if slot == self._num_ids:
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(max(slot, 64), np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(max(slot, 64), np.float32)])
            self._ids[slot] = token_id
            self._num_ids += 1
        self._counts[slot] += 1.0

    def penalised(self) -> tuple[Int64Array, Float32Array]:
        """(ids, counts): the distinct tokens that penalties concern, and how often each is in the output."""
        return self._ids[: self._num_ids], self._counts[: self._num_ids]

    @property
    def masks_stops(self) -> bool:
        return self.num_generated < self.params.min_tokens and self.masked_ids.size > 0


def sample(logits: Float32Array, states: Sequence[SampleState]) -> list[SampleResult]:
    """Choose a token for every row of `logits` (rows, vocab), float32; `states[i]` belongs to row i.

    Reads logits only, changes no state (the caller appends what it accepts). A row that cannot be sampled gets
    SampleResult.error and leaves the others alone. Raises ValueError where shapes, dtype or vocabulary do not fit.
    """
    if logits.ndim != 2 or logits.dtype != np.float32:
        raise ValueError(f"logits must be float32 (rows, vocab), got {logits.dtype} {logits.shape}")
    if logits.shape[0] != len(states):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(states)} states")
    for state in states:
        if state.vocab_size != logits.shape[1]:
            raise ValueError(f"logits have {logits.shape[1]} columns, the state was made for {state.vocab_size}")
    return [_sample_row(np.ascontiguousarray(row), state) for row, state in zip(logits, states)]


def token_logprobs(logits_row: Float32Array, token_id: int, k: int) -> TokenLogprob:
    """Raw logprob of `token_id` and the `k` most probable tokens of a row (vocab,), best first, ties to the lower id.

    log_softmax of the row, float64, never below LOGPROB_FLOOR. Raises NumericError where the row has no usable logits,
    ValueError for a token id outside it.
    """
    vocab_size = logits_row.shape[0]
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"token id {token_id} is outside the vocabulary (0..{vocab_size - 1})")
    top = float(logits_row[logits_row.argmax()])
    if not math.isfinite(top):
        raise NumericError(_what_is_wrong(logits_row), op="logits")
    shift = log_sum_exp(logits_row, top)

    def logprob(i: int) -> float:
        return max(float(logits_row[i]) - shift, LOGPROB_FLOOR)

    best = _best_ids(logits_row, k) if k > 0 else []
    return TokenLogprob(token_id, logprob(token_id), [(i, logprob(i)) for i in best])


def _sample_row(raw: Float32Array, state: SampleState) -> SampleResult:
    best = int(raw.argmax())  # numpy: the first NaN if there is one, else the first of the largest
    if not math.isfinite(raw[best]):
        return SampleResult(-1, error=f"{_what_is_wrong(raw)} {_place(state)}")
    row = _apply_bias_mask_penalties(raw, state)
    if row is not raw:
        best = int(row.argmax())
        if row[best] == -np.inf:
            return SampleResult(-1, error=f"every token with a finite logit is masked by min_tokens {_place(state)}")
    if state.params.temperature >= GREEDY_BELOW:
        best = _draw(row, float(row[best]), state)
    if state.params.logprobs is None:
        return SampleResult(best)
    return SampleResult(best, logprob=token_logprobs(raw, best, state.params.logprobs))


def _place(state: SampleState) -> str:
    position = state.num_prompt_tokens + state.num_generated
    return f"(logits of the token at position {position}, generated token {state.num_generated})"


def _what_is_wrong(row: Float32Array) -> str:
    for name, bad in (("NaN", np.isnan(row)), ("+inf", np.isposinf(row))):
        count = int(np.count_nonzero(bad))
        if count:
            return f"logits contain {name}: {count} of {row.shape[0]}, the first at token id {int(bad.argmax())}"
    return f"all {row.shape[0]} logits are -inf"


def _apply_bias_mask_penalties(raw: Float32Array, state: SampleState) -> Float32Array:
    """Steps 2-4. Touches only the ids concerned; returns `raw` itself where nothing changes."""
    ids, counts = state.penalised()
    if not (state.bias_ids.size or state.masks_stops or ids.size):
        return raw
    params = state.params
    row = raw.copy()
    with np.errstate(over="ignore"):
        if state.bias_ids.size:
            old = row[state.bias_ids]
            row[state.bias_ids] = _saturate(old + state.bias_values, old)
        if state.masks_stops:
            row[state.masked_ids] = -np.inf
        if ids.size:
            old = row[ids]
            new: Float32Array = old
            if state.repetition != 1.0:
                new = np.where(new > 0, new / state.repetition, new * state.repetition)
                new = _saturate(new, old)
            if params.frequency_penalty != 0.0:
                new = new - np.float32(params.frequency_penalty) * counts
            if params.presence_penalty != 0.0:
                new = np.where(counts > 0, new - np.float32(params.presence_penalty), new)
            row[ids] = _saturate(new, old)
    return row


def _saturate(new: Float32Array, old: Float32Array) -> Float32Array:
    """A huge but finite logit must not become infinite by a penalty: it would be taken for a fault of the model."""
    return np.where(old == -np.inf, old, np.clip(new, -_FLOAT_MAX, _FLOAT_MAX))


def _draw(row: Float32Array, top: float, state: SampleState) -> int:
    """Steps 6-10 for a row whose maximum `top` is finite."""
    params = state.params
    ids, values = _candidates(row, top, params)
    if 0 < params.top_k < values.shape[0]:
        kept = _first_ranked(values, params.top_k)
        ids = kept if ids is None else ids[kept]
        values = values[kept]
    weights = softmax_weights(values, top, params.temperature)
    if params.top_p < 1.0:
        floor = max(top + ZERO_BELOW * params.temperature, -_FLOAT_MAX)
        _zero_outside_nucleus(values, weights, params.top_p, floor)
    running = np.cumsum(weights, out=weights)
    bits = token_bits(params.seed, state.seed_index, state.num_generated)
    r = (bits * int(running[-1])) >> 64
    chosen = int(np.searchsorted(running, np.int64(r), side="right"))
    return chosen if ids is None else int(ids[chosen])


def _candidates(row: Float32Array, top: float, params: SamplingParams) -> tuple[Int64Array | None, Float32Array]:
    """(ids ascending, their logits): the tokens that pass min_p, less those that weigh 0. ids None = the whole row."""
    floor = ZERO_BELOW
    if params.min_p > 0.0:
        floor = max(floor, math.log(min(params.min_p, 1.0)))
    threshold = np.float32(max(top + params.temperature * floor, -_FLOAT_MAX))
    passing = row >= threshold
    count = int(np.count_nonzero(passing))
    if count == row.shape[0] or (params.min_p <= 0.0 and count > row.shape[0] // 2):
        return None, row  # the few that weigh 0 cost less than gathering the rest
    ids = np.flatnonzero(passing)
    return ids, row[ids]


def _first_ranked(values: Float32Array, k: int) -> Int64Array:
    """Indices, ascending, of the k first by (value descending, index ascending); 0 < k <= len(values)."""
    n = values.shape[0]
    if k == n:
        return np.arange(n)
    cut = np.partition(values, n - k)[n - k]
    above = np.flatnonzero(values > cut)
    equal = np.flatnonzero(values == cut)[: k - above.size]
    return np.sort(np.concatenate([above, equal]))


def _best_ids(row: Float32Array, k: int) -> list[int]:
    """The k best ids, best first, ties to the lower id."""
    kept = _first_ranked(row, min(k, row.shape[0]))
    order = np.argsort(-row[kept], kind="stable")
    return [int(i) for i in kept[order]]


def _zero_outside_nucleus(values: Float32Array, weights: Int64Array, top_p: float, floor: float) -> None:
    """Step 9, in place: tokens outside the nucleus get weight 0. `floor`: logits at or below it weigh 0 already."""
    total = int(weights.sum())
    share = math.ceil(top_p * 2.0**53)  # top_p as a fraction of 2**53, so that the target is an exact integer
    target = max(1, (share * total + (1 << 53) - 1) >> 53)
    if target >= total:
        return  # all that weighs anything is inside
    cut, num_equal = _nucleus_end(values, weights, target, floor)
    weights *= values >= cut
    equal = np.flatnonzero(values == cut)
    weights[equal[num_equal:]] = 0


def _nucleus_end(values: Float32Array, weights: Int64Array, target: int, floor: float) -> tuple[np.float32, int]:
    """(value, how many tokens of exactly that value) where the running weight by rank first reaches `target`.

    A histogram finds the narrow range of logits where that happens and only the tokens in it are sorted. Its sums are
    rounded, so the range is checked in exact integers; where that fails, or the tokens will not spread, all are sorted.
    """
    for _ in range(_HISTOGRAM_PASSES):
        if values.shape[0] <= _SORT_AT_MOST:
            break
        bins = _rank_bins(values, floor)
        sums = np.cumsum(_histogram(bins, weights))
        found = min(int(np.searchsorted(sums, float(target))), _BINS - 1)
        inside = np.flatnonzero(bins == found)
        rest = target - _sum_where(weights, bins < found)
        if not 0 < rest <= int(weights[inside].sum()):
            break
        values, weights, target = values[inside], weights[inside], rest
    order = np.argsort(-values, kind="stable")
    end = int(np.searchsorted(np.cumsum(weights[order]), np.int64(target), side="left"))
    cut = values[order[end]]
    return cut, int(np.count_nonzero(values[order[: end + 1]] == cut))


def _rank_bins(values: Float32Array, floor: float) -> npt.NDArray[np.int16]:
    """Bin of every value, 0 for the highest: equal widths between the maximum and max(floor, minimum). Monotone."""
    high = values.max()
    width = float(high) - max(float(values.min()), floor)
    scale = np.float32(min(_BINS / width, _FLOAT_MAX) if width > 0.0 else _FLOAT_MAX)
    with np.errstate(over="ignore"):  # values far below the floor, or -inf: all in the last bin
        scaled: Float32Array = high - values
        scaled *= scale
    np.minimum(scaled, np.float32(_BINS - 1), out=scaled)
    return scaled.astype(np.int16)


# Blocks in the next two: numpy's temporaries then stay in the cache and are recycled, where one of a whole row would go
# back to the kernel every time and cost more in page faults than in arithmetic.


def _histogram(bins: npt.NDArray[np.int16], weights: Int64Array) -> npt.NDArray[np.float64]:
    sums = np.zeros(_BINS, np.float64)
    for start in range(0, bins.shape[0], _BLOCK):
        block = slice(start, start + _BLOCK)
        sums += np.bincount(bins[block], weights[block], _BINS)
    return sums


def _sum_where(weights: Int64Array, mask: npt.NDArray[np.bool_]) -> int:
    total = 0
    for start in range(0, weights.shape[0], _BLOCK):
        block = slice(start, start + _BLOCK)
        total += int((weights[block] * mask[block]).sum())
    return total

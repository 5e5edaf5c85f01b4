"""Independent float64 reference of the sampler, written densely and plainly from the papers' definitions."""

from __future__ import annotations

import numpy as np
import scipy.special
import scipy.stats

from engine.sampler import SampleState, sample
from engine.types import SamplingParams


def make_params(seed=1, max_tokens=100, **options) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, **options)


def processed_logits(logits, params, prompt=(), output=()):
    """Bias, min_tokens, then the penalties of CTRL (1909.05858, section 4.1) and of OpenAI's API reference."""
    x = np.array(logits, np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(output) < params.min_tokens:
        for token in [*params.eos_token_ids, *params.stop_token_ids]:
            x[token] = -np.inf
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token)
        x[token] -= params.presence_penalty
    return x


def reference_probabilities(logits, params, prompt=(), output=()):
    """The distribution a token is drawn from: temperature, min-p (2407.01082), top-k, nucleus (1904.09751)."""
    x = processed_logits(logits, params, prompt, output)
    p = scipy.special.softmax(x / params.temperature)
    p[p < params.min_p * p.max() * (1 - 1e-7)] = 0  # the logits are float32: equal to within that is equal
    order = np.lexsort((np.arange(len(p)), -x))  # most probable first, ties by id
    if 0 < params.top_k < len(p):
        p[order[params.top_k :]] = 0
    p /= p.sum()
    cumulative = np.cumsum(p[order])
    keep = int(np.argmax(cumulative >= params.top_p - 1e-12)) + 1 if params.top_p < 1 else len(p)
    p[order[keep:]] = 0
    return p / p.sum()


def draw_many(logits, params, count, prompt=(), choice=0):
    """Counts per token of the draws for generated tokens 0..count-1 with the same logits each time."""
    row = np.asarray(logits, np.float32)[None, :]
    counts = np.zeros(row.shape[1], np.int64)
    state = SampleState(params, list(prompt), row.shape[1], choice)
    for position in range(count):
        state.num_generated = position
        result = sample(row, [state])[0]
        assert result.error is None
        counts[result.token_id] += 1
    return counts


def chi_square_p(counts, probabilities):
    """p-value of the counts under the probabilities; rare tokens pooled so that each cell expects at least 5."""
    assert not counts[probabilities == 0].any(), "a token outside the distribution was drawn"
    expected = probabilities * counts.sum()
    order = np.argsort(expected)
    cells, observed = [0.0], [0.0]
    for i in order[expected[order] > 0]:
        if cells[-1] >= 5:
            cells.append(0.0)
            observed.append(0.0)
        cells[-1] += expected[i]
        observed[-1] += counts[i]
    if len(cells) == 1:
        return 1.0
    return float(scipy.stats.chisquare(observed, np.array(cells) * (sum(observed) / sum(cells))).pvalue)

"""Statistics of a canary: how much the counts prove. Pure; every function takes numbers or numpy arrays.

Shares of bad observations (errors of requests, latencies at or over a limit) are judged, never estimated quantiles:
"p99 < 80 ms" is "fewer than 1 % take 80 ms or longer", a question about one proportion.

Two kinds of evidence. A *confidence bound* (Clopper and Pearson 1934) may be looked at once, at a moment that does not
depend on what was counted. An *e-value* may be looked at at any time: a process that starts at 1 and cannot grow on
average under the hypothesis exceeds 1/alpha at any time with probability at most alpha (Ville 1939; Robbins 1970;
Johari et al. 2017). All e-values are natural logarithms here.

scipy is loaded by the first call that needs it, so that an idle controller does not carry it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# Alternatives of the comparison: how many times the ratio under test the canary may be worse.
RATIOS: Floats = np.array([1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0])
_OVER = 10.0  # mean of the alternatives to "within the limit", in limits: what a broken release looks like
_UNDER = 0.5  # likewise to "over the limit": a release to be let through has about half of what is allowed


@cache
def _special() -> Any:
    from scipy import special

    return special


def log_e_over(bad: ArrayLike, total: ArrayLike, limit: float) -> Floats:
    """Evidence (log e-value) against "the share of bad ones is at most `limit`", valid at any number of looks.

    Beta(1, b) mixture of likelihood ratios over the shares above the limit only: without the truncation a release that
    is far better than the limit would be "rejected" as well. For every share in the hypothesis it is a
    supermartingale: a factor's mean, p p1/p0 + (1-p)(1-p1)/(1-p0), rises with p and is 1 at p = p0.
    """
    return _log_mixture(bad, total, limit, max(1.0, 1 / (_OVER * limit) - 1), above=True)


def log_e_under(bad: ArrayLike, total: ArrayLike, limit: float) -> Floats:
    """Evidence (log e-value) against "the share of bad ones is at least `limit`", valid at any number of looks."""
    return _log_mixture(bad, total, limit, max(1.0, 1 / (_UNDER * limit)), above=False)


def _log_mixture(bad: ArrayLike, total: ArrayLike, limit: float, b: float, *, above: bool) -> Floats:
    k, n = np.asarray(bad, dtype=np.float64), np.asarray(total, dtype=np.float64)
    posterior = _log_part(k + 1, n - k + b, limit, above=above)
    prior = _log_part(np.float64(1), np.float64(b), limit, above=above)
    likelihood = k * math.log(limit) + (n - k) * math.log1p(-limit)
    return np.asarray(posterior - prior - likelihood)


def _log_part(a: Floats | np.float64, b: Floats | np.float64, x: float, *, above: bool) -> Floats:
    """Logarithm of the integral of p^(a-1) (1-p)^(b-1) over p > x (above) or p < x."""
    special = _special()
    share = special.betaincc(a, b, x) if above else special.betainc(a, b, x)
    slope = np.abs((b - 1) / (1 - x) - (a - 1) / x)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = special.betaln(a, b) + np.log(share)
        # A part too small for a double lies 37 standard deviations out, where Laplace's expansion (two terms) holds.
        curve = (a - 1) / x**2 + (b - 1) / (1 - x) ** 2
        tail = (a - 1) * math.log(x) + (b - 1) * math.log1p(-x) - np.log(slope) + np.log1p(-curve / slope**2)
    return np.where(share > 0, exact, tail)


def log_mean(logs: ArrayLike, weights: ArrayLike) -> Floats:
    """Logarithm of the weighted mean over the last axis. A mean of e-values is one, whatever their dependence."""
    values, shares = np.asarray(logs, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    top = values.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log((np.exp(values - top) * shares).sum(axis=-1)))


def worse_increment(
    bad: ArrayLike, total: ArrayLike, stable_bad: ArrayLike, stable_total: ArrayLike, ratio: float
) -> Floats:
    """What one window adds to the logs (last axis: RATIOS) against "canary's share <= `ratio` times stable's".

    Given that a bad observation came, it is the canary's with probability q r/(q r + 1 - q), with q the canary's part
    of all observations of the window and r the ratio of the shares: likelihood ratio of `ratio` times RATIOS to
    `ratio`. Valid for any shares, which may differ from window to window (trouble of the whole host, changes of the
    weight): by 1 + x <= e^x its mean is at most exp(N p (q r (A-1) + (1-q)(B-1))), and that exponent is 0 at the
    hypothesis and negative below it. A window in which one side has no observations adds nothing.
    """
    k, n, s, m = (
        np.asarray(value, dtype=np.float64)[..., np.newaxis] for value in (bad, total, stable_bad, stable_total)
    )
    both = np.maximum(n + m, 1)
    base = np.log((n * ratio + m) / both, where=n + m > 0, out=np.zeros(np.broadcast_shapes(n.shape, m.shape)))
    there = np.log((n * ratio * RATIOS + m) / both, where=n + m > 0, out=np.zeros((*base.shape[:-1], len(RATIOS))))
    return np.asarray(k * np.log(RATIOS) - (k + s) * (there - base))


def log_e_worse(logs: ArrayLike) -> Floats:
    """Evidence from sums of `worse_increment`: equal parts of all RATIOS."""
    return log_mean(logs, np.full(len(RATIOS), 1 / len(RATIOS)))


def upper_bound(bad: ArrayLike, total: ArrayLike, alpha: float) -> Floats:
    """Clopper-Pearson: the share is below it with confidence 1 - alpha; 1 where nothing was seen. Counts may be scaled
    (effective) ones."""
    k, n = np.asarray(bad, dtype=np.float64), np.asarray(total, dtype=np.float64)
    good = n - k
    return np.where(good > 0, _special().betaincinv(k + 1, np.maximum(good, 1e-9), 1 - alpha), 1.0)


def lower_bound(bad: ArrayLike, total: ArrayLike, alpha: float) -> Floats:
    """Clopper-Pearson: the share is above it with confidence 1 - alpha; 0 where nothing bad was seen."""
    k, n = np.asarray(bad, dtype=np.float64), np.asarray(total, dtype=np.float64)
    return np.where(k > 0, _special().betaincinv(np.maximum(k, 1e-9), n - k + 1, alpha), 0.0)


def needed(limit: float, alpha: float, bad: float = 0) -> int:
    """Observations from which `bad` bad ones show a share below `limit`: 2,995 for none, 0.1 % and 95 %."""
    if bad == 0:
        return math.ceil(math.log(alpha) / math.log1p(-limit))
    return _first(lambda total: float(upper_bound(bad, total, alpha)) <= limit, bad, limit)


def needed_sequential(limit: float, alpha: float, bad: float = 0) -> int:
    """As `needed`, for `log_e_under`: 3,940 for none, 0.1 % and 95 %."""
    return _first(lambda total: float(log_e_under(bad, total, limit)) >= -math.log(alpha), bad, limit)


def _first(enough: Callable[[float], bool], bad: float, limit: float) -> int:
    """The smallest number above bad / limit from which `enough` holds."""
    low, high = math.floor(bad / limit), max(16, math.ceil(2 * bad / limit))
    while not enough(high):
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def ratio_upper(bad: float, stable_bad: float, expected: float, alpha: float) -> float:
    """Upper confidence bound of (canary's share / stable's share), exact given the sum of the bad ones.

    expected: the part of the bad ones that would be the canary's if both shares were equal. Infinite where the counts
    bound nothing. The bad ones are taken as rare; where they are not, the bound is too wide, never too narrow.
    """
    part = float(upper_bound(bad, bad + stable_bad, alpha))
    if part >= 1 or not 0 < expected < 1:
        return math.inf
    return part * (1 - expected) / ((1 - part) * expected)


def fisher_worse(bad: int, total: int, stable_bad: int, stable_total: int) -> float:
    """One-sided p-value of Fisher's exact test: so many bad ones at the canary or more, were both sides equal."""
    lnfact = _special().gammaln
    most = min(total, bad + stable_bad)
    ours = np.arange(bad, most + 1, dtype=np.float64)
    theirs = bad + stable_bad - ours
    ours, theirs = ours[theirs <= stable_total], theirs[theirs <= stable_total]

    def choose(n: float, k: Floats | float) -> Any:
        return lnfact(n + 1) - lnfact(k + 1) - lnfact(n - k + 1)

    logs = choose(total, ours) + choose(stable_total, theirs) - choose(total + stable_total, bad + stable_bad)
    return min(1.0, float(np.exp(logs).sum()))

"""Oracles: the definitions integrated by scipy, exact sums over all outcomes, scipy's own tests, published figures."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from scipy.stats import beta, binom, binomtest, fisher_exact

from canary import stats

bounded = settings(deadline=None, max_examples=60)
COUNTS = st.integers(1, 20_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
LIMITS = st.sampled_from([0.0005, 0.001, 0.01, 0.05, 0.2, 0.5])


@pytest.mark.parametrize(
    ("limit", "alpha", "figures"),
    [  # requests from which k errors show a share below the limit
        (0.001, 0.10, {0: 2302, 1: 3889, 2: 5321, 3: 6679, 5: 9273, 10: 15404}),
        (0.001, 0.05, {0: 2995, 1: 4742, 2: 6294, 3: 7752, 5: 10511, 10: 16959}),
        (0.001, 0.01, {0: 4603, 1: 6636, 2: 8403, 3: 10042, 5: 13105, 10: 20140}),
        (0.01, 0.05, {0: 299, 1: 473, 2: 628, 3: 773, 5: 1049, 10: 1693}),
    ],
)
def test_requests_needed_are_the_published_ones(limit, alpha, figures):
    assert {bad: stats.needed(limit, alpha, bad) for bad in figures} == figures


@pytest.mark.parametrize(
    ("limit", "figures"), [(0.001, {100: 2, 300: 3, 1000: 5, 3000: 10}), (0.01, {100: 5, 300: 10})]
)
def test_bad_ones_that_fail_a_release_are_the_published_ones(limit, figures):
    for total, least in figures.items():
        logs = stats.log_e_over(np.arange(least + 1), total, limit)
        assert logs[least] >= math.log(20) > logs[least - 1]


@bounded
@given(COUNTS, st.sampled_from([0.01, 0.05, 0.2]))
def test_bounds_are_scipys_exact_interval(counts, alpha):
    bad, total = counts
    interval = binomtest(bad, total).proportion_ci(1 - 2 * alpha, method="exact")
    assert float(stats.lower_bound(bad, total, alpha)) == pytest.approx(interval.low, abs=1e-9)
    assert float(stats.upper_bound(bad, total, alpha)) == pytest.approx(interval.high, abs=1e-9)


def test_nothing_seen_bounds_nothing():
    assert (float(stats.lower_bound(0, 0, 0.05)), float(stats.upper_bound(0, 0, 0.05))) == (0.0, 1.0)
    assert float(stats.upper_bound(5, 5, 0.05)) == 1.0


@bounded
@given(st.integers(0, 40), st.integers(0, 4000), LIMITS)
def test_evidence_is_the_mixture_of_likelihood_ratios(bad, good, limit):
    """By its definition, integrated over log-odds with most points near the limit."""
    for function, b, side in (
        (stats.log_e_over, max(1.0, 1 / (10 * limit) - 1), 1),
        (stats.log_e_under, max(1.0, 2 / limit), -1),
    ):
        log_odds = math.log(limit / (1 - limit)) + side * 45 * np.linspace(0, 1, 40_001) ** 3
        share, rest = 1 / (1 + np.exp(-log_odds)), 1 / (1 + np.exp(log_odds))
        prior = math.log(b) + (b - 1) * np.log(rest) + np.log(share * rest)  # with the Jacobian of the log-odds
        ratio = bad * np.log(share / limit) + good * np.log(rest / (1 - limit))
        top = float((ratio + prior).max())
        whole = abs(integrate.simpson(np.exp(ratio + prior - top), x=log_odds))
        mass = beta(1, b).sf(limit) if side > 0 else beta(1, b).cdf(limit)
        assert float(function(bad, bad + good, limit)) == pytest.approx(
            top + math.log(whole / mass),
            abs=1e-4,  # of log e: a hundredth of a percent of the evidence
        )


@pytest.mark.parametrize("limit", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("total", [1, 50, 2000])
def test_mean_evidence_is_one_at_the_limit_and_less_within_the_hypothesis(limit, total):
    """Summed over all outcomes: what makes it an e-value, and any number of looks harmless."""
    bad = np.arange(total + 1)

    def mean(function, share):
        return float(np.exp(binom.logpmf(bad, total, share) + function(bad, total, limit)).sum())

    for function, within in ((stats.log_e_over, limit / 2), (stats.log_e_under, (1 + limit) / 2)):
        assert mean(function, limit) == pytest.approx(1.0, abs=1e-8)
        assert mean(function, within) < 1.0


def test_looking_after_every_request_seldom_fails_a_release_at_the_limit():
    """Exact probability that one within 3,000 requests ever crosses, by following all numbers of errors at once."""
    limit, alpha, most = 0.001, 0.05, 60
    alive, crossed = np.zeros(most), 0.0
    alive[0] = 1.0
    for total in range(1, 3001):
        alive = alive * (1 - limit) + np.concatenate([[0.0], alive[:-1]]) * limit
        bad = np.arange(most)
        over = (bad <= total) & (stats.log_e_over(np.minimum(bad, total), total, limit) >= -math.log(alpha))
        crossed += float(alive[over].sum())
        alive[over] = 0.0
    assert 0.005 < crossed <= alpha


@pytest.mark.parametrize(("limit", "known"), [(0.001, 3940), (0.01, 392)])
def test_a_flawless_release_passes_the_sequential_test_where_the_closed_form_says(limit, known):
    b = 2 / limit

    def closed(total):
        log = math.log(b / (b + total)) + math.log1p(-((1 - limit) ** (b + total))) - total * math.log1p(-limit)
        return log - math.log1p(-((1 - limit) ** b))

    assert stats.needed_sequential(limit, 0.05) == known
    assert closed(known) >= math.log(20) > closed(known - 1)
    assert float(stats.log_e_under(0, known, limit)) == pytest.approx(closed(known), abs=1e-9)


def test_a_release_far_better_than_the_limit_is_never_evidence_against_it():
    totals = np.array([1e3, 1e5, 1e6, 1e7, 1e8])
    assert (stats.log_e_over(np.zeros(5), totals, 0.001) <= 0).all()
    assert (stats.log_e_under(totals * 0.5, totals, 0.001) <= 0).all()


def test_where_the_tail_is_too_small_for_a_double_the_estimate_continues_the_exact_value():
    """No bad one: the integral has a closed form, b / (b + n) (1 - limit)^b over the prior's mass."""
    b, limit = 99.0, 0.001
    for total in (1e5, 6.9e5, 7.2e5, 5e6):
        exact = math.log(b / (b + total))  # the truncated prior's mass is (1 - limit)^b, which cancels
        assert float(stats.log_e_over(0, total, limit)) == pytest.approx(exact, abs=5e-3)


@bounded
@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from([0.02, 0.1, 0.4]), st.sampled_from([1.0, 1.25]))
def test_mean_evidence_of_a_comparison_is_at_most_one(total, stable_total, share, ratio):
    """Exact sum over all outcomes of one window; the shares may be at the border of the hypothesis or inside it."""
    for worse in (ratio, 1.0, 0.3):
        bad, stable_bad = np.arange(total + 1)[:, None], np.arange(stable_total + 1)[None, :]
        chance = binom.pmf(bad, total, share * worse) * binom.pmf(stable_bad, stable_total, share)
        increments = stats.worse_increment(bad, total, stable_bad, stable_total, ratio)
        mean = (chance * np.exp(stats.log_e_worse(increments))).sum()
        assert mean <= 1 + 1e-9


def test_comparison_finds_what_is_worse_and_needs_both_sides():
    def after(windows):
        return float(stats.log_e_worse(sum(stats.worse_increment(*window, 1.0) for window in windows)))

    assert after([(1, 50, 0, 950)] * 3) > math.log(20)
    assert after([(1, 50, 19, 950)] * 30) < 0
    assert after([(25, 50, 0, 0)] * 30) == after([(0, 0, 25, 950)] * 30) == pytest.approx(0)
    # Trouble of the whole host in the step at 50 % only: pooled, the canary looks 1.8 times as bad as stable.
    assert after([(0, 50, 0, 950)] * 30 + [(5, 500, 5, 500)] * 30) < math.log(2)


def test_comparison_at_the_border_is_seldom_crossed():
    rng = np.random.default_rng(7)
    runs, logs, crossed = 2000, np.zeros((2000, len(stats.RATIOS))), np.zeros(2000, dtype=bool)
    for _ in range(200):
        bad, stable_bad = rng.binomial(50, 0.05, runs), rng.binomial(450, 0.05, runs)
        logs += stats.worse_increment(bad, np.full(runs, 50), stable_bad, np.full(runs, 450), 1.0)
        crossed |= stats.log_e_worse(logs) >= math.log(20)
    assert crossed.mean() <= 0.05


@bounded
@given(st.integers(0, 20), st.integers(20, 400), st.integers(0, 20), st.integers(20, 4000))
def test_fisher_is_scipys(bad, total, stable_bad, stable_total):
    table = [[bad, total - bad], [stable_bad, stable_total - stable_bad]]
    known = fisher_exact(table, alternative="greater")[1]
    assert stats.fisher_worse(bad, total, stable_bad, stable_total) == pytest.approx(known, rel=1e-6, abs=1e-12)


def test_bound_of_the_ratio():
    # None of 60 late ones is the canary's though half were expected: its part is below 1 - 0.05^(1/60).
    part = 1 - 0.05 ** (1 / 60)
    assert stats.ratio_upper(0, 60, 0.5, 0.05) == pytest.approx(part / (1 - part))
    assert stats.ratio_upper(0, 0, 0.5, 0.05) > 10
    assert stats.ratio_upper(5, 0, 0.5, 0.05) == stats.ratio_upper(5, 9, 0.0, 0.05) == math.inf
    rng = np.random.default_rng(3)  # covers the true ratio, 1.5, at least as often as it says
    bad, stable_bad = rng.binomial(300, 0.15, 1000), rng.binomial(2700, 0.10, 1000)
    bounds = [stats.ratio_upper(int(a), int(b), 0.1, 0.05) for a, b in zip(bad, stable_bad, strict=True)]
    assert np.mean([bound >= 1.5 for bound in bounds]) >= 0.93


def test_scipy_is_loaded_only_when_something_is_judged():
    code = "import sys, canary.judge; assert 'scipy' not in sys.modules; canary.judge.stats.upper_bound(0, 9, 0.05)"
    code += "; assert 'scipy.special' in sys.modules and 'scipy.stats' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

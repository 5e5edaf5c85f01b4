from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from scipy.stats import binomtest

from canary.evidence import Evidence
from canary.judge import fail_alpha, judge
from canary.types import Limit, Outcome, Policy, Verdict, Window
from tests.canary.canary_windows import gathered, side, window

PASS, FAIL, INCONCLUSIVE = Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE
POLICY = Policy()
GOOD = window()


def verdict(*windows: Window, policy: Policy = POLICY, times: int = 30, start: Evidence | None = None) -> Verdict:
    return judge(windows[-1], gathered(policy, *windows, times=times, start=start), policy)


def finding(result: Verdict, metric: str):
    return next(each for each in result.findings if each.metric == metric)


def test_a_good_release_passes_when_its_step_is_complete_and_not_before():
    early = verdict(GOOD, times=20)
    assert early.outcome is INCONCLUSIVE
    assert early.reason.startswith("200 s counted of a step of 300 s, 280 s are needed")
    done = verdict(GOOD)
    assert (done.outcome, {each.outcome for each in done.findings}) == (PASS, {PASS})


def test_too_few_requests_are_inconclusive_and_it_says_how_many_are_missing():
    result = verdict(window(side(50), side(950)))
    assert result.outcome is INCONCLUSIVE
    assert (
        finding(result, "errors").text == "errors: 0 of 1,500 (0 %), limit 0.1 %: 1,718 more needed without a bad one"
    )
    assert finding(result, "itl:0.08").outcome is PASS


@pytest.mark.parametrize(("bad", "outcome"), [(0, PASS), (1, PASS), (2, INCONCLUSIVE)])
def test_the_fixed_look_passes_by_the_published_figures(bad, outcome):
    """At 96 % (0.8 of alpha) 5,011 requests show less than 0.1 % with one error (scipy's binomtest agrees)."""
    assert binomtest(1, 5011).proportion_ci(0.92).high <= 0.001 < binomtest(1, 5010).proportion_ci(0.92).high
    assert binomtest(2, 6000).proportion_ci(0.92).high > 0.001
    windows = [window(side(200, bad)), *[window(side(200))] * 29]
    assert finding(verdict(*windows, times=1), "errors").outcome is outcome


def test_a_look_that_passed_does_not_hide_errors_that_came_after_it():
    evidence = gathered(POLICY, window(side(110)), times=30)
    assert finding(judge(GOOD, evidence, POLICY), "errors").outcome is PASS
    for _ in range(8):
        evidence = evidence.add(window(side(500, 1), side(2000, 2)), POLICY)
    assert finding(judge(GOOD, evidence, POLICY), "errors").text.startswith("errors: 8 of 7,300 (0.11 %)")
    assert finding(judge(GOOD, evidence, POLICY), "errors").outcome is INCONCLUSIVE


def test_an_extended_step_passes_by_the_sequential_test():
    start = gathered(POLICY, window(side(100, 1)), *[window(side(100))] * 34, times=1)  # 3,500 requests, one error
    assert finding(judge(GOOD, start, POLICY), "errors").outcome is INCONCLUSIVE
    for _ in range(24):
        start = start.add(window(side(100)), POLICY)
        assert finding(judge(GOOD, start, POLICY), "errors").outcome is INCONCLUSIVE
    for _ in range(26):
        start = start.add(window(side(100)), POLICY)
    assert start.total.requests == 8500  # needed_sequential(0.001, 0.2 alpha, 1) is 8,459
    assert finding(judge(GOOD, start, POLICY), "errors").outcome is PASS


def test_clients_that_never_stream_are_told_what_to_leave_out():
    silent = window(side(observations={}, slow={}), side(observations={}, slow={}))
    reason = verdict(silent).reason
    assert "needs streaming requests of two tokens or more; `--no-itl` leaves it out" in reason
    assert "first token: nothing was measured in" in reason and "`--no-ttft` leaves it out" in reason
    assert verdict(silent, policy=Policy(limits=[], ttft_not_worse=False)).outcome is PASS
    early = judge(silent, gathered(POLICY, silent, times=1), POLICY)  # in the warm-up nobody is measured
    assert finding(early, "itl:0.08").text == "itl >= 80 ms: nothing was measured"


def test_nothing_at_all_never_passes():
    nothing = window(side(0, connections=0, observations={}, slow={}), side(0, observations={}, slow={}))
    result = verdict(nothing, times=100)
    assert result.outcome is INCONCLUSIVE
    for metric in ("requests", "connections", "errors", "itl:0.08", "ttft_not_worse"):
        assert finding(result, metric).outcome is INCONCLUSIVE, metric


def test_good_steps_before_do_not_pass_a_step_without_traffic():
    start = gathered(POLICY, GOOD, times=100)
    result = verdict(window(side(1), side(4)), start=start)
    assert result.outcome is INCONCLUSIVE
    assert result.reason == "30 requests of 300 in this step"


def test_a_few_connections_are_not_enough():
    few = window(side(connections=0), kernel_connections=0)
    start = gathered(POLICY, GOOD, GOOD)
    assert finding(verdict(few, start=start), "connections").text == "0 connections of 20 in this step"


@pytest.mark.parametrize(
    "unknown",
    [
        {"invalid": "the canary: its gateway started anew"},
        {"kernel_connections": None},
    ],
)
def test_what_is_unknown_in_the_newest_window_does_not_pass(unknown):
    evidence = gathered(POLICY, GOOD, times=31)
    newest = replace(GOOD, **unknown)
    assert judge(newest, evidence.add(newest, POLICY), POLICY).outcome is INCONCLUSIVE
    assert judge(GOOD, evidence.add(newest, POLICY).add(GOOD, POLICY), POLICY).outcome is PASS


def test_golden_answers_that_were_never_compared_do_not_pass_and_a_wrong_one_fails_at_once():
    assert finding(verdict(replace(GOOD, golden_ok=None)), "golden").outcome is INCONCLUSIVE
    wrong = verdict(replace(GOOD, golden_ok=False), times=1)
    assert (wrong.outcome, wrong.reason) == (FAIL, "a golden answer of the canary is wrong")
    assert verdict(window(side(errors={"golden": 1})), times=1).outcome is FAIL
    both = window(side(errors={"golden": 1}), side(errors={"golden": 1}))
    assert finding(verdict(both), "golden").outcome is INCONCLUSIVE
    assert verdict(replace(GOOD, golden_ok=False, invalid="stale"), times=1).outcome is FAIL


def test_a_dead_canary_fails_even_where_nothing_else_is_known():
    dead = window(side(0, alive=False), invalid="stale")
    result = verdict(dead, times=1)
    assert (result.outcome, result.reason) == (FAIL, "the canary does not answer")


@pytest.mark.parametrize(("requests", "bad", "outcome"), [(50, 2, FAIL), (400, 3, INCONCLUSIVE), (240, 3, FAIL)])
def test_errors_fail_a_release_long_before_its_step_is_over(requests, bad, outcome):
    windows = [window(side(requests, bad), side(19 * requests))]
    result = verdict(*windows, times=1)
    assert finding(result, "errors").outcome is outcome
    assert result.outcome is outcome


def test_the_numbers_behind_a_verdict_are_in_it():
    numbers = finding(verdict(window(side(300, 4), side(5700, 1)), times=1), "errors").numbers
    assert (numbers["bad"], numbers["total"], numbers["stable_bad"], numbers["stable_total"]) == (4, 300, 1, 5700)
    assert numbers["log_e"] >= numbers["log_e_fail"] == -math.log(fail_alpha(POLICY, "errors"))
    assert numbers["lower"] == pytest.approx(0.00364, abs=1e-5)  # scipy: binomtest(4, 300).proportion_ci(), 95 %
    assert numbers["upper"] == pytest.approx(0.03379, abs=1e-5)
    assert numbers["fisher_p"] == pytest.approx(2.9e-5, rel=0.1)  # C(5,4) 0.05^4 0.95 + 0.05^5


def test_alpha_is_shared_out_and_never_exceeded():
    for policy in (POLICY, Policy(limits=[]), Policy(ttft_not_worse=False, alpha=0.2)):
        checks = ["errors", *[limit.metric for limit in policy.limits], "rejected"]
        checks += ["ttft_not_worse"] * policy.ttft_not_worse
        assert sum(fail_alpha(policy, name) for name in checks) <= policy.alpha + 1e-12


def test_trouble_of_the_host_blames_nobody_and_passes_nobody():
    both = window(side(50, 1), side(950, 19))
    result = verdict(both, times=60)
    assert finding(result, "errors").outcome is INCONCLUSIVE
    assert "stable is not shown to do better (2 %)" in finding(result, "errors").text
    assert result.outcome is INCONCLUSIVE


def test_where_stable_hardly_serves_anybody_the_absolute_limit_decides():
    both = window(side(950, 19), side(50, 1))
    assert finding(verdict(both, times=2), "errors").outcome is FAIL
    assert finding(verdict(replace(both, stable=None), times=2), "errors").outcome is FAIL


def test_at_100_percent_only_absolute_limits_apply():
    alone = replace(GOOD, stable=None)
    result = verdict(alone)
    assert result.outcome is PASS
    assert {each.metric for each in result.findings}.isdisjoint({"ttft_not_worse", "rejected"})


def test_a_release_that_is_bad_only_under_more_load_is_not_covered_by_its_good_past():
    start = gathered(POLICY, window(side(200)), times=100)  # 20,000 without an error
    bad, needed = window(side(100, 2), side(400)), 0
    evidence = start.begin_step(10)
    while judge(bad, evidence, POLICY).outcome is not FAIL:
        evidence, needed = evidence.add(bad, POLICY), needed + 100
        assert needed <= 700
    assert evidence.step.canary.requests >= 100


@pytest.mark.parametrize(("slow", "outcome"), [(0.002, PASS), (0.01, INCONCLUSIVE), (0.03, FAIL)])
def test_limits_of_latency(slow, outcome):
    result = verdict(window(side(100, itl_slow=slow), side(400, itl_slow=0.002)))
    assert finding(result, "itl:0.08").outcome is outcome
    assert ("worth 2,700" in finding(result, "itl:0.08").text) is True


def test_one_stall_of_many_streams_at_once_does_not_fail_a_release():
    stall = window(side(100, itl_slow=0.03))  # 150 slow ones of 5,000 tokens
    result = judge(stall, gathered(replace(POLICY, warmup_seconds=0), stall, times=1), POLICY)
    assert finding(result, "itl:0.08").outcome is INCONCLUSIVE


def test_a_limit_without_its_edge_in_the_histogram_is_inconclusive_and_named():
    policy = replace(POLICY, limits=[Limit(metric="itl", seconds=0.033), Limit(metric="request", seconds=1)])
    result = verdict(GOOD, policy=policy)
    assert finding(result, "itl:0.033").text == "itl >= 33 ms: no histogram has this edge"
    assert finding(result, "request:1").text == "request >= 1000 ms: nothing was measured"
    assert result.outcome is INCONCLUSIVE


@pytest.mark.parametrize(("late", "outcome"), [(1.0, PASS), (2.0, INCONCLUSIVE), (3.0, FAIL)])
def test_first_tokens_are_compared_with_stable(late, outcome):
    result = verdict(window(side(10, late=late), side(90)), times=13 if late == 2 else 30)
    assert finding(result, "ttft_not_worse").outcome is outcome
    assert "take 100 ms" in finding(result, "ttft_not_worse").text


def test_late_first_tokens_on_both_sides_are_the_hosts():
    assert finding(verdict(window(side(50, late=3), side(450, late=3))), "ttft_not_worse").outcome is PASS


def test_first_tokens_without_stable_ones_or_histograms_cannot_be_compared():
    result = verdict(window(stable=side(0)))
    assert finding(result, "ttft_not_worse").text == "first token: nothing of stable to compare with"
    slow = {"itl:0.08": 0}
    result = verdict(window(side(slow=slow), side(slow=slow)))
    assert finding(result, "ttft_not_worse").text == "first token: no histogram of both sides to compare"


def test_first_tokens_far_below_all_edges_are_fast_enough():
    slow = {"itl:0.08": 0, "ttft:5": 0, "ttft:0.5": 0, "ttft:10": 0}
    assert finding(verdict(window(side(slow=slow), side(slow=slow))), "ttft_not_worse").outcome is PASS


def test_refused_requests_are_compared_but_are_no_errors():
    same = verdict(window(side(rejected=100), side(4000, rejected=400)))
    assert (finding(same, "rejected").outcome, finding(same, "errors").outcome) == (PASS, PASS)
    more = verdict(window(side(110, rejected=20), side(440, rejected=4)))
    assert (finding(more, "rejected").outcome, finding(more, "errors").outcome) == (FAIL, PASS)


def test_judging_changes_nothing_and_says_the_same_again():
    evidence = gathered(POLICY, window(side(100, 1)))
    assert judge(GOOD, evidence, POLICY) == judge(GOOD, evidence, POLICY)

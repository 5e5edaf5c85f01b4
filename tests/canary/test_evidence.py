from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from canary import stats
from canary.evidence import LOST, Evidence, Kernel
from canary.types import Limit, Policy
from tests.canary.canary_windows import gathered, side, window

POLICY = Policy()


def test_warm_up_is_left_out_of_latencies_but_not_of_errors():
    evidence = gathered(POLICY, window(side(100, 1, itl_slow=0.5)), times=3)  # 30 s
    assert evidence.total.share_counts(POLICY.limits[0]) == (0.0, 0.0)
    assert evidence.total.share_counts(None) == (3, 300)
    assert "limit itl:0.08" not in evidence.worse and "errors" in evidence.worse
    evidence = evidence.add(window(side(100, itl_slow=0.02)), POLICY)
    assert evidence.total.share_counts(POLICY.limits[0]) == (pytest.approx(2.0), pytest.approx(100))
    assert "limit itl:0.08" in evidence.worse


def test_tokens_of_a_request_count_as_one_observation():
    policy = replace(POLICY, warmup_seconds=0, limits=[Limit(metric="ttft", seconds=0.1), POLICY.limits[0]])
    total = gathered(policy, window(side(10, itl_slow=0.1)), times=1).total
    assert total.share_counts(policy.limits[0]) == (1, 10)
    assert total.share_counts(policy.limits[1]) == (pytest.approx(1.0), pytest.approx(10.0))  # of 500 tokens


def test_an_invalid_window_adds_nothing_but_is_counted():
    before = gathered(POLICY, window(), times=5)
    after = before.add(window(side(50, 50), invalid="stale"), POLICY)
    assert (after.total, after.step.seconds, after.worse) == (before.total, before.step.seconds, before.worse)
    assert (after.invalid_windows, after.kernel.known, after.restarts) == (1, False, 0)


def test_when_the_gateway_started_anew_time_and_warm_up_begin_again_and_what_was_seen_stays():
    before = gathered(POLICY, window(), times=5)
    after = before.add(window(side(0, epoch="b"), invalid="started anew"), POLICY)
    assert (after.step.seconds, after.step.golden, after.warm, after.restarts) == (0, 0, 0, 1)
    assert after.total == before.total
    assert after.add(window(side(0, epoch="unknown"), invalid="no answer"), POLICY).restarts == 1
    again = after.add(window(side(epoch="b")), POLICY)
    assert (again.restarts, again.total.timed) == (1, before.total.timed)


def test_connections_that_nobody_accepted_are_failed_requests():
    good, lost = window(side(50)), window(side(50, connections=6), kernel_connections=10)
    evidence = gathered(POLICY, good, times=2)
    evidence = evidence.add(lost, POLICY)
    assert evidence.total.bad == 0  # they may still wait in the backlog
    evidence = evidence.add(window(side(50, connections=0)), POLICY)
    assert (evidence.total.errors[LOST], evidence.total.bad, evidence.total.requests) == (4, 4, 204)
    assert evidence.add(good, POLICY).add(good, POLICY).total.bad == 4
    late = gathered(POLICY, good, times=2).add(lost, POLICY).add(window(side(50, connections=14)), POLICY)
    assert late.total.bad == 0  # accepted in the next window


def test_a_gap_in_the_kernels_count_makes_no_lost_connections():
    evidence = gathered(POLICY, window(side(50), kernel_connections=10), times=3)
    evidence = evidence.add(window(side(50, connections=0), kernel_connections=None), POLICY)
    assert not evidence.kernel.known
    for _ in range(3):
        evidence = evidence.add(window(side(50), kernel_connections=10), POLICY)
    assert evidence.kernel.known and evidence.total.bad == 0


def test_connections_have_two_seconds_to_be_accepted_whatever_the_interval():
    kernel = Kernel().with_window(0.5, 5, 0)
    for _ in range(3):
        kernel = kernel.with_window(0.5, 0, 0)
        assert kernel.lost == 0
    assert kernel.with_window(0.5, 0, 0).lost == 5


def test_the_fixed_look_is_taken_once_when_time_and_numbers_allow_and_again_in_each_step():
    evidence = gathered(POLICY, window(side(50)), times=40)  # 2,000 requests in 400 s: no 3,218 yet (0.8 alpha)
    assert set(evidence.step.looks) == {"itl:0.08"}
    itl = evidence.step.looks["itl:0.08"]
    while "errors" not in evidence.step.looks:
        evidence = evidence.add(window(side(50)), POLICY)
    assert evidence.step.looks["errors"].total == 3250
    assert evidence.step.looks["itl:0.08"] == itl
    evidence = evidence.add(window(side(50, 5)), POLICY)
    assert evidence.step.looks["errors"].bad == 0
    following = gathered(POLICY, window(side(100)), times=30, start=evidence)
    assert following.step.looks["errors"] == msgspec.structs.replace(evidence.step.looks["errors"], bad=5, total=6100)


def test_comparisons_grow_window_by_window_as_the_statistics_say():
    windows = [window(side(50, 1), side(950, 2)), window(side(60, 0), side(900, 1)), window(side(500, 3), side(500, 3))]
    evidence = gathered(POLICY, *windows, times=1)
    known = sum(
        stats.worse_increment(*numbers, 1.0) for numbers in ((1, 50, 2, 950), (0, 60, 1, 900), (3, 500, 3, 500))
    )
    assert np.allclose(evidence.worse["errors"], known)
    assert gathered(POLICY, replace(windows[0], stable=None), times=3).worse == {}


def test_evidence_goes_through_json_unchanged_at_every_window():
    evidence = Evidence().begin_step(5)
    for index in range(40):
        evidence = evidence.add(window(side(50 + index, index % 2), invalid="x" if index == 7 else None), POLICY)
        assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(evidence)), Evidence) == evidence


def test_a_window_needs_a_step():
    with pytest.raises(ValueError, match="begin_step"):
        Evidence().add(window(), POLICY)

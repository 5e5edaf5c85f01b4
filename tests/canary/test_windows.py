from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from canary.types import Policy, SideCounts
from canary.windows import Liveness, Reading, baseline, difference, look_due


def side(at=100.0, requests=1000, **more):
    values = {"epoch": "a", "at": at, "requests": requests, "connections": 50, "errors": {"http_5xx": 2}}
    values |= {"observations": {"itl": 9000}, "slow": {"itl:0.08": 30}}
    return SideCounts(**(values | more))


def reading(at=100.0, **more):
    return Reading(**({"at": at, "canary": side(at), "stable": side(at), "kernel_connections": 50} | more))


def later(**changes):
    """A reading 10 s after `reading()`, of a canary that had 100 more requests."""
    counts = {"at": 110.0, "requests": 1100, "connections": 58, "errors": {"http_5xx": 3, "stream_cut": 1}}
    counts |= {"observations": {"itl": 9900}, "slow": {"itl:0.08": 31}}
    return reading(110.0, canary=side(**(counts | changes)), kernel_connections=58)


def test_a_window_is_the_difference_of_both_sides():
    window = difference(reading(), replace(later(), golden_ok=True), 5)
    assert window.invalid is None
    assert (window.seconds, window.kernel_connections, window.golden_ok) == (10.0, 8, True)
    assert (window.canary.requests, window.canary.connections) == (100, 8)
    assert window.canary.errors == {"http_5xx": 1, "stream_cut": 1}
    assert (window.canary.observations, window.canary.slow) == ({"itl": 900}, {"itl:0.08": 1})
    assert window.stable is not None and window.stable.requests == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"epoch": "b"}, "started anew"),
        ({"requests": 999}, "requests went down from 1000 to 999"),
        ({"errors": {"http_5xx": 1}}, r"errors\[http_5xx\] went down"),
        ({"errors": {}}, r"errors\[http_5xx\] is no longer reported"),
        ({"requests": math.nan}, "nan, no count"),
        ({"slow": {"itl:0.08": math.nan}}, "nan, no count"),
        ({"connections": 58.5}, "58.5, no count"),
        ({"rejected": -1}, "-1, no count"),
        ({"at": 100.0}, "no new reading|last read 10.0 s"),
        ({"at": 104.0}, "last read 6.0 s ago"),
        ({"at": math.nan}, "last read"),
        ({"at": math.inf}, "last read"),
        ({"errors": {"http_5xx": 150}}, "148 errors among 100 requests"),
        ({"slow": {"itl:0.08": 1000}}, "970 slow ones"),
    ],
)
def test_numbers_that_mean_nothing_are_not_judged(changes, why):
    for broken in (later(**changes), replace(later(), canary=later().canary, stable=later(**changes).canary)):
        window = difference(reading(), broken, 5)
        assert window.invalid is not None
        assert re.search(why, window.invalid), window.invalid
        assert (window.canary.requests, window.canary.errors, window.stable) == (0, {}, None)


def test_the_same_reading_twice_is_no_window():
    again = replace(later(), canary=side(100.0), at=101.0)
    assert "no new reading" in str(difference(reading(), again, 5).invalid)


def test_wrong_golden_answers_are_no_requests():
    assert difference(reading(), later(requests=1000, errors={"http_5xx": 2, "golden": 9}), 5).invalid is None


def test_sides_read_over_different_times_are_not_compared():
    assert "different times" in str(difference(reading(), replace(later(), stable=side(105.0)), 20).invalid)


def test_at_100_percent_there_is_no_stable_side_and_one_that_is_new_has_no_window_yet():
    alone = replace(later(), stable=None)
    window = difference(reading(), alone, 5)
    assert (window.invalid, window.stable, window.canary.requests) == (None, None, 100)
    assert "first reading" in str(difference(replace(reading(), stable=None), later(), 5).invalid)


@pytest.mark.parametrize(("before", "after"), [(None, 8), (50, None), (50, 3)])
def test_a_count_of_the_kernel_that_is_missing_or_began_anew_is_unknown(before, after):
    start = replace(reading(), kernel_connections=before)
    assert difference(start, replace(later(), kernel_connections=after), 5).kernel_connections is None


def test_after_a_late_reading_the_next_window_covers_what_it_hid():
    start, late, fresh = reading(), replace(later(at=104.0), at=110.0), reading(120.0, canary=side(120.0, 1300))
    hidden = difference(start, late, 5)
    assert hidden.invalid and baseline(start, late, hidden) is start
    assert difference(baseline(start, late, hidden), fresh, 5).canary.requests == 300
    good = later()
    assert baseline(start, good, difference(start, good, 5)) is good


@pytest.mark.parametrize("changes", [{"epoch": "b"}, {"requests": 5}, {"errors": {}}])
def test_counters_that_began_anew_are_a_new_beginning(changes):
    start, anew = reading(), later(**changes)
    assert baseline(start, anew, difference(start, anew, 5)) is anew
    assert (
        baseline(replace(start, stable=None), later(), difference(replace(start, stable=None), later(), 5)) == later()
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=20))
def test_windows_add_up_to_the_counters(steps):
    before = reading(0.0, canary=side(0.0, 0, errors={}), stable=None)
    requests, bad, seen = 0, 0, []
    for index, (more, failed) in enumerate(steps, 1):
        requests, bad = requests + more + failed, bad + failed
        now = reading(index * 10.0, canary=side(index * 10.0, requests, errors={"http_5xx": bad}), stable=None)
        seen.append(difference(before, now, 5))
        before = now
    assert all(window.invalid is None for window in seen)
    assert sum(window.canary.requests for window in seen) == requests
    assert sum(window.canary.errors["http_5xx"] for window in seen) == bad


def test_liveness_trips_after_its_time_without_one_answer_and_never_by_ignorance():
    policy = Policy(liveness_seconds=2.0)
    state = Liveness()
    for at, alive in ((0.0, True), (1.0, False), (2.0, None), (2.9, False)):
        state = state.see(alive, at)
        assert not state.tripped(at, policy)
    assert state.tripped(3.0, policy)
    assert not state.see(True, 3.0).tripped(9.0, policy)
    assert not Liveness().see(None, 0.0).tripped(99.0, policy)


def test_the_judge_looks_sooner_with_many_requests() -> None:
    assert not look_due(9.9, 19, 0, 10.0)
    assert look_due(10.0, 0, 0, 10.0)
    assert look_due(0.5, 20, 0, 10.0)
    assert not look_due(0.5, 499, 10_000, 10.0)  # a twentieth of what this step has had
    assert look_due(0.5, 500, 10_000, 10.0)

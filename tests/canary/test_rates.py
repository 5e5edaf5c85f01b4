"""Error rates of the judge, by simulation: what issue 6 demands of it. The simulation itself plays some of its runs to
the real judge, and must end them in the same way."""

from __future__ import annotations

import os

import pytest
from scipy.stats import binom

from tests.bench.canary_rates import DEADLINE, FAILED, PROMOTED, Cell, cells, play, simulate

FULL = bool(os.environ.get("APPLIANCE_FULL"))
RUNS = 2000 if FULL else 300
CELLS = [pytest.param(cell, id=f"{table}: {cell.name}") for table, group in cells().items() for cell in group]


def most(share: float) -> int:
    """So many of RUNS may do what happens with this chance, without anything being wrong (1 in 10,000)."""
    return int(binom.ppf(0.9999, RUNS, share))


def ended(cell: Cell, outcome: int) -> int:
    return int((simulate(cell, RUNS, seed=11).outcome == outcome).sum())


def test_a_release_with_one_percent_errors_is_rolled_back_within_300_requests():
    for rps in (10.0, 100.0, 1000.0):
        result = simulate(Cell("1 %", (0.01,), stable=0.0005, rps=rps), RUNS, seed=3)
        assert result.share(FAILED) >= 0.98
        assert result.median is not None and result.median <= (300 if FULL else 320)


@pytest.mark.parametrize("rps", [10.0, 100.0, 1000.0])
def test_a_release_at_the_limit_is_seldom_failed_and_seldom_promoted(rps):
    result = simulate(Cell("limit", (0.001,), stable=0.0005, rps=rps), RUNS, seed=5)
    assert (result.outcome == FAILED).sum() <= most(0.05)
    assert (result.outcome == PROMOTED).sum() <= most(0.05)


def test_latency_at_the_limit_likewise():
    result = simulate(Cell("limit", (0.01,), stable=0.005, latency=True), RUNS, seed=6)
    assert (result.outcome == FAILED).sum() <= most(0.05)
    assert (result.outcome == PROMOTED).sum() <= most(0.05)


@pytest.mark.parametrize("rps", [100.0, 1000.0])
def test_one_step_that_is_extended_without_end_seldom_passes_a_release_at_the_limit(rps):
    assert ended(Cell("limit", (0.001,), stable=0.0005, steps=(5,), rps=rps), PROMOTED) <= most(0.05)


def test_good_releases_are_promoted_and_bad_ones_rolled_back():
    assert ended(Cell("0 %", (0.0,)), PROMOTED) == RUNS
    assert ended(Cell("5 %", (0.05,), stable=0.0005), FAILED) == RUNS
    assert ended(Cell("slow", (0.05,), stable=0.005, latency=True), FAILED) == RUNS
    assert ended(Cell("fast", (0.0025,), stable=0.0025, latency=True), PROMOTED) >= RUNS - most(0.01)


def test_trouble_of_the_whole_host_seldom_blames_the_release():
    for steps in ((5, 10, 25, 50, 100), (50, 100)):
        cell = Cell("host", (0.01,), stable=0.01, steps=steps)
        result = simulate(cell, RUNS, seed=9)
        assert (result.outcome == FAILED).sum() <= most(0.10)
        assert (result.outcome == FAILED).sum() + (result.outcome == DEADLINE).sum() == RUNS


@pytest.mark.parametrize("cell", CELLS if FULL else CELLS[::4])
def test_the_real_judge_ends_the_simulated_runs_in_the_same_way(cell):
    result = simulate(cell, 5, seed=2)
    for run in range(5 if FULL else 2):
        assert play(result, run) == (result.outcome[run], result.requests[run])

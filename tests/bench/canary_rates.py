"""How often a canary's judge is wrong: simulated runs, beside the naive rule. python -m tests.bench.canary_rates --full

Whole runs (5, 10, 25, 50, 100 %, 300 s a step, windows as canary/windows.py:look_due has them: every 10 s, sooner with
enough requests, an hour at most for each step, which is extended window by window while it is inconclusive) of releases
whose true rates are known. All runs of a cell go forward together as numpy arrays, with the functions of
canary/stats.py; the first ones of each cell are also played to the real judge window by window, which must end them in
the same way after the same number of requests. Prints markdown; --json for the numbers.

The naive rule: at the end of each step, go on if the share of that step is below the limit, else roll back.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from canary import stats
from canary.evidence import LOOK_PART, Evidence, step_time
from canary.judge import BASELINE_PART, BLAME_ALPHA, RUN_PART, fail_alpha, judge
from canary.types import Limit, Outcome, Policy, SideCounts, Window
from canary.windows import LOOK_REQUESTS, LOOK_SHARE

Array = NDArray[np.float64]
RUNNING, PROMOTED, FAILED, DEADLINE = range(4)
RUNS_FULL, RUNS_QUICK, REPLAYED = 2000, 200, 5
SAMPLE = 0.5  # seconds between two readings of the gateways: canary/controller.py:Times.sample
LATENCY = Limit(metric="request", seconds=0.080, share=0.01)
INTER_TOKEN = Limit(metric="itl", seconds=0.080, share=0.01)


@dataclass(frozen=True)
class Cell:
    """One release under one load. Rates are shares of bad observations, of the canary by step (the last goes on)."""

    name: str
    canary: tuple[float, ...]
    stable: float = 0.0
    rps: float = 100.0  # both sides together
    latency: bool = False  # errors otherwise
    tokens: int = 1  # observations of one request
    burst: float = (
        1.0  # size of a burst: bad requests come so many at a time; of tokens: the part that is slow together
    )
    steps: tuple[float, ...] = (5, 10, 25, 50, 100)

    @property
    def policy(self) -> Policy:
        """The default one. What is not under test must not decide: in cells of latency errors may be anything."""
        if not self.latency:
            return Policy(steps=list(self.steps))
        limit = INTER_TOKEN if self.tokens > 1 else LATENCY
        return Policy(steps=list(self.steps), limits=[limit], error_rate=0.5)


@dataclass
class Result:
    cell: Cell
    outcome: NDArray[np.int64]
    requests: Array  # of the canary until the end
    naive: tuple[float, float]  # shares of the runs that the naive rule promotes, and whose first step it passes
    first_pass: float  # share of the runs whose first step passed
    windows: list[list[Array]] = field(repr=False, default_factory=list)  # of the replayed runs

    def share(self, outcome: int) -> float:
        return float((self.outcome == outcome).mean())

    @property
    def median(self) -> float | None:
        """Requests until the rollback, of the runs that evidence ended."""
        failed = self.requests[self.outcome == FAILED]
        return float(np.median(failed)) if len(failed) else None


def draw(cell: Cell, rate: Array, requests: Array, rng: np.random.Generator) -> Array:
    """Bad observations among those of so many requests."""
    if cell.tokens > 1:
        slow = rng.binomial(requests.astype(int), np.minimum(1, rate / cell.burst))
        return rng.binomial(slow * cell.tokens, cell.burst).astype(float)
    if cell.burst > 1:
        return np.minimum(requests, cell.burst * rng.poisson(requests * rate / cell.burst))
    return rng.binomial(requests.astype(int), rate).astype(float)


def length(rate: Array, inside: Array, interval: float) -> Array:
    """Seconds of the next window, `inside` seconds after the step began, with so many requests/s: look_due, where the
    numbers are as expected and the gateways are read every SAMPLE seconds."""
    wanted = np.maximum(LOOK_REQUESTS, LOOK_SHARE * rate * inside) / np.maximum(rate, 1e-9)
    return np.minimum(interval, np.ceil(wanted / SAMPLE - 1e-9) * SAMPLE)


def simulate(cell: Cell, runs: int, seed: int = 1) -> Result:
    """All runs of a cell, a window at a time."""
    rng = np.random.default_rng(seed)
    policy = cell.policy
    name, limit_share = ("errors", policy.error_rate) if not cell.latency else ("limit", policy.limits[0].share)
    fail = -np.log(fail_alpha(policy, name))
    planned, weights = len(cell.steps), np.array(cell.steps) / 100
    rates = np.array([cell.canary[min(i, len(cell.canary) - 1)] for i in range(planned)])
    parts = np.array([RUN_PART, *[(1 - RUN_PART) / planned] * planned])
    at_once = LOOK_PART * policy.alpha
    enough, later = stats.needed(limit_share, at_once), -np.log(policy.alpha - at_once)

    outcome, step = np.zeros(runs, dtype=np.int64), np.zeros(runs, dtype=np.int64)
    inside, clock = np.zeros(runs), np.zeros(runs)  # seconds in this step, and of the run
    bad, seen = np.zeros((runs, planned)), np.zeros((runs, planned))  # judged observations, in effective numbers
    theirs, requests = np.zeros((runs, planned)), np.zeros((runs, planned))
    logs, worse = np.zeros((runs, planned + 1)), np.zeros((runs, len(stats.RATIOS)))
    look_ok, looked = np.zeros(runs, dtype=bool), np.zeros(runs, dtype=bool)
    over, first_pass = np.zeros(runs, dtype=bool), np.zeros(runs, dtype=bool)
    windows: list[list[Array]] = [[] for _ in range(REPLAYED)]
    while (live := np.flatnonzero(outcome == RUNNING)).size:
        at, weight = step[live], weights[step[live]]
        timed = ~((clock[live] < policy.warmup_seconds) & cell.latency)
        seconds = length(cell.rps * weight, inside[live], policy.interval)
        ours = rng.poisson(cell.rps * seconds * weight).astype(float)
        stable = rng.poisson(cell.rps * seconds * (1 - weight)).astype(float)
        k = draw(cell, rates[at], ours, rng)
        s = draw(cell, np.full(live.size, cell.stable), stable, rng)
        for place in np.flatnonzero(live < REPLAYED):
            windows[live[place]].append(np.array([ours[place], k[place], stable[place], s[place], seconds[place]]))
        requests[live, at] += ours
        bad[live, at] += timed * k / cell.tokens
        seen[live, at] += timed * ours
        theirs[live, at] += timed * stable
        compared = stats.worse_increment(k, ours * cell.tokens, s, stable * cell.tokens, 1.0) / cell.tokens
        worse[live] += np.where((timed & (weight < 1))[:, None], compared, 0)
        inside[live] += seconds
        clock[live] += seconds
        failed, passed = np.zeros(live.size, dtype=bool), np.zeros(live.size, dtype=bool)

        # Good observations alone only lower the evidence of badness, so most windows need no look at it.
        end = inside[live] >= step_time(policy)
        ask = np.flatnonzero((k > 0) | over[live] | end)
        who, place = live[ask], at[ask]
        total_bad, total = bad[who].sum(axis=1), seen[who].sum(axis=1)
        logs[who, 0] = stats.log_e_over(total_bad, total, limit_share)
        logs[who, place + 1] = stats.log_e_over(bad[who, place], seen[who, place], limit_share)
        over[who] = stats.log_mean(logs[who], parts) >= fail
        no_baseline = (weight[ask] == 1) | (theirs[who, place] < BASELINE_PART * seen[who, place])
        blamed = no_baseline | (stats.log_e_worse(worse[who]) >= -np.log(BLAME_ALPHA))
        failed[ask] = over[who] & blamed

        first = ~looked[who] & end[ask] & (total >= enough)
        looked[who] |= first
        look_ok[who[first]] = stats.upper_bound(total_bad[first], total[first], at_once) <= limit_share
        kept = look_ok[who] & (total_bad <= limit_share * total)
        kept |= stats.log_e_under(total_bad, total, limit_share) >= later
        passed[ask] = looked[who] & kept & ~over[who] & (requests[who, place] >= policy.min_requests)
        passed &= inside[live] >= policy.step_seconds

        first_pass[live[passed & (at == 0)]] = True
        outcome[live[passed & (at == planned - 1)]] = PROMOTED
        outcome[live[failed]] = FAILED
        outcome[live[~failed & ~passed & (inside[live] >= policy.progress_deadline)]] = DEADLINE
        on = live[passed & ~failed & (at < planned - 1)]
        step[on] += 1
        inside[on], looked[on], look_ok[on] = 0, False, False
    return Result(cell, outcome, requests.sum(axis=1), naive(cell, runs, rng), float(first_pass.mean()), windows)


def naive(cell: Cell, runs: int, rng: np.random.Generator) -> tuple[float, float]:
    policy = cell.policy
    limit = policy.limits[0].share if cell.latency else policy.error_rate
    going, first = np.ones(runs, dtype=bool), 0.0
    for index, weight in enumerate(cell.steps):
        requests = rng.poisson(cell.rps * policy.step_seconds * weight / 100, runs).astype(float)
        rate = np.full(runs, cell.canary[min(index, len(cell.canary) - 1)])
        bad = draw(cell, rate, requests, rng)
        going &= bad < np.maximum(1, limit * requests * cell.tokens)  # no bad one at all is below any limit
        first = first if index else float(going.mean())
    return float(going.mean()), first


def play(result: Result, run: int) -> tuple[int, int]:
    """(outcome, requests of the canary) of a run whose windows the real judge sees."""
    cell, policy = result.cell, result.cell.policy
    evidence, step, inside, requests = Evidence().begin_step(cell.steps[0]), 0, 0.0, 0
    for row in result.windows[run]:
        window = _window(cell, policy, row.tolist(), cell.steps[step] == 100)
        evidence = msgspec.json.decode(msgspec.json.encode(evidence.add(window, policy)), type=Evidence)
        verdict = judge(window, evidence, policy)
        inside, requests = inside + window.seconds, requests + window.canary.requests
        if verdict.outcome is Outcome.FAIL:
            return FAILED, requests
        if verdict.outcome is Outcome.PASS and inside >= policy.step_seconds:
            if step == len(cell.steps) - 1:
                return PROMOTED, requests
            step, inside = step + 1, 0.0
            evidence = evidence.begin_step(cell.steps[step])
        elif inside >= policy.progress_deadline:
            return DEADLINE, requests
    raise AssertionError(f"the judge has not ended run {run} of {cell.name!r}, the simulation has")


def _window(cell: Cell, policy: Policy, row: Sequence[float], alone: bool) -> Window:
    requests, bad, stable_requests, stable_bad = (int(number) for number in row[:4])
    canary, stable = _side(cell, policy, requests, bad), _side(cell, policy, stable_requests, stable_bad)
    return Window(
        seconds=row[4], canary=canary, stable=None if alone else stable, golden_ok=True,
        kernel_connections=canary.connections,
    )  # fmt: skip


def _side(cell: Cell, policy: Policy, requests: int, bad: int) -> SideCounts:
    """What is not under test is perfect, and there is enough of it."""
    tested = policy.limits[0]
    slow = {f"{tested.metric}:{tested.seconds:g}": bad if cell.latency else 0, "ttft:1": 0}
    observations = {"ttft": requests, tested.metric: requests * cell.tokens}
    return SideCounts(
        epoch="1", at=0.0, requests=requests, errors={"http_5xx": 0 if cell.latency else bad},
        connections=max(20, requests), observations=observations, slow=slow,
    )  # fmt: skip


def cells() -> dict[str, list[Cell]]:
    percents = (0, 0.05, 0.1, 0.2, 0.5, 1, 5)
    tables = {
        f"Errors, limit 0.1 %, {rps:g} requests/s": [
            Cell(f"{p:g} %", (p / 100,), rps=rps, stable=min(p, 0.05) / 100) for p in percents
        ]
        for rps in (1000.0, 100.0, 10.0)
    }
    tables["Latency, limit: 1 % may take 80 ms, 100 requests/s"] = [
        Cell(f"{p:g} %", (p / 100,), stable=min(p, 0.5) / 100, latency=True) for p in (0, 0.25, 0.5, 1, 1.5, 2, 5, 10)
    ]
    base = Cell("", (0.01,))
    latency = Cell("", (0.01,), stable=0.005, latency=True, tokens=100, burst=0.5)
    tables["Harder releases and hosts, 100 requests/s"] = [
        replace(base, name="1 % errors, only from 50 % of the traffic on", canary=(0.0, 0.0, 0.0, 0.01)),
        replace(base, name="1 % errors, first step 50 %", steps=(50, 100)),
        replace(base, name="1 % errors on both sides: the host", stable=0.01),
        replace(base, name="1 % errors on both sides, first step 50 %", stable=0.01, steps=(50, 100)),
        replace(base, name="exactly at the limit, one step of 5 %", canary=(0.001,), stable=0.0005, steps=(5,)),
        replace(base, name="exactly at the limit, errors in bursts of 5", canary=(0.001,), burst=5),
        replace(latency, name="streams of 100 tokens, 1 % slow, half a stream at a time"),
        replace(latency, name="streams of 100 tokens, 0.25 % slow, half a stream at a time", canary=(0.0025,)),
        replace(latency, name="streams of 100 tokens, 5 % slow, half a stream at a time", canary=(0.05,)),
    ]
    return tables


def markdown(title: str, results: Sequence[Result]) -> str:
    lines = [
        f"{title}, {len(results[0].outcome):,} runs a row", "",
        "| true rate | promoted | rolled back by evidence | at the deadline | median requests to rollback "
        "| first step passed | naive rule promotes | naive: first step passed |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for result in results:
        shares = [f"{result.share(outcome) * 100:.1f} %" for outcome in (PROMOTED, FAILED, DEADLINE)]
        median = "" if result.median is None else f"{result.median:,.0f}"
        rest = [f"{share * 100:.1f} %" for share in (result.first_pass, *result.naive)]
        lines.append(f"| {' | '.join([result.cell.name, *shares, median, *rest])} |")
    return "\n".join(lines) + "\n"


def _as_json(title: str, result: Result) -> dict[str, object]:
    codes = {"promoted": PROMOTED, "failed": FAILED, "deadline": DEADLINE}
    shares = {name: result.share(code) for name, code in codes.items()}
    rest = {"median": result.median, "first_pass": result.first_pass, "naive": result.naive}
    return {"table": title, "name": result.cell.name, **shares, **rest}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--full", action="store_true", default=os.environ.get("APPLIANCE_FULL") == "1", help="2,000 runs a row"
    )
    parser.add_argument("--runs", type=int, help=f"of each cell (default {RUNS_QUICK}; {RUNS_FULL} with --full)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs = args.runs or (RUNS_FULL if args.full else RUNS_QUICK)
    began, rows = time.monotonic(), []
    for title, group in cells().items():
        results = [simulate(cell, runs, args.seed + index) for index, cell in enumerate(group)]
        for result in results:
            for run in range(min(REPLAYED, runs)):
                if (got := play(result, run)) != (want := (int(result.outcome[run]), int(result.requests[run]))):
                    raise SystemExit(f"{result.cell.name}: run {run} ends as {got} at the judge, as {want} here")
        rows += [_as_json(title, result) for result in results]
        if not args.json:
            print(markdown(title, results), flush=True)
    seconds = time.monotonic() - began
    print(json.dumps({"runs": runs, "seconds": round(seconds, 1), "rows": rows}) if args.json else f"{seconds:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

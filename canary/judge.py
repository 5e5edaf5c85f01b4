"""The judge: what a run's evidence says about a release. Pure: the same counts always give the same verdict.

FAIL may come at any window: its tests are sequential, and the chance that a release within all limits is ever failed
during a run is at most `alpha` together (most of it for errors). PASS means: this step is complete, every check passed,
and each limit was *shown* to be kept with confidence 1 - alpha; too little data is INCONCLUSIVE, and so is everything
unknown (stale or restarted counters, no golden answers, a rule that cannot be read).

An absolute limit is shown to be kept by the exact fixed-size test at the end of the step, looked at once, or, where the
step had to be extended after that look, by a sequential test. They share alpha (LOOK_PART), so that even a single step
that is extended without end passes a release exactly at a limit with at most alpha; a run must pass every step.

Evidence accumulates over the steps of a run. So that old good counts cannot hide a release that is bad only now (under
more load), a tenth of the sequential test is made of tests that begin anew with each step.

Trouble of the whole host is not the release's: an absolute limit fails the canary only where it is also shown to do
worse than stable in the same windows, or where there is no stable side to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from canary import stats
from canary.evidence import LOOK_PART, LOST, Evidence, Step, Tally, absolute_metrics, limit_key, step_time
from canary.types import Finding, Limit, Outcome, Policy, Verdict, Window
from canary.windows import GOLDEN

PASS, FAIL, INCONCLUSIVE = Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE

RUN_PART: Final = 0.9  # of the sequential test of a limit: over the whole run; the rest: over each step alone
ERRORS_PART: Final = 0.65  # of alpha, for false rollbacks
BLAME_ALPHA: Final = 0.1  # chance that the canary is blamed for a trouble that both sides have
BASELINE_PART: Final = 0.25  # with fewer of stable's requests per canary's, stable says nothing about the host
WORSE: Final = 2.0  # a first token that may be twice as often late is not let through
TYPICAL: Final = 0.1  # "late" is an edge that about a tenth of all first tokens reach
_STREAMED: Final = {"itl": "streaming requests of two tokens or more", "ttft": "streaming requests"}
_LEFT_OUT: Final = {
    "itl": "`--no-itl` leaves it out", "ttft": "without `--limit ttft=...` it is left out", "request": "",
}  # fmt: skip
FAST: Final = 0.02  # where hardly any reaches even the smallest edge, so few of the canary's may


def judge(window: Window, history: Evidence, policy: Policy) -> Verdict:
    """window: the newest one, valid or not. history: all of the run's evidence, that window added."""
    findings = [_alive(window), _golden(window, history.step), _samples(window), *_enough(history, policy)]
    for name, limit, _ in absolute_metrics(policy):
        findings.append(_absolute(history, policy, name, limit))
    if history.step.stable is not None:
        if policy.ttft_not_worse:
            findings.append(_first_token(history, policy))
        findings.append(_rejected(history, policy))
    return _verdict(findings)


def fail_alpha(policy: Policy, name: str) -> float:
    """The part of alpha that one check may use up for false rollbacks."""
    if name == "errors":
        return policy.alpha * ERRORS_PART
    others = len(policy.limits) + policy.ttft_not_worse + 1  # refused requests
    return policy.alpha * (1 - ERRORS_PART) / others


def _verdict(findings: list[Finding]) -> Verdict:
    for outcome in (FAIL, INCONCLUSIVE):
        texts = [finding.text for finding in findings if finding.outcome is outcome]
        if texts:
            return Verdict(outcome=outcome, findings=findings, reason="; ".join(texts))
    return Verdict(outcome=PASS, findings=findings, reason=f"all {len(findings)} checks passed")


# -- checks that need no statistics


def _alive(window: Window) -> Finding:
    if window.canary.alive:
        return Finding(metric="liveness", outcome=PASS, text="the canary answers")
    return Finding(metric="liveness", outcome=FAIL, text="the canary does not answer")


def _golden(window: Window, step: Step) -> Finding:
    def found(outcome: Outcome, text: str) -> Finding:
        return Finding(metric="golden", outcome=outcome, text=text, numbers={"right": step.golden})

    wrong = window.golden_ok is False or window.canary.errors.get(GOLDEN, 0) > 0
    if wrong and window.stable is not None and window.stable.errors.get(GOLDEN, 0) > 0:
        return found(INCONCLUSIVE, "golden answers are wrong on both sides: the host or its GPUs, not this release")
    if wrong:
        return found(FAIL, "a golden answer of the canary is wrong")
    if step.golden:
        return found(PASS, f"golden answers right {step.golden} times")
    return found(INCONCLUSIVE, "golden answers were not compared in this step yet")


def _samples(window: Window) -> Finding:
    if window.invalid is None:
        return Finding(metric="samples", outcome=PASS, text="counters are fresh")
    return Finding(metric="samples", outcome=INCONCLUSIVE, text=f"counters cannot be judged: {window.invalid}")


def _enough(history: Evidence, policy: Policy) -> list[Finding]:
    """Of this step alone: what the steps before have shown says nothing about traffic that does not come now."""
    step, findings = history.step, []
    for metric, seen, least, unit in (
        ("time", step.seconds, step_time(policy), " s"),
        ("requests", step.canary.requests, policy.min_requests, " requests"),
        ("connections", step.canary.connections, policy.min_connections, " connections"),
    ):
        done = f"{seen:,.0f}{unit}"
        outcome, text = (
            (PASS, done) if seen >= least else (INCONCLUSIVE, f"{done} of {math.ceil(least):,} in this step")
        )
        if metric == "time":  # readings at the edges of a step are in no window of it (evidence.py:step_time)
            text = f"{done} counted of a step of {policy.step_seconds:g} s"
            text += "" if outcome is PASS else f", {math.ceil(least):,} s are needed"
        numbers = {"seen": float(seen), "needed": float(least)}
        if metric == "connections":
            numbers |= {"clients": step.canary.clients, "lost": step.canary.errors.get(LOST, 0)}
        findings.append(Finding(metric=metric, outcome=outcome, text=text, numbers=numbers))
    if not history.kernel.known:
        text = "how many connections the kernel sent to the canary is not known"
        findings.append(Finding(metric="kernel", outcome=INCONCLUSIVE, text=text))
    return findings


# -- limits


def log_evidence(history: Evidence, policy: Policy, limit: Limit | None, share: float) -> float:
    """Log e-value against "the limit is kept": over the run and over each planned step, averaged. An average of
    e-values is one, and the part of a step that has not begun stands at 1."""
    planned = len(policy.steps)
    counts = [step.canary.share_counts(limit) for step in history.steps[:planned]]
    bad, total = zip(*[history.total.share_counts(limit), *counts])
    logs = [*stats.log_e_over(bad, total, share).tolist(), 0.0]
    part = (1 - RUN_PART) / planned
    return float(stats.log_mean(logs, [RUN_PART, *[part] * len(counts), part * (planned - len(counts))]))


def _absolute(history: Evidence, policy: Policy, name: str, limit: Limit | None) -> Finding:
    share = policy.error_rate if limit is None else limit.share
    label = "errors" if limit is None else f"{limit.metric} >= {limit.seconds * 1000:g} ms"
    total = history.total
    if limit is not None and not total.observations.get(limit.metric):
        text = _unmeasured(total, limit.metric, _LEFT_OUT[limit.metric])
        return Finding(metric=name, outcome=INCONCLUSIVE, text=f"{label}: {text}")
    if limit is not None and name not in total.slow:
        return Finding(metric=name, outcome=INCONCLUSIVE, text=f"{label}: no histogram has this edge")
    bad, seen = total.share_counts(limit)
    log_e, threshold = log_evidence(history, policy, limit, share), -math.log(fail_alpha(policy, name))
    numbers = _numbers(bad, seen, policy.alpha) | {"limit": share, "log_e": log_e, "log_e_fail": threshold}
    numbers |= _stable_numbers(history, limit)
    shown = f"{label}: {_counted(total, limit)} ({_percent(numbers['share'])}), limit {_percent(share)}"

    def found(outcome: Outcome, text: str) -> Finding:
        return Finding(metric=name, outcome=outcome, text=text, numbers=numbers)

    if log_e >= threshold:
        worse = _worse_than_stable(history, "errors" if limit is None else f"limit {name}", limit)
        if worse is None:
            return found(FAIL, f"{shown}: over it")
        if worse:
            return found(FAIL, f"{shown}: over it, and worse than stable ({_percent(numbers['stable_share'])})")
        stable = _percent(numbers["stable_share"])
        return found(INCONCLUSIVE, f"{shown}: over it, but stable is not shown to do better ({stable}): the host?")
    look = history.step.looks.get(name)
    if look is None:
        missing = max(0, stats.needed(share, LOOK_PART * policy.alpha, bad) - math.floor(seen))
        more = f"{missing:,} more needed without a bad one" if missing else "the step is not complete"
        return found(INCONCLUSIVE, f"{shown}: {more}")
    fixed = float(stats.upper_bound(look.bad, look.total, LOOK_PART * policy.alpha)) <= share and bad <= share * seen
    later = (1 - LOOK_PART) * policy.alpha
    if fixed or float(stats.log_e_under(bad, seen, share)) >= -math.log(later):
        return found(PASS, f"{shown}: kept")
    missing = stats.needed_sequential(share, later, bad) - math.floor(seen)
    return found(INCONCLUSIVE, f"{shown}: {missing:,} more needed without a bad one")


def _unmeasured(total: Tally, metric: str, left_out: str) -> str:
    """What to do where clients are there and none of them can ever be measured: such a run would never pass."""
    if metric not in _STREAMED or not total.timed:  # in the warm-up nothing is
        return "nothing was measured"
    return f"nothing was measured in {total.timed:,} requests: it needs {_STREAMED[metric]}; {left_out}"


def _worse_than_stable(history: Evidence, key: str, limit: Limit | None) -> bool | None:
    """None: no stable side that could tell; a canary over its limit is then rolled back."""
    step = history.step
    if step.stable is None:
        return None
    baseline, stable = step.baseline.share_counts(limit)[1], step.stable.share_counts(limit)[1]
    if stable < BASELINE_PART * baseline:
        return None
    return key in history.worse and float(stats.log_e_worse(history.worse[key])) >= -math.log(BLAME_ALPHA)


def _numbers(bad: float, seen: float, alpha: float) -> dict[str, float]:
    """For people; nothing known is bounds of 0 and 1."""
    return {
        "bad": bad,
        "total": seen,
        "share": bad / seen if seen else 0.0,
        "lower": float(stats.lower_bound(bad, seen, alpha / 2)) if seen else 0.0,
        "upper": float(stats.upper_bound(bad, seen, alpha / 2)) if seen else 1.0,
    }


def _stable_numbers(history: Evidence, limit: Limit | None) -> dict[str, float]:
    stable = _sum(step.stable for step in history.steps)
    baseline = _sum(step.baseline for step in history.steps)
    bad, total = stable.share_counts(limit)
    numbers = {"stable_bad": bad, "stable_total": total, "stable_share": bad / total if total else 0.0}
    if total:
        ours = [math.floor(value) for value in baseline.share_counts(limit)]
        numbers["fisher_p"] = stats.fisher_worse(ours[0], ours[1], math.floor(bad), math.floor(total))
    return numbers


def _sum(tallies: Iterable[Tally | None]) -> Tally:
    total = Tally()
    for tally in tallies:
        total = total if tally is None else total.plus(tally)
    return total


def _counted(total: Tally, limit: Limit | None) -> str:
    if limit is None:
        return f"{total.bad:,} of {total.requests:,}"
    shown = f"{total.slow.get(limit_key(limit), 0):,} of {total.observations[limit.metric]:,}"
    effective = total.share_counts(limit)[1]
    return shown if total.independent(limit.metric) == 1 else f"{shown}, worth {effective:,.0f}"


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %"


# -- comparisons with stable


def _first_token(history: Evidence, policy: Policy) -> Finding:
    edges = [key.removeprefix("not worse ") for key in history.worse if key.startswith("not worse ")]
    ours, theirs = _sum(s.baseline for s in history.steps if s.stable), _sum(s.stable for s in history.steps)
    seen, stable_seen = ours.observations.get("ttft", 0), theirs.observations.get("ttft", 0)
    numbers: dict[str, float] = {"total": seen, "stable_total": stable_seen}

    def found(outcome: Outcome, text: str) -> Finding:
        return Finding(metric="ttft_not_worse", outcome=outcome, text=f"first token: {text}", numbers=numbers)

    if not seen or not stable_seen:
        unmeasured = _unmeasured(ours, "ttft", "`--no-ttft` leaves it out")
        return found(INCONCLUSIVE, "nothing of stable to compare with" if seen else unmeasured)
    if not edges:
        return found(INCONCLUSIVE, "no histogram of both sides to compare")
    logs = [float(stats.log_e_worse(history.worse[f"not worse {edge}"])) for edge in edges]
    log_e = float(stats.log_mean(logs, [1 / len(logs)] * len(logs)))  # all edges, since any could show it
    numbers |= {"log_e": log_e, "log_e_fail": -math.log(fail_alpha(policy, "ttft_not_worse"))}

    def pooled(edge: str) -> float:
        return (ours.slow.get(edge, 0) + theirs.slow.get(edge, 0)) / (seen + stable_seen)

    edge = min(edges, key=lambda name: abs(pooled(name) - TYPICAL))
    bad, stable_bad = ours.slow.get(edge, 0), theirs.slow.get(edge, 0)
    bound = stats.ratio_upper(bad, stable_bad, _expected_part(history.steps, edge), policy.alpha)
    numbers |= {"edge": float(edge.partition(":")[2]), "bad": bad, "stable_bad": stable_bad}
    numbers |= {"ratio_upper": min(bound, 1e9)}
    shares = (
        f"{_percent(bad / seen)} take {numbers['edge'] * 1000:g} ms, of stable's {_percent(stable_bad / stable_seen)}"
    )
    if log_e >= numbers["log_e_fail"]:
        return found(FAIL, f"{shares}: worse than stable")
    if bound < WORSE:
        return found(PASS, f"{shares}: at most {bound:.2g} times as many")
    if pooled(edge) < TYPICAL and float(stats.upper_bound(bad, seen, policy.alpha)) <= FAST:
        return found(PASS, f"{shares}: fast on both sides")
    return found(INCONCLUSIVE, f"{shares}: more are needed to compare")


def _expected_part(steps: list[Step], edge: str) -> float:
    """The canary's part of the late ones if it were like stable: step by step, as weights differ between steps."""
    late, ours = 0.0, 0.0
    for step in steps:
        if step.stable is None:
            continue
        number = step.baseline.slow.get(edge, 0) + step.stable.slow.get(edge, 0)
        canary, stable = (side.observations.get("ttft", 0) for side in (step.baseline, step.stable))
        late += number
        ours += number * canary / max(1, canary + stable)
    return ours / late if late else 0.0


def _rejected(history: Evidence, policy: Policy) -> Finding:
    """429: too many requests for what a side can take. No error, but not to be worse than stable's either."""
    log_e = float(stats.log_e_worse(history.worse["rejected"])) if "rejected" in history.worse else 0.0
    threshold = -math.log(fail_alpha(policy, "rejected"))
    ours, theirs = _sum(s.baseline for s in history.steps if s.stable), _sum(s.stable for s in history.steps)
    text = f"refused for want of capacity (429): {ours.rejected:,}, stable {theirs.rejected:,}"
    numbers = {"bad": ours.rejected, "stable_bad": theirs.rejected, "log_e": log_e, "log_e_fail": threshold}
    if log_e >= threshold:
        return Finding(metric="rejected", outcome=FAIL, text=f"{text}: worse than stable", numbers=numbers)
    return Finding(metric="rejected", outcome=PASS, text=text, numbers=numbers)

"""Readings -> the real judge: what the controller hands it, over a restart and over numbers that cannot be trusted."""

from __future__ import annotations

import json

import pytest

from canary.judging import EvidenceJudge
from canary.samples import Reading
from canary.types import Limit, Outcome, Policy, SideCounts, Verdict

POLICY = Policy(
    steps=[50], step_seconds=10, interval=1, warmup_seconds=0, error_rate=0.01, min_requests=100, min_connections=5,
    limits=[Limit(metric="itl", seconds=0.08, share=0.05)], ttft_not_worse=False,
)  # fmt: skip


def reading(at: float, requests: int, bad: int = 0, *, epoch: str = "1", invalid: str | None = None) -> Reading:
    def side(errors: int) -> SideCounts:
        return SideCounts(
            epoch=epoch, at=at, requests=requests, errors={"http_5xx": errors}, connections=requests // 10, clients=5,
            observations={"itl": requests}, slow={"itl:0.08": 0},
        )  # fmt: skip

    return Reading(at=at, canary=side(bad), stable=side(0), invalid=invalid)


def feed(judge: EvidenceJudge, bad_share: float, looks: range) -> Verdict:
    verdict = None
    for n in looks:
        requests = n * 200
        verdict = judge.look(
            reading(float(n), requests, round(requests * bad_share)), weight=50, kernel=requests // 10, golden_ok=True
        )
        if verdict.outcome is Outcome.FAIL:
            return verdict
    assert verdict is not None
    return verdict


def test_good_counts_pass_and_bad_ones_fail() -> None:
    assert feed(EvidenceJudge(POLICY, None), 0.0, range(20)).outcome is Outcome.PASS
    assert feed(EvidenceJudge(POLICY, None), 0.2, range(20)).outcome is Outcome.FAIL


def test_evidence_survives_a_restart_of_the_controller() -> None:
    first = EvidenceJudge(POLICY, None)
    assert feed(first, 0.0, range(8)).outcome is Outcome.INCONCLUSIVE
    again = EvidenceJudge(POLICY, json.loads(json.dumps(first.evidence())))
    assert feed(again, 0.0, range(8, 9)).outcome is Outcome.INCONCLUSIVE
    assert feed(again, 0.0, range(9, 20)).outcome is Outcome.PASS
    # What was counted before the restart is in it: 20 looks of 200 requests, less the two first readings.
    requests = next(f for f in feed(again, 0.0, range(20, 21)).findings if f.metric == "errors").numbers["total"]
    assert 3000 < requests < 4000


@pytest.mark.parametrize("broken", ["epoch", "invalid", "gone"])
def test_numbers_that_cannot_be_trusted_are_inconclusive(broken: str) -> None:
    judge = EvidenceJudge(POLICY, None)
    assert feed(judge, 0.0, range(20)).outcome is Outcome.PASS
    last = reading(20.0, 4000)
    if broken == "epoch":
        last = reading(20.0, 4000, epoch="2")
    elif broken == "invalid":
        last = reading(20.0, 4000, invalid="stale")
    else:
        last = Reading(at=20.0, canary=None, stable=None, invalid="gateway canary did not answer")
    assert judge.look(last, weight=50, kernel=400, golden_ok=True).outcome is Outcome.INCONCLUSIVE


def test_without_golden_answers_nothing_passes() -> None:
    judge = EvidenceJudge(POLICY, None)
    for n in range(30):
        verdict = judge.look(reading(float(n), n * 200), weight=50, kernel=n * 20, golden_ok=None)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert judge.look(reading(30.0, 6000), weight=50, kernel=600, golden_ok=False).outcome is Outcome.FAIL

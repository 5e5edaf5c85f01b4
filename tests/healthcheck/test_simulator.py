"""No schedule of faults, crashes and people ends in a reset loop, two resets at once, a GPU that was lost quietly, the
last GPU drained for something that can wait, or services left stopped."""

from __future__ import annotations

import os

import pytest

from healthcheck.policy import load_policy
from tests.healthcheck.simulator import random_schedule

POLICY = load_policy()
FULL = bool(os.environ.get("APPLIANCE_FULL"))
SCHEDULES = 10_000 if FULL else 300
CHUNK = SCHEDULES // 10


@pytest.mark.parametrize("chunk", range(10))
def test_random_schedules(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            random_schedule(POLICY, seed)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error

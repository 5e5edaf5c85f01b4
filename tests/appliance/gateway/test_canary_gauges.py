"""The canary's state files as metrics: what the controller really writes, and what cannot be read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from appliance.gateway.canary_gauges import canary_gauges
from appliance.paths import Paths
from canary.run import Phase, Run, Stage
from canary.store import Store
from canary.types import Policy


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths.under(tmp_path)
    for directory in (paths.state, paths.run):
        directory.mkdir(parents=True)
    return paths


def values(paths: Paths) -> dict[str, float]:
    """name, or name[label] -> value."""
    return {
        gauge.name.removeprefix("appliance_canary_") + (f"[{labels[0]}]" if labels else ""): value
        for gauge in canary_gauges(paths)
        for labels, value in gauge.export()
    }


def make(**changes: object) -> Run:
    fields = {"id": "7", "release": "v2", "stable": "v1", "policy": Policy(), "boot_id": "b", "created_at": 1.0}
    return Run(**(fields | changes))  # type: ignore[arg-type]


def test_without_any_run(paths: Paths) -> None:
    found = values(paths)
    assert (found["run_on"], found["weight_percent"], found["controller_seen_timestamp_seconds"]) == (0, 0, 0)
    assert not any(name.startswith("run_phase") for name in found)


def test_a_run_and_its_controller(paths: Paths) -> None:
    store = Store(paths)
    store.save(make(phase=Phase.STEP, stage=Stage.OBSERVE, weight=25.0))
    store.say_alive(repairs=3, rule_seconds=0.012, rule_error=None)
    found = values(paths)
    assert (found["run_on"], found["run_phase[step]"], found["weight_percent"]) == (1, 1, 25)
    assert (found["run_waiting"], found["rule_repairs_total"], found["rule_error"]) == (0, 3, 0)
    assert found["rule_change_seconds"] == 0.012
    assert abs(found["controller_seen_timestamp_seconds"] - time.time()) < 60
    store.save(make(phase=Phase.STEP, stage=Stage.HELD, weight=25.0, held="manual"))
    assert values(paths)["run_waiting"] == 1


def test_a_run_that_is_over(paths: Paths) -> None:
    Store(paths).save(make(phase=Phase.FAILED, stage=Stage.OVER, weight=0.0, ended_at=1234.0, paused="by hand"))
    found = values(paths)
    assert (found["run_on"], found["run_waiting"], found["run_ended_timestamp_seconds[failed]"]) == (0, 0, 1234)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"phase": 3}', "\xff", "[" * 100_000])
def test_files_that_cannot_be_read_are_said_nothing_of(paths: Paths, text: str) -> None:
    for path in (paths.canary_run, paths.canary_alive):
        path.write_bytes(text.encode("latin-1"))
    assert values(paths)["controller_seen_timestamp_seconds"] == 0

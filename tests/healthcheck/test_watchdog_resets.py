"""Which result of a reset counts, and what waits for one that has not ended. tests/healthcheck/systemctl stands in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.log import ExitCode
from appliance.paths import Paths
from appliance.statefile import write_state
from healthcheck import requests, reset_result
from healthcheck.errands import Errands
from healthcheck.machine_types import Command, ResetDone, ResetGpu, Stopped, Tick, WatchReset
from healthcheck.resetter import Resetter
from tests.healthcheck.test_watchdog_service import Host
from tests.healthcheck.watchdog_world import systemctl_stand_in


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", f"{systemctl_stand_in(tmp_path)}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def host(root: Path) -> Iterator[Host]:
    host = Host(root)
    host.service.start()
    host.run(0.1)
    host.done.clear()
    yield host
    host.service.close()


def leave_result(paths: Paths, gpu: int = 0, *, started: float | None = None, ok: bool = True) -> Path:
    """As the unit of this GPU leaves it. `started`: what the clock said."""
    path = paths.gpu_reset(f"GPU-{gpu}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_state(path, {"uuid": f"GPU-{gpu}", "ok": ok, "started": started or time.time(), "phases": {}}, schema=1)
    return path


# -- which result counts -----------------------------------------------------------------------------------------------


def test_a_result_from_before_the_clock_was_set_back_is_not_the_next_ones(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left by hand an hour ahead of the clock of now."""
    result = leave_result(host.paths, started=time.time() + 3600)
    at_command: list[bool] = []

    def perform(command: Command) -> None:
        at_command.extend([result.exists()] if isinstance(command, ResetGpu) else [])

    monkeypatch.setattr(host.service.actions, "perform", perform)
    host.signal("xid:95")
    host.service.post(Stopped(0))
    assert host.ledger()["state"] == "RESETTING" and at_command == [False]


def test_a_result_that_cannot_be_removed_keeps_the_reset_from_being_asked_for(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Path) -> bool:
        raise OSError(30, "Read-only file system")

    leave_result(host.paths)
    host.signal("xid:95")
    with monkeypatch.context() as patch:
        patch.setattr(reset_result, "remove_state", busy)
        host.service.post(Stopped(0))
        assert "ResetGpu" not in host.kinds() and host.ledger()["state"] == "STOPPING"
    host.run(1.3)
    assert "ResetGpu" in host.kinds() and host.ledger()["state"] == "RESETTING"


def test_a_result_goes_when_the_ledger_knows_it(host: Host) -> None:
    host.signal("xid:95")
    host.service.post(Stopped(0))
    result = leave_result(host.paths)
    host.service.post(ResetDone(0, True))
    assert host.ledger()["state"] == "WARMUP" and not result.exists()


def test_at_the_start_only_the_result_that_is_waited_for_stays(root: Path) -> None:
    first = Host(root)
    first.service.start()
    first.signal("xid:95")
    first.service.post(Stopped(0))
    waited_for, other = leave_result(first.paths, 0), leave_result(first.paths, 1)
    second = Host(root)
    second.service.start()
    assert waited_for.exists() and not other.exists()


def test_a_reset_that_was_asked_for_before_the_clock_was_set_back_is_believed(root: Path) -> None:
    """Its result says an earlier time than the request."""
    host = Host(root)
    gate = Gate()
    resetter = Resetter(host.loop, host.paths, Errands(host.loop), gate)
    done: list[Any] = []
    leave_result(host.paths, started=1000.0)
    resetter.reset("GPU-0", 5000.0, lambda *end: done.append(end))
    assert done[0][0] is True


# -- one that outlives its time ----------------------------------------------------------------------------------------


class Gate:
    """NVML as far as a reset needs it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def close(self, done: Callable[[], None]) -> None:
        self.said.append("close")
        done()

    def open(self) -> None:
        self.said.append("open")


def test_a_reset_that_is_given_up_is_watched_with_nvml_open_for_the_others(root: Path) -> None:
    (root / "reset.json").write_text('{"seconds": 2}')
    host, gate, done = Host(root), Gate(), []
    resetter = Resetter(host.loop, host.paths, Errands(host.loop), gate)
    resetter.reset("GPU-0", 1.0, lambda *end: done.append(("reset", *end)))
    assert host.loop.run(until=(root / "resets.log").exists, timeout=20)
    assert gate.said == ["close"]
    resetter.watch("GPU-0", 1.0, lambda *end: done.append(("watch", *end)))
    assert gate.said == ["close", "open"] and not done
    assert host.loop.run(until=lambda: bool(done), timeout=20)
    assert [end[:2] for end in done] == [("watch", True)] and gate.said == ["close", "open"]
    assert len((root / "resets.log").read_text().splitlines()) == 1


def test_after_a_restart_the_reset_of_a_gpu_that_was_given_up_is_watched_again(root: Path) -> None:
    host = Host(root)
    host.service.start()
    host.signal("xid:95")
    host.service.post(Stopped(0))
    state = host.service.host
    host.service.host = replace(state, gpus={**state.gpus, 0: replace(state.gpus[0], deadline=1.0)})
    host.service.post(Tick(None, None))
    assert host.ledger()["state"] == "QUARANTINED"
    (watch,) = [command for command in host.done if isinstance(command, WatchReset)]
    again = Host(root)
    again.service.start()
    assert [command for command in again.done if isinstance(command, WatchReset)] == [watch]
    again.service.post(ResetDone(0, False, "it ended"))
    assert again.service.host.resetting is None


# -- set-healthy and maintenance off -----------------------------------------------------------------------------------


class Caller:
    """A client of the control socket."""

    closed = False

    def __init__(self, host: Host, **request: Any) -> None:
        self.replies: list[dict[str, Any]] = []
        requests.handle(host.service, request, self)  # type: ignore[arg-type]
        assert host.loop.run(until=lambda: bool(self.replies), timeout=20)

    def reply(self, reply: dict[str, Any]) -> None:
        self.replies.append(reply)


def set_healthy(host: Host, gpu: int = 0) -> dict[str, Any]:
    return Caller(host, op="set-healthy", gpu=gpu, reason="looked at it").replies[0]


def maintenance(host: Host, on: bool) -> dict[str, Any]:
    return Caller(host, op="maintenance", on=on, reason="test").replies[0]


def test_a_gpu_that_is_being_repaired_is_not_set_healthy(host: Host) -> None:
    host.signal("xid:95")
    for state in ("STOPPING", "RESETTING"):
        assert host.ledger()["state"] == state
        reply = set_healthy(host)
        assert not reply["ok"] and reply["exit_code"] == ExitCode.BUSY, reply
        assert host.ledger()["state"] == state and reply["hint"]
        host.service.post(Stopped(0))
    reply = maintenance(host, False)
    assert reply["exit_code"] == ExitCode.BUSY and "gpu 0" in reply["error"]
    assert r"appliance-gpu-reset@GPU\x2d0.service" in reply["hint"]


def test_a_quarantined_gpu_is_not_set_healthy_while_its_reset_unit_runs(host: Host, root: Path) -> None:
    """By whomever that was started."""
    host.signal("xid:79")
    host.service.post(Stopped(0))
    (root / "resetting").touch()  # the stand-in's: the unit is activating
    assert set_healthy(host)["exit_code"] == ExitCode.BUSY
    assert maintenance(host, True)["ok"] and maintenance(host, False)["exit_code"] == ExitCode.BUSY
    assert host.ledger()["state"] == "QUARANTINED"
    (root / "resetting").unlink()
    assert maintenance(host, False)["ok"]
    reply = set_healthy(host)
    assert reply["ok"] and reply["state"] == "WARMUP"


def test_whether_a_reset_runs_that_nobody_can_say_is_no_yes(host: Host, root: Path) -> None:
    host.signal("xid:79")
    host.service.post(Stopped(0))
    (root / "bin/systemctl").write_text("#!/bin/sh\necho Failed to connect to bus >&2; exit 1\n")
    reply = set_healthy(host)
    assert reply["exit_code"] == ExitCode.INCONCLUSIVE and "Failed to connect to bus" in reply["error"]
    assert host.ledger()["state"] == "QUARANTINED"


def test_a_gpu_that_serves_is_set_healthy_at_once(host: Host, root: Path) -> None:
    assert set_healthy(host)["ok"]
    assert maintenance(host, True)["ok"]
    reply = set_healthy(host)
    assert reply["exit_code"] == ExitCode.BUSY and "maintenance off" in reply["hint"]

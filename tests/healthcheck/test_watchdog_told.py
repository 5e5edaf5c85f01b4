"""What a human tells the watchdog while its ledger cannot be written: it is in force, and said not to be kept. The
command and the control socket are the real ones; the service runs in this process."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from appliance.launcher.control_server import ControlServer
from healthcheck import keeper, requests
from healthcheck.machine_types import Stopped
from tests.healthcheck.test_watchdog_service import Host, command


class Told(Host):
    """With its control socket."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.control = ControlServer(
            self.loop, self.paths.watchdog_control, partial(requests.handle, self.service),
            admins=frozenset({os.geteuid()}), public_uid=os.geteuid(), group=os.getegid(),
        )  # fmt: skip

    def told(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
        """The command, while the loop runs."""
        thread = threading.Thread(target=self.loop.run)
        thread.start()
        try:
            return command(capsys, *arguments)
        finally:
            self.loop.stop()
            thread.join(10)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    monkeypatch.setattr(requests, "_without_resets", lambda service, gpus, client, timeout, do: do())  # asks systemd
    host = Told(tmp_path)
    host.service.start()
    host.run(0.2)
    yield host
    host.control.close()
    host.service.close()


def full(*_: Any) -> None:
    raise OSError(28, os.strerror(28))


@pytest.fixture
def full_disk(host: Told, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "write_ledger", full)
        yield


def in_memory(host: Told, gpu: int = 0) -> str:
    return str(host.service.host.gpus[gpu].state)


def not_kept(host: Told, answer: tuple[int, str, str]) -> bool:
    code, out, err = answer
    why = f"only until the watchdog ends, because {host.paths.gpus} could not be written (No space left on device)"
    return code == 1 and not out and why in err and "df -h" in err


@pytest.mark.usefixtures("full_disk")
def test_maintenance_on_a_full_disk_is_in_force_and_not_kept(host: Told, capsys: pytest.CaptureFixture[str]) -> None:
    answer = host.told(capsys, "maintenance", "on", "--reason", "driver")
    assert not_kept(host, answer) and "the watchdog looks and does not act" in answer[2]
    assert in_memory(host) == "MAINTENANCE" and host.ledger().get("state", "HEALTHY") == "HEALTHY"
    code, out, _ = host.told(capsys, "maintenance", "on", "--reason", "driver", "--json")
    error = json.loads(out)["error"]
    assert code == error["exit_code"] == 1 and "No space left" in error["message"] and "df -h" in error["hint"]


def test_maintenance_off_on_a_full_disk_too_also_when_said_twice(
    host: Told, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.told(capsys, "maintenance", "on", "--reason", "driver")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "write_ledger", full)
        for _ in range(2):  # the second one changes nothing, and the file still says maintenance
            assert not_kept(host, host.told(capsys, "maintenance", "off", "--reason", "done"))
        assert in_memory(host) == "HEALTHY" and host.ledger()["state"] == "MAINTENANCE"
    host.run(1.3)  # tried again by itself
    assert host.ledger()["state"] == "HEALTHY"
    assert host.told(capsys, "maintenance", "off", "--reason", "done")[0] == 0


def test_set_healthy_on_a_full_disk_too(
    host: Told, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.signal("xid:79")
    host.service.post(Stopped(0))
    assert host.ledger()["state"] == "QUARANTINED"
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "write_ledger", full)
        answer = host.told(capsys, "set-healthy", "0", "--reason", "swapped")
        assert not_kept(host, answer) and "gpu 0 is WARMUP" in answer[2]
        assert in_memory(host) == "WARMUP" and host.ledger()["state"] == "QUARANTINED"
    host.run(1.3)
    assert host.ledger()["state"] == "WARMUP"


def test_status_names_a_ledger_that_is_not_written(
    host: Told, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "write_ledger", full)
        host.told(capsys, "maintenance", "on", "--reason", "driver")
        host.told(capsys, "maintenance", "off", "--reason", "done")
        host.run(0.2)
        code, out, _ = command(capsys, "status")
        line = f"! {host.paths.gpus} could not be written (No space left on device)"
        assert code == 1 and line[:60] in out and in_memory(host) == "HEALTHY"
        assert line[2:] in json.loads(command(capsys, "status", "--json")[1])["problems"][0]
    host.launched()
    host.run(1.3)
    assert command(capsys, "status")[0] == 0

"""The service in this process: the ledger before deeds, what systemd hears, what others are shown, the command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.events import read_events
from appliance.gpus import bind_slots
from appliance.launcher.loop import READ, Loop
from appliance.notify import Notifier
from appliance.paths import Paths
from appliance.statefile import StateError, write_state
from healthcheck import keeper
from healthcheck.__main__ import parse_arguments
from healthcheck.cli import main
from healthcheck.document import SCHEMA, read_document
from healthcheck.keeper import Keeper
from healthcheck.machine_types import Command, EngineReady, Hold, ResetGpu, Stopped, Unhold, Verified, WarmedUp
from healthcheck.news import News
from healthcheck.policy import load_policy
from healthcheck.probes import NoProbes
from healthcheck.resetter import unit_name
from healthcheck.service import Schedule, Service
from healthcheck.types import Signal
from tests.appliance.gateway.world import metric_value


class Host:
    """A service whose deeds are only noted."""

    def __init__(self, root: Path, gpus: int = 2, environ: dict[str, str] | None = None) -> None:
        self.paths, self.loop = Paths.under(root), Loop()
        for directory in (self.paths.etc, self.paths.state, self.paths.run):
            directory.mkdir(parents=True, exist_ok=True)
        if not self.paths.gpus.exists():
            bind_slots(self.paths.gpus, [f"GPU-{number}" for number in range(gpus)])
        self.service = Service(
            self.paths, self.loop, load_policy(), Keeper(self.paths.gpus), Notifier(environ or {}),
            lambda service: NoProbes(self.loop), backend="cpu", schedule=Schedule(), stall_timeout=60.0, test=True,
            boot_id="boot-1",
        )  # fmt: skip
        self.done: list[Command] = []
        self.service.actions.perform = self._note  # type: ignore[method-assign]

    def _note(self, command: Command) -> bool:
        self.done.append(command)
        return True

    def signal(self, key: str, gpu: int = 0) -> None:
        self.service.signal(Signal(key, f"GPU-{gpu}", "test", time.time(), "test"))

    def kinds(self) -> list[str]:
        return [type(command).__name__ for command in self.done]

    def ledger(self, gpu: int = 0) -> dict[str, Any]:
        return json.loads(self.paths.gpus.read_text())["gpus"][gpu]  # type: ignore[no-any-return]

    def launched(self) -> None:
        """Their launchers run, as far as files say."""
        for gpu in self.service.host.gpus:
            self.paths.gpu_run(gpu).mkdir(exist_ok=True)
            write_state(self.paths.launcher_state(gpu), {"gpu": gpu, "pid": os.getpid()}, schema=1)

    def run(self, seconds: float) -> None:
        self.loop.run(timeout=seconds)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def host(root: Path) -> Iterator[Host]:
    host = Host(root)
    host.service.start()
    host.run(0.2)
    host.done.clear()
    yield host
    host.service.close()


def test_what_is_to_be_done_is_on_disk_before_it_is_done(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(host.service.actions, "perform", lambda command: seen.append((command, host.ledger()["state"])))
    host.signal("xid:95")
    host.service.post(Stopped(0))
    assert [(type(command), state) for command, state in seen if not isinstance(command, Hold)] == [
        (ResetGpu, "RESETTING")
    ]
    assert [state for command, state in seen if isinstance(command, Hold)] == ["STOPPING", "RESETTING"]


def test_without_a_ledger_nothing_is_repaired_but_the_gpu_is_taken_out(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(keeper, "write_ledger", full)
        host.signal("xid:95")
        host.service.post(Stopped(0))
        assert host.kinds() == ["Hold", "Hold"], "and no reset: an attempt that nobody counts has no limit"
        assert "CANNOT BE WRITTEN" in host.service.publisher.document()["status"]
        assert host.ledger()["state"] == "HEALTHY"
    host.run(1.3)  # tried again by itself
    assert host.kinds() == ["Hold", "Hold", "ResetGpu"] and host.ledger()["state"] == "RESETTING"


def test_the_first_transition_of_a_gpu_claims_no_duration(root: Path) -> None:
    """A slot without `since`: since when it is healthy is not known, so no seconds, instead of those since 1970."""
    host = Host(root)
    write_state(host.paths.gpus, {"gpus": [{"slot": 0, "uuid": "GPU-0"}]}, schema=1)
    host = Host(root)
    host.service.start()
    host.signal("xid:95")
    host.service.post(Stopped(0))
    told = [event for event in read_events(host.paths.events) if event["event"] == "watchdog_transition"]
    assert [(event["before"], event["after"]) for event in told] == [("HEALTHY", "STOPPING"), ("STOPPING", "RESETTING")]
    assert "seconds" not in told[0] and 0 <= told[1]["seconds"] < 60
    assert list(told[1]["phases"]) == ["STOPPING"]
    host.service.close()


def test_an_idle_watchdog_does_not_write_its_ledger(host: Host) -> None:
    before = host.paths.gpus.stat().st_mtime_ns
    host.run(2.5)
    assert host.paths.gpus.stat().st_mtime_ns == before


def test_slots_that_are_bound_later_are_watched(host: Host) -> None:
    bind_slots(host.paths.gpus, ["GPU-7"])
    host.run(1.3)
    assert [row["uuid"] for row in host.service.publisher.document()["gpus"]] == ["GPU-0", "GPU-1", "GPU-7"]
    host.service.signal(Signal("xid:95", "GPU-7", "test", time.time(), "test"))
    assert host.ledger(2)["state"] == "STOPPING"


def held(host_paths: Paths, gpu: int, reason: str = "xid:79: off the bus") -> None:
    """As its launcher leaves it on the disk."""
    hold = {"level": "stop", "reason": reason, "since": time.time()}
    host_paths.holds(gpu).parent.mkdir(exist_ok=True)
    write_state(host_paths.holds(gpu), {"holds": {"watchdog": hold, "operator": hold}}, schema=1)


def test_a_quarantine_outlives_the_loss_of_the_ledger(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Host(root)
    first.service.start()
    first.signal("xid:79")
    first.service.post(Stopped(0))
    held(first.paths, 0)
    first.service.close()
    first.paths.gpus.unlink()
    second = Host(root)  # binds anew
    second.service.start()
    second.run(0.2)
    entry = second.ledger()
    assert (entry["state"], entry["needs"]) == ("QUARANTINED", "human") and second.ledger(1)["state"] == "HEALTHY"
    assert "found held by the watchdog: xid:79: off the bus; the ledger does not know why" in entry["reason"]
    assert [command.gpu for command in second.done if isinstance(command, Unhold)] == [1]
    code, out, _ = command(capsys, "status")
    assert code == 1 and "healthcheck set-healthy 0" in out
    second.service.close()


def test_a_slot_that_is_bound_while_its_launcher_holds_it_for_us_is_quarantined(host: Host) -> None:
    held(host.paths, 2)
    bind_slots(host.paths.gpus, ["GPU-7", "GPU-8"])
    host.run(1.3)
    assert host.ledger(2)["state"] == "QUARANTINED" and host.ledger(3)["state"] == "HEALTHY"


def test_a_hold_that_the_ledger_explains_is_let_go(host: Host, root: Path) -> None:
    """A crash came after the ledger and before the launcher: the GPU came back after it was held."""
    held(host.paths, 0)
    host.signal("xid:31")
    for event in (EngineReady(0), WarmedUp(0), Verified(0, True)):
        host.service.post(event)
    assert host.ledger()["state"] == "PROBATION"
    second = Host(root)
    second.service.start()
    assert second.ledger()["state"] == "PROBATION" and 0 in [c.gpu for c in second.done if isinstance(c, Unhold)]
    second.service.close()


def test_a_damaged_ledger_says_what_becomes_of_quarantines(root: Path) -> None:
    paths = Host(root).paths
    paths.gpus.write_text('{"schema": 1, "gpus": [{"slo')
    with pytest.raises(StateError) as caught:
        Keeper(paths.gpus).load()
    assert caught.value.hint is not None and "gpus bind" in caught.value.hint and "QUARANTINED" in caught.value.hint


def test_no_slots_is_not_all_well(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = Host(root, gpus=0)
    host.service.start()
    host.run(0.2)
    code, out, _ = command(capsys, "status")
    assert code == 1 and "no GPU slot is bound" in out and "appliance gpus bind" in out
    host.paths.gpu_run(1).mkdir()
    write_state(host.paths.launcher_state(1), {"gpu": 1, "pid": os.getpid()}, schema=1)
    code, out, _ = command(capsys, "status")
    assert code == 1 and "nobody watches GPU slot 1" in out
    host.service.close()


def test_systemd_hears_ready_after_the_first_look_then_pings(root: Path) -> None:
    address = str(root / "notify")
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.bind(address)
    heard.setblocking(False)
    host = Host(root, environ={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "300000"})
    messages: list[str] = []
    host.loop.watch(heard.fileno(), READ, lambda: messages.append(heard.recv(4096).decode()))
    host.service.start()
    host.run(1.0)
    host.signal("xid:79")
    host.run(0.3)
    host.service.terminate()
    with contextlib.suppress(BlockingIOError):  # a ping may still be there before the last one
        while True:
            messages.append(heard.recv(4096).decode())
    host.service.close()
    assert [message for message in messages if "READY=1" in message] and "STOPPING=1" in messages[-1]
    assert sum("WATCHDOG=1" in message for message in messages) >= 8, "every 100 ms of a limit of 300 ms"
    assert any("STATUS=gpu 0 STOPPING: xid:79" in message for message in messages)
    assert sum("STATUS=" in message for message in messages) <= 5, "only what has changed"


def test_a_resumed_service_gives_the_commands_of_the_state_again(root: Path) -> None:
    first = Host(root)
    first.service.start()
    first.signal("xid:95")
    first.service.post(Stopped(0))
    (reset,) = [command for command in first.done if isinstance(command, ResetGpu)]
    second = Host(root)
    second.service.start()
    assert [command for command in second.done if isinstance(command, ResetGpu)] == [reset]
    rebooted = Host(root)
    rebooted.service.boot_id = "boot-2"
    rebooted.service.start()
    assert rebooted.ledger()["state"] == "WARMUP", "a reboot has reset it"
    assert not [command for command in rebooted.done if isinstance(command, ResetGpu)]


def test_a_unit_is_named_as_systemd_escape_does_it() -> None:
    """systemd-escape(1) of 252: `systemd-escape --template=appliance-gpu-reset@.service GPU-5fd4f087`."""
    assert unit_name("GPU-5fd4f087") == r"appliance-gpu-reset@GPU\x2d5fd4f087.service"


def test_metrics_are_prometheus_text(host: Host) -> None:
    host.signal("xid:79")
    host.signal("xid:31", 1)
    kind, body = host.service.publisher.metrics_route()
    text = body.decode()
    assert kind.startswith("text/plain; version=0.0.4")
    assert metric_value(text, "appliance_watchdog_signals_total", gpu="0", key="xid:79") == 1
    assert metric_value(text, "appliance_gpu_state", gpu="0", state="STOPPING") == 1
    assert metric_value(text, "appliance_watchdog_up", nvml="off") == 1
    assert metric_value(text, "appliance_watchdog_transitions_total", gpu="0", to="STOPPING") == 1
    assert metric_value(text, "appliance_gpu_check", gpu="1", check="engine", status="unknown") == 1


# -- the command -------------------------------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        code = main(list(arguments))
    except SystemExit as error:
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_status_says_what_is_wrong_and_what_to_do(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.launched()
    host.run(1.3)
    code, out, _ = command(capsys, "status")
    assert code == 0 and "gpu 0  HEALTHY  GPU-0" in out
    host.signal("xid:79")
    host.service.post(Stopped(0))
    host.run(0.2)
    code, out, _ = command(capsys, "status")
    assert code == 1 and "needs reboot" in out and "healthcheck set-healthy 0" in out
    code, out, _ = command(capsys, "status", "--json")
    document = json.loads(out)
    assert code == 1 and document["gpus"][0]["state"] == "QUARANTINED" and len(document["problems"]) == 1


def test_a_healthy_gpu_whose_launcher_is_down_is_not_all_well(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.launched()
    host.run(1.3)
    code, out, _ = command(capsys, "status")
    assert code == 0 and "2 of 2 GPUs healthy" in out and "launcher" not in out.splitlines()[0]
    host.paths.launcher_state(1).unlink()  # it goes with its launcher
    host.run(1.3)
    code, out, _ = command(capsys, "status")
    assert code == 1 and "2 of 2 GPUs healthy; the launcher of gpu 1 is down" in out.splitlines()[0]
    assert "! gpu 1 is healthy, but its launcher is down: systemctl start appliance-gpu@1" in out
    assert "gpu 0 is healthy, but" not in out
    state = json.loads(host.paths.launcher_state(0).read_text())
    write_state(host.paths.launcher_state(0), state | {"pid": 2**22 + 1}, schema=1)  # killed: its file stays
    code, out, _ = command(capsys, "status", "--json")
    document = json.loads(out)
    assert code == 1 and [gpu["launcher"] for gpu in document["gpus"]] == [False, False]
    assert [problem.split(":")[0] for problem in document["problems"]] == [
        f"gpu {gpu} is healthy, but its launcher is down" for gpu in (0, 1)
    ]


def test_only_a_gpu_on_probation_shows_its_share(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher keeps the share of a GPU that was quarantined from its probation."""
    host.launched()
    host.run(1.3)
    document = json.loads(host.paths.watchdog_state.read_text())
    for state in ("PROBATION", "QUARANTINED"):
        gpus = [document["gpus"][0] | {"state": state, "share": 0.25}, document["gpus"][1]]
        write_state(host.paths.watchdog_state, document | {"gpus": gpus}, schema=SCHEMA)
        assert ("on probation, at 25% of its share" in command(capsys, "status")[1]) == (state == "PROBATION")


def test_a_dead_watchdog_is_said(host: Host, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host.run(0.2)
    document = json.loads(host.paths.watchdog_state.read_text())
    write_state(host.paths.watchdog_state, document | {"pid": 2**22 + 1}, schema=SCHEMA)
    code, out, _ = command(capsys, "status")
    assert code == 1 and "does not run" in out
    assert read_document(host.paths)["running"] is False
    rows = [{"name": "NVML", "status": "ok", "reason": "read", "value": None}]
    gpus = [gpu | {"checks": rows} for gpu in document["gpus"]]
    write_state(host.paths.watchdog_state, document | {"pid": 2**22 + 1, "gpus": gpus}, schema=SCHEMA)
    os.utime(host.paths.watchdog_state, (time.time() - 7325, time.time() - 7325))
    code, out, _ = command(capsys, "check", "--cached")
    assert code == 3 and out.startswith("NOT RUNNING") and "last seen 2h02m ago" in out, "what was ok then is no news"
    code, out, _ = command(capsys, "check", "--cached", "--json")
    assert code == 3 and json.loads(out)["running"] is False and json.loads(out)["age_seconds"] > 7000
    write_state(host.paths.watchdog_state, document | {"gpus": gpus}, schema=SCHEMA)
    assert command(capsys, "check", "--cached")[0] == 0
    os.utime(host.paths.watchdog_state, (time.time() - 300, time.time() - 300))
    code, out, _ = command(capsys, "check", "--cached")
    assert code == 3 and out.startswith("SILENT") and "5m00s" in out
    host.paths.watchdog_state.unlink()
    code, _, err = command(capsys, "status")
    assert code == 1 and "has not run since this host booted" in err and "systemctl start" in err


def test_what_is_not_known_for_two_probes_is_not_all_well(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """NVML hangs as a whole, or for one GPU: at the shipped interval of 30 s, 65 s after the last reading."""
    host.launched()
    host.run(0.2)
    now = time.time()
    document = json.loads(host.paths.watchdog_state.read_text()) | {"nvml": "on", "since": now - 1000}
    assert document["probe_interval"] == 30.0

    def status(ages: tuple[float, float], unknown: float | None = None) -> tuple[int, str]:
        hung = [{"name": "NVML", "status": "unknown", "reason": "NVML hung 5 times in a row", "value": 5}]
        gpus = [gpu | {"probed_at": now - old, "checks": hung} for gpu, old in zip(document["gpus"], ages, strict=True)]
        row = {"name": "GPUs", "status": "unknown", "reason": "NVML hung", "value": None, "unknown_since": unknown}
        write_state(host.paths.watchdog_state, document | {"gpus": gpus, "checks": [row]}, schema=SCHEMA)
        return command(capsys, "status")[:2]

    assert status((50, 50), now - 50)[0] == 0, "one probe may be missed"
    code, out = status((70, 10))
    assert code == 1 and "! gpu 0 has not been read for 1m1" in out and "hung 5 times in a row" in out
    assert "gpu 1 has not" not in out
    code, out = status((10, 10), now - 200)
    assert code == 1 and "! GPUs has not been known for 3m20s: NVML hung" in out


def test_checks_are_lines_and_exit_codes(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.run(0.2)
    code, out, _ = command(capsys, "check", "--cached")
    assert code == 3 and "its launcher does not run" in out, "unknown is neither ok nor failed"
    code, out, _ = command(capsys, "check", "--cached", "--json", "--gpu", "1")
    rows = json.loads(out)["gpus"]
    assert [row["gpu"] for row in rows] == [1] and rows[0]["status"] == "unknown"
    code, _, err = command(capsys, "check", "--cached", "--gpu", "9")
    assert code == 2 and "no GPU slot 9" in err


def test_history_has_what_happened_to_a_gpu(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.signal("xid:79", 1)
    code, out, _ = command(capsys, "history", "--gpu", "1")
    assert code == 0 and "transition" in out and "xid:79" in out
    code, out, _ = command(capsys, "history", "--gpu", "0", "--json")
    assert json.loads(out)["events"] == []
    assert command(capsys, "history", "--gpu", "9")[0] == 2 and command(capsys, "history", "-n", "-1")[0] == 2
    code, out, _ = command(capsys, "history", "--json", "-n", "1")
    assert len(json.loads(out)["events"]) == 1


def test_a_fault_that_lasts_does_not_drown_its_history(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """25 minutes of a lost GPU at the shipped interval, with the corrected storm of another one."""
    begun = time.time()
    for probe in range(50):
        for gpu, key in ((1, "nvml:gpu_is_lost"), (0, "ecc:corrected_rate")):
            host.service.signal(Signal(key, f"GPU-{gpu}", "test", begun + 30 * probe, "nvml"))
        if probe == 1:
            host.service.post(Stopped(1))
        host.run(0.02)
    host.run(1.1)  # over a tick
    host.service.signal(Signal("nvml:gpu_is_lost", "GPU-1", "test", begun + 1530, "nvml"))
    code, out, _ = command(capsys, "history")
    lines = [line.split("  ", 1)[1] for line in out.splitlines()]
    assert sum(line.startswith("signal") for line in lines) == 2 and len(lines) < 12
    assert any(line.startswith("transition") and "QUARANTINED" in line for line in lines)
    host.service.signal(Signal("nvml:gpu_is_lost", "GPU-1", "test", begun + 1530, "nvml"))
    code, out, _ = command(capsys, "history", "--transitions", "--gpu", "1")
    assert code == 0 and "signal  " not in out and "QUARANTINED" in out


def test_a_signal_that_stays_is_told_once_an_hour_with_its_count() -> None:
    news, told = News(30.0), []
    for second in range(0, 7300, 30):
        if (again := news.tell(Signal("xid:92", "GPU-0", "", float(second), "nvml"))) is not None:
            told.append((second, again))
    assert told == [(0, 0), (3630, 121), (7260, 121)]
    news.forget("GPU-0")
    assert news.tell(Signal("xid:92", "GPU-0", "", 7300.0, "nvml")) == 0, "after a repair it is new"


def test_explain_gives_the_rule(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Xid 79 and 13 as in NVIDIA's catalogue: RESTART_BM (a reset is impossible) and RESTART_APP."""
    code, out, _ = command(capsys, "explain", "79")
    assert code == 0 and "action: quarantine (then reboot is asked for)" in out
    code, out, _ = command(capsys, "explain", "Xid", "13")
    assert code == 0 and "action: restart engine" in out
    for word in ("nonsense", "bogus"):
        code, _, err = command(capsys, "explain", word)
        assert code == 2 and "no signal" in err
    code, out, _ = command(capsys, "explain", "foo:bar")
    assert code == 0 and "no rule names it" in out
    code, out, _ = command(capsys, "explain", "xid:4711")
    assert code == 0 and "catch-all xid:*" in out
    code, out, _ = command(capsys, "explain", "--json")
    assert code == 0 and len(json.loads(out)["rules"]) > 60


def test_a_policy_is_checked_before_it_is_used(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = root / "good.toml", root / "bad.toml"
    good.write_text('schema = 1\n[[rule]]\nkeys = ["xid:31"]\naction = "alert"\n')
    bad.write_text('schema = 1\n[[rule]]\nkeys = ["xid:31"]\naction = "explode"\n')
    assert command(capsys, "policy", "check", str(good))[0] == 0
    code, _, err = command(capsys, "policy", "check", str(bad))
    assert code == 4 and "explode" in err and "bad.toml" in err
    assert command(capsys, "policy", "check", str(root / "none.toml"))[0] == 2


def test_the_readme_says_how_a_watchdog_for_tests_is_started() -> None:
    text = (Path(__file__).parents[2] / "healthcheck/README.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| `healthcheck inject-fault")]
    (options,) = re.findall(r"`python -P -m healthcheck (.*?)`", row)
    assert parse_arguments(options.split()).test


def test_telling_needs_a_watchdog_and_injecting_needs_to_be_meant(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = command(capsys, "set-healthy", "0", "--reason", "swapped")
    assert code == 1 and "the watchdog is not running" in err
    code, _, err = command(capsys, "inject-fault", "0", "xid:48")
    assert code == 4 and "--i-know" in err
    assert command(capsys, "set-healthy", "0", "--reason", "  ")[0] == 2
    assert command(capsys, "set-healthy", "7", "--reason", "x")[0] == 2

"""`appliance drain|undrain` and start|stop|restart: what launchers and systemd are asked, and when it is over."""

from __future__ import annotations

import argparse
import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from host_trees import UUIDS, Commands, gateway, make_dirs

from appliance import drain_cli, service_cli
from appliance.cli import main
from appliance.command import Result
from appliance.events import read_events
from appliance.gpus import bind_slots
from appliance.log import ApplianceError, UsageError
from appliance.paths import Paths
from appliance.statefile import read_state, write_state


class TimedOut(ApplianceError):
    """As appliance.control raises it."""

    exit_code = 3


class Launchers:
    """The launchers' side of the control contract: holds by owner; a wait ends when `in_flight` is 0."""

    def __init__(self) -> None:
        self.holds: dict[int, dict[str, dict[str, Any]]] = {0: {}, 1: {}}
        self.in_flight = {0: 0, 1: 0}
        self.calls: list[tuple[int, str, dict[str, Any]]] = []

    def client(self, paths: Paths, gpu: int) -> Launchers.Client:
        return self.Client(self, gpu)

    class Client:
        def __init__(self, launchers: Launchers, gpu: int) -> None:
            self.launchers, self.gpu = launchers, gpu

        def call(self, op: str, **args: Any) -> dict[str, Any]:
            self.launchers.calls.append((self.gpu, op, args))
            holds = self.launchers.holds[self.gpu]
            if op == "hold":
                holds[args["owner"]] = {"reason": args["reason"], "level": args["level"], "since": 1.0}
                if args["wait"] and self.launchers.in_flight[self.gpu]:
                    raise TimedOut(f"GPU {self.gpu}: still {self.launchers.in_flight[self.gpu]} in flight")
            elif op == "unhold":
                holds.pop(args["owner"], None)
            return {"ok": True, "state": {"holds": holds}}


@pytest.fixture
def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launchers:
    paths, launchers = Paths.under(tmp_path), Launchers()
    make_dirs(paths)
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    monkeypatch.setattr(drain_cli, "ControlClient", launchers.client)
    bind_slots(paths.gpus, UUIDS)
    paths.config.write_text("schema = 1\n")
    return launchers


@pytest.fixture
def paths(launchers: Launchers, tmp_path: Path) -> Paths:
    return Paths.under(tmp_path)


def test_drain_and_undrain_gpus(launchers: Launchers, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "1", "0", "1", "--reason", "replace fan", "--wait"]) == 0
    assert capsys.readouterr().out == "gpu 1: drained\ngpu 0: drained\n"
    assert launchers.holds[0]["operator"] == {"reason": "replace fan", "level": "drain", "since": 1.0}
    # All are asked before anybody is waited for.
    assert [(gpu, args["wait"]) for gpu, op, args in launchers.calls] == [(1, False), (0, False), (1, True), (0, True)]
    assert 0 < launchers.calls[-1][2]["timeout"] <= 600 and launchers.calls[-1][2]["mode"] == "graceful"
    launchers.holds[1]["watchdog"] = {"reason": "Xid 79", "level": "stop", "since": 2.0}
    assert main(["undrain", "0", "1"]) == 0
    assert capsys.readouterr().out == "gpu 0: back in service\ngpu 1: still held by watchdog\n"
    assert launchers.holds == {0: {}, 1: {"watchdog": {"reason": "Xid 79", "level": "stop", "since": 2.0}}}
    assert main(["undrain", "0"]) == 0
    assert capsys.readouterr().out == "gpu 0: was not drained\n"


def test_drain_levels_and_json(launchers: Launchers, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "0", "--reason", "swap", "--stop-engines", "--abort", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"] == [{"what": "gpu 0", "gpu": 0, "text": "draining"}]
    (_, op, args) = launchers.calls[0]
    assert (op, args["level"], args["mode"], args["wait"]) == ("hold", "stop", "abort", False)


def test_a_reason_that_is_replaced_is_said(
    launchers: Launchers, paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever drained it first had a reason, and would look for it."""
    holds = {"operator": {"level": "drain", "reason": "replace fan", "since": 1.0}}
    write_state(paths.holds(0), {"holds": holds, "shares": {}}, schema=1)
    assert main(["drain", "0", "1", "--reason", "again"]) == 0
    first = "gpu 0: draining; was drained already, for another reason: replace fan\n"
    assert capsys.readouterr().out == first + "gpu 1: draining\n"
    assert main(["drain", "0", "--reason", "again", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["former_reason"] == "replace fan"
    assert main(["drain", "0", "--reason", "replace fan"]) == 0
    paths.holds(0).write_text("garbage")  # its launcher says so
    assert main(["drain", "0", "--reason", "again"]) == 0
    assert capsys.readouterr().out == "gpu 0: draining\n" * 2
    assert main(["drain", "--all", "--reason", "kernel"]) == main(["drain", "--all", "--reason", "again"]) == 0
    assert "host: draining: /readyz answers 503; was drained already, for another reason: kernel" in (
        capsys.readouterr().out
    )


def test_a_full_disk_names_the_file(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("appliance.statefile.os.write", full)
        code = main(["drain", "--all", "--reason", "x"])
    err = capsys.readouterr().err
    assert code == 1 and f"No space left on device: {paths.host_drain}" in err and "df -h" in err


def test_a_wait_that_times_out_is_3_and_the_hold_stays(launchers: Launchers) -> None:
    launchers.in_flight[0] = 2
    assert main(["drain", "0", "--reason", "x", "--wait", "--timeout", "1"]) == 3
    assert "operator" in launchers.holds[0]


def test_all_that_timed_out_are_named(launchers: Launchers, capsys: pytest.CaptureFixture[str]) -> None:
    launchers.in_flight[0] = 2
    assert main(["drain", "0", "1", "--reason", "x", "--wait", "--timeout", "0.3"]) == 3
    err = capsys.readouterr().err
    assert "not drained within 0.3 s: GPU 0; drained: 1" in err
    launchers.in_flight[1] = 1
    assert main(["drain", "0", "1", "--reason", "x", "--wait", "--timeout", "0.3"]) == 3
    assert "not drained within 0.3 s: GPU 0, 1\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["drain", "--reason", "x"], "name GPU slots, or --all"),
        (["drain", "0", "--all", "--reason", "x"], "name GPU slots, or --all"),
        (["drain", "0"], "--reason"),
        (["drain", "0", "--reason", "  "], "1 to 500 characters"),
        (["drain", "0", "--reason", "x" * 501], "1 to 500 characters"),
        (["drain", "7", "--reason", "x"], "no GPU slot 7; bound: 0, 1"),
        (["drain", "-1", "--reason", "x"], "-1"),
        (["drain", "²", "--reason", "x"], "no GPU slot number"),
        (["drain", "--all", "--reason", "x", "--abort"], "are for GPUs"),
        (["drain", "0", "--reason", "x", "--timeout", "nan"], "not a number of seconds"),
        (["undrain"], "name GPU slots, or --all"),
    ],
)
def test_what_makes_no_sense_is_2(
    launchers: Launchers, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert code == 2 and words in capsys.readouterr().err and launchers.calls == []


def test_a_reason_cannot_drive_terminals(launchers: Launchers) -> None:
    main(["drain", "0", "--reason", "a\x1b[2J\nb"])
    assert launchers.holds[0]["operator"]["reason"] == "a\\x1b[2J\\nb"


def test_drain_of_the_host(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "--all", "--reason", "kernel", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["results"][0]
    state = read_state(paths.host_drain, schema=1)
    assert state is not None and state["reason"] == "kernel" and abs(state["since"] - time.time()) < 30
    assert first["changed"] is True and first["since"] == state["since"]
    assert main(["drain", "--all", "--reason", "kernel 2", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["results"][0]
    assert again["changed"] is False and again["since"] == state["since"]  # since the first time
    assert (read_state(paths.host_drain, schema=1) or {})["reason"] == "kernel 2"
    assert main(["undrain", "--all"]) == 0 and not paths.host_drain.exists()
    assert main(["undrain", "--all"]) == 0
    assert capsys.readouterr().out == "host: back in service\nhost: was not drained\n"
    assert [event["event"] for event in read_events(paths.events)] == ["host-drain", "host-drain", "host-undrain"]


class Load:
    """A gateway's answer that changes with time: busy until `seconds` after its start."""

    def __init__(self, seconds: float, **fields: Any) -> None:
        self.until, self.fields = time.monotonic() + seconds, fields
        self.asked = threading.Event()

    def __call__(self) -> dict[str, Any]:
        self.asked.set()
        busy = time.monotonic() < self.until
        return {"in_flight": 2 if busy else 0, "waiting": 0} | (self.fields if busy else {})


WAIT = ["drain", "--all", "--reason", "x", "--wait", "--settle", "0.3"]


@pytest.mark.parametrize("fields", [{}, {"in_flight": 0, "waiting": 3}, {"in_flight": "?"}])
def test_the_wait_ends_when_nothing_is_in_flight(
    paths: Paths, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(0.6, **fields)
    with gateway(paths, "stable", load), gateway(paths, "canary", lambda: {"in_flight": 0, "waiting": 0}):
        assert main(WAIT) == 0
    assert time.monotonic() >= load.until + 0.3  # idle, and for long enough
    assert capsys.readouterr().out == "host: drained, nothing in flight\n"


def test_the_wait_times_out_with_3_and_says_on_what(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    with gateway(paths, "stable", Load(60)):
        assert main([*WAIT, "--timeout", "0.5"]) == 3
    error = capsys.readouterr().err
    assert "gateway stable: 2 in flight, 0 waiting" in error and "the drain stays" in error
    assert paths.host_drain.exists()
    with gateway(paths, "canary", lambda: b"nonsense"):
        assert main([*WAIT, "--timeout", "0.3"]) == 3  # a gateway that makes no sense is not idle


def test_gateways_that_do_not_run_have_nothing_in_flight(paths: Paths) -> None:
    assert main([*WAIT[:-1], "0"]) == 0


def test_without_an_installation_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path / "bare"))
    assert main(["drain", "--all", "--reason", "x"]) == 1
    assert "is the appliance installed on this host?" in capsys.readouterr().err


# -- start, stop, restart


def service(verb: str, gpus: list[int], answers: dict[str, Any], **given: Any) -> tuple[Commands, int]:
    commands = Commands(answers)
    args = {"command": verb, "gpus": gpus, "no_block": False, "timeout": 900.0, "json": False} | given
    return commands, service_cli.run(argparse.Namespace(**args), commands)


def test_systemctl_gets_our_units(launchers: Launchers, capsys: pytest.CaptureFixture[str]) -> None:
    commands, code = service("restart", [1, 0, 1], {"systemctl": ""})
    units = ["appliance-gpu@1.service", "appliance-gpu@0.service"]
    assert code == 0 and commands.calls == [
        ["systemctl", "reset-failed", "--", *units],  # else the sixth restart within five minutes is refused
        ["systemctl", "restart", "--", *units],
    ]
    commands, _ = service("start", [], {"systemctl": ""}, no_block=True)
    parts = ["appliance-gpu@0.service", "appliance-gpu@1.service", "appliance-gateway@stable.service"]
    parts += ["appliance-gateway@canary.service", "appliance-watchdog.service"]
    start = ["systemctl", "start", "--no-block", "--"]
    assert commands.calls[1:] == [[*start, "appliance.target"], [*start, *parts]]
    assert "restarted" in capsys.readouterr().out
    parts = "appliance-gpu@1.service appliance-gateway@stable.service\n"
    commands, _ = service("stop", [], {"systemctl show": parts, "systemctl stop": ""})
    assert commands.calls[-1] == ["systemctl", "stop", "--", "appliance.target", *sorted(parts.split())]
    commands, _ = service("stop", [0], {"systemctl stop": ""})
    assert commands.calls == [["systemctl", "stop", "--", "appliance-gpu@0.service"]]
    with pytest.raises(UsageError, match="no GPU slot 5; bound: 0, 1"):
        service("stop", [5], {"systemctl": ""})


@pytest.mark.parametrize(
    "result, code, words",
    [
        (Result(("systemctl",), 1, b"", b"Job for appliance-gpu@0.service failed.\n"), 1, "systemctl status"),
        (Result(("systemctl",), -9, b"", b"", timed_out=True), 3, "appliance status"),
        (Result(("systemctl",), 4, b"", b"Interactive authentication required.\n"), 4, "run as root"),
        (
            Result(
                ("systemctl",),
                4,
                b"",
                b"Failed to stop a.service: Access denied\nSee system logs and 'systemctl status "
                b"appliance-watchdog.service' for details.\n",
            ),
            4,
            "run as root",
        ),
        (Result(("systemctl",), 5, b"", b"Unit appliance-gpu@0.service not found.\n"), 1, "installed here"),
    ],
)
def test_failures_say_what_to_do(launchers: Launchers, result: Result, code: int, words: str) -> None:
    with pytest.raises(ApplianceError) as caught:
        service("start", [0], {"systemctl reset-failed": "", "systemctl": result})
    assert caught.value.exit_code == code and words in str(caught.value.hint)


def test_each_command_helps_with_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    helps = {}
    for name in ("drain", "undrain"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        helps[name] = capsys.readouterr().out
    assert "appliance drain 3 --reason" in helps["drain"] and "--abort" in helps["drain"]
    assert "appliance undrain 3 --wait" in helps["undrain"] and "appliance drain" not in helps["undrain"]
    assert "the drain stays" not in helps["undrain"]

"""`appliance status` and `list`: what they say of hosts in every state, on terminals, pipes and as JSON."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from host_trees import UUIDS, add_launcher, add_release, gateway, make_dirs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appliance import status_cli
from appliance.cli import main
from appliance.gpus import bind_slots
from appliance.paths import Paths
from appliance.statefile import write_state
from appliance.status import read_status
from appliance.terminal import age, binary_bytes, cut, table
from engine.spawn import python_env, python_module

READY: dict[str, Any] = {
    "status": "ready",
    "reason": None,
    "slot": "stable",
    "release": "a",
    "in_flight": 4,
    "waiting": 1,
}
READY["gpus"] = [
    {"gpu": 0, "engines": [{"release": "a", "in_flight": 3}]},
    {"gpu": 1, "engines": [{"release": "a", "in_flight": 1}]},
]
EMPTY = {"status": "no_release", "reason": "no release in slot canary", "in_flight": 0, "waiting": 0, "gpus": []}


class Screen(io.StringIO):
    """A terminal as far as anybody can ask."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Two GPUs that serve release a."""
    paths = Paths.under(tmp_path)
    make_dirs(paths)
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    monkeypatch.delenv("NO_COLOR", raising=False)
    bind_slots(paths.gpus, UUIDS)
    add_release(paths, "a", slot="stable")
    for gpu in (0, 1):
        add_launcher(tmp_path, paths, gpu)
    return paths


def status(paths: Paths, stable: Any = READY, canary: Any = EMPTY) -> dict[str, Any]:
    with gateway(paths, "stable", lambda: stable), gateway(paths, "canary", lambda: canary):
        return read_status(paths, paths.etc.parents[1])


def test_all_serves(paths: Paths) -> None:
    document = status(paths)
    assert document["ok"] and document["problems"] == [] and document["schema"] == 1
    assert document["slots"] == {"stable": "a", "canary": None}
    gpu = document["gpus"][0]
    assert (gpu["gpu"], gpu["uuid"], gpu["state"], gpu["holds"]) == (0, UUIDS[0], "serving", [])
    engine = gpu["engines"][0]
    assert (engine["release"], engine["state"], engine["restarts"], engine["in_flight"]) == ("a", "ready", 2, 3)
    assert engine["memory"] == {"bytes": 1610612736, "max_bytes": 25769803776, "oom_kills": 1}
    assert [(g["slot"], g["up"], g["in_flight"]) for g in document["gateways"]] == [
        ("stable", True, 4),
        ("canary", True, 0),
    ]
    json.dumps(document)


def test_a_held_gpu_says_by_whom_why_and_since(paths: Paths) -> None:
    hold = {"level": "drain", "reason": "replace fan", "since": time.time() - 7325}
    add_launcher(paths.etc.parents[1], paths, 1, holds={"operator": hold}, admitted=False)
    document = status(paths)
    assert document["gpus"][1]["state"] == "held" and document["problems"] == ["gpu 1 is held by operator: replace fan"]
    lines = list(status_cli.screen(document, io.StringIO()))
    assert any("held by operator for 2h02m (drained): replace fan" in line for line in lines)
    rows = status_cli.list_rows(document, drained=True)
    assert len(rows) == 2 and rows[1][:3] == ["1", UUIDS[1], "held"] and "2h02m: replace fan" in rows[1][-1]


def test_holds_are_shown_while_the_launcher_is_down(paths: Paths) -> None:
    paths.launcher_state(1).unlink()
    hold = {"level": "stop", "reason": "Xid 79", "since": 1.0}
    write_state(paths.holds(1), {"holds": {"watchdog": hold}}, schema=1)
    document = status(paths)
    assert document["gpus"][1]["state"] == "down" and document["gpus"][1]["holds"][0]["reason"] == "Xid 79"
    assert document["problems"] == [
        "gpu 1: its launcher is not running: `appliance start 1`; "
        "`systemctl status appliance-gpu@1` says why it stopped"
    ]


def test_a_state_file_of_a_dead_launcher_is_not_believed(paths: Paths) -> None:
    (paths.etc.parents[1] / "proc/1000/comm").unlink()
    (paths.etc.parents[1] / "proc/1000").rmdir()
    gpu = status(paths)["gpus"][0]
    assert (gpu["state"], gpu["engines"], gpu["launcher"]["running"]) == ("down", [], False)


def test_engines_that_do_not_serve(paths: Paths) -> None:
    root = paths.etc.parents[1]
    engine = {"release": "a", "state": "loading", "admitted": False, "progress": 0.42, "restarts": 0, "since": 1.0}
    add_launcher(root, paths, 0, engines=[engine], status="loading a, 42 %")
    add_launcher(root, paths, 1, engines=[engine | {"state": "failed", "last_exit": "exit code 4"}], status="a gave up")
    document = status(paths)
    assert [gpu["state"] for gpu in document["gpus"]] == ["starting", "failed"]
    assert document["problems"] == ["gpu 0 does not serve a: loading a, 42 %", "gpu 1 does not serve a: a gave up"]
    text = "\n".join(status_cli.screen(document, io.StringIO()))
    assert "loading 42 %" in text and "last exit: exit code 4" in text


def test_gateways_that_are_down_confused_or_not_ready(paths: Paths) -> None:
    document = read_status(paths, paths.etc.parents[1])
    assert document["problems"] == ["gateway stable is not running", "gateway canary is not running"]
    assert document["gpus"][0]["engines"][0]["in_flight"] is None  # unknown, not 0
    for nonsense in (b"no json", b"[]", b"x" * (5 << 20)):
        document = status(paths, stable=nonsense)
        assert document["problems"][0].startswith("gateway stable: ") and len(document["problems"]) == 1
    document = status(paths, stable=READY | {"in_flight": "many", "gpus": [{"gpu": 0, "engines": [{"release": "a"}]}]})
    assert document["gateways"][0]["in_flight"] is None and document["gpus"][0]["engines"][0]["in_flight"] is None
    document = status(paths, stable=READY | {"status": "no_engine", "reason": "no engine yet"})
    assert document["problems"] == ["gateway stable is not ready: no engine yet"]


def test_a_gateway_without_a_release_is_idle_and_not_broken(paths: Paths) -> None:
    document = status(paths, stable=READY, canary=READY | {"status": "no_release", "reason": "no release is set"})
    lines = "\n".join(status_cli.screen(document, io.StringIO())).splitlines()
    assert "gateway canary  no release" in "\n".join(lines) and "canary" not in " ".join(document["problems"])


def test_a_drained_host(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    write_state(paths.host_drain, {"reason": "kernel", "since": time.time() - 61}, schema=1)
    document = status(paths, stable=READY | {"status": "drained"})
    assert document["problems"] == ["the host is drained: kernel"]
    assert "drained for 1m01s: kernel" in "\n".join(status_cli.screen(document, io.StringIO()))
    for drained in (False, True):  # "serving" alone would mislead
        status_cli.print_list(document, drained=drained)
        assert capsys.readouterr().out.endswith("the host is drained for 1m01s: kernel\n")


def test_damaged_files_are_problems_not_crashes(paths: Paths) -> None:
    paths.launcher_state(0).write_text("{")
    assert status(paths)["problems"][0].startswith(f"gpu 0: {paths.launcher_state(0)} is not JSON")
    for value in ([], "x", {"e": 1}, [1, {"state": 3}], None):
        add_launcher(paths.etc.parents[1], paths, 0, engines=value, holds=value, status=value)
        list(status_cli.screen(status(paths), io.StringIO()))
    paths.gpus.write_text("[]")
    assert any("gpus.json holds no JSON object" in problem for problem in status(paths)["problems"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
STATE_KEYS = ["pid", "holds", "engines", "status", "since"]
ENGINE_KEYS = ["release", "state", "admitted", "restarts", "last_exit", "progress", "retry_at", "since", "pid"]


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.sampled_from(STATE_KEYS), json_values),
    st.dictionaries(st.sampled_from(ENGINE_KEYS), json_values),
    st.dictionaries(st.sampled_from(["status", "in_flight", "waiting", "gpus", "reason"]), json_values),
)
@example({}, {"release": [], "state": None, "admitted": True}, {})
def test_any_state_of_others_is_shown(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], engine: dict[str, Any], answer: dict[str, Any]
) -> None:
    """Launchers and gateways of another version may say anything."""
    root = tmp_path_factory.getbasetemp() / "any"
    paths = Paths.under(root)
    make_dirs(paths)
    if not paths.gpus.exists():
        bind_slots(paths.gpus, UUIDS)
    document: dict[str, Any] = {"pid": 1000, "engines": [engine]} | state
    paths.gpu_run(0).mkdir(exist_ok=True)
    (root / "proc/1000").mkdir(parents=True, exist_ok=True)
    paths.launcher_state(0).write_text(json.dumps({"schema": 1} | document))
    with gateway(paths, "stable", lambda: answer):
        found = read_status(paths, root)
    for out in (io.StringIO(), Screen()):
        assert "\n".join(status_cli.screen(found, out))
    assert status_cli.list_rows(found, drained=False)


@pytest.mark.parametrize("columns", [24, 40, 80, 132])
def test_it_fits_the_terminal(paths: Paths, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    hold = {"level": "drain", "reason": "fan 扇 " * 30 + "\x1b[2J", "since": 1.0}
    add_launcher(paths.etc.parents[1], paths, 1, holds={"operator": hold})
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    document = status(paths)
    lines = list(status_cli.screen(document, Screen()))
    plain = [line.replace("\x1b[0m", "") for line in lines]
    for code in ("31", "32", "33", "2"):
        plain = [line.replace(f"\x1b[{code}m", "") for line in plain]
    assert all("\x1b" not in line for line in plain)  # the reason cannot drive the terminal
    assert max(sum(2 if char == "扇" else 1 for char in line) for line in plain) <= columns


def test_colour_and_icons_are_for_terminals_only(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    document = status(paths)
    assert "\x1b[32m●\x1b[0m" in "\n".join(status_cli.screen(document, Screen()))
    piped = "\n".join(status_cli.screen(document, io.StringIO()))
    assert piped.isascii() and "gpu 0  serving" in piped
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert "\n".join(status_cli.screen(document, Screen())).isascii()


def test_commands_and_exit_codes(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 1  # launchers of the fixture are no processes of this machine
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["status"]) == 1 and "! gateway stable is not running" in capsys.readouterr().out
    assert (
        main(["list"]) == 0
        and capsys.readouterr().out.splitlines()[0].split()
        == status_cli.list_rows({"gpus": [], "ts": 0}, drained=False)[0]
    )
    assert main(["list", "--drained", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == []
    assert main(["list", "--drained"]) == 0 and capsys.readouterr().out == "no GPU is held\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_watch_into_a_pipe_appends_and_ends_with_its_interrupt(paths: Paths, as_json: bool) -> None:
    command = [*python_module("appliance"), "status", "--watch", "0.2", *(["--json"] if as_json else [])]
    env = python_env() | {"APPLIANCE_ROOT": os.environ["APPLIANCE_ROOT"]}

    def interruptible() -> None:  # who runs us in the background (sh, nohup) has it ignored, and children inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=interruptible
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        seen = ""
        for line in watching.stdout:
            seen += line
            if (seen.count('"gateways": [') if as_json else seen.count("--- 20")) == 3:
                break
        watching.send_signal(signal.SIGINT)
        seen += watching.stdout.read()
        assert watching.wait(20) == 0  # two GPUs are down: that is what is shown, and no error of the watching
    if as_json:
        first, _ = json.JSONDecoder().raw_decode(seen)
        assert first["schema"] == 1 and first["problems"]
    else:
        assert seen.count("! gateway stable is not running") >= 2 and "\x1b" not in seen


SAID = {"run": "34", "phase": "step", "weight": 50.0, "rule": 50.0}
RUN = {"id": "34", "release": "b", "stable": "a", "phase": "step", "stage": "observe", "weight": 50.0, "paused": None}


def test_a_canary_run_is_shown_and_nobody_controlling_it_is_a_problem(paths: Paths) -> None:
    """With half of the connections on it, a controller that crashes in a loop is nothing that "serves"."""
    assert status(paths)["canary"] is None
    write_state(paths.canary_run, RUN, schema=1)
    write_state(paths.canary_alive, SAID | {"at": time.time()}, schema=1)
    document = status(paths)
    assert document["ok"] and document["canary"]["on"] and document["canary"]["controller"]["alive"]
    shown = "\n".join(status_cli.screen(document, io.StringIO()))
    assert "canary run 34 of b against a: step, 50 % of new connections" in shown
    for said in ({"at": time.time() - 60}, None):
        write_state(paths.canary_alive, said, schema=1) if said else paths.canary_alive.unlink()
        document = status(paths)
        assert not document["ok"] and "canary rollback" in document["problems"][0]
    write_state(paths.canary_run, RUN | {"phase": "settled"}, schema=1)
    assert status(paths)["ok"]  # no run is on: nothing depends on it
    paths.canary_run.write_text("{]")
    assert any("canary.json" in problem for problem in status(paths)["problems"])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"rule": 0.0}, "step, set 50 %, rule 0 % of new connections"),
        ({"rule": None}, "step, set 50 %, rule unknown"),
        ({"phase": "rolling_back", "rule": 0.0}, "rolling back, rule 0 % of new connections"),  # not saved: full disk
        ({"run": "33", "rule": 5.0}, "step, set 50 %, rule unknown"),
        ({"at": 0.0}, "step, set 50 %, rule unknown; its controller does not run"),
        ({"phase": 7, "weight": True}, "step, set 50 %, rule unknown"),
    ],
)
def test_the_weight_shown_is_what_the_rule_gives(paths: Paths, said: dict[str, object], words: str) -> None:
    write_state(paths.canary_run, RUN, schema=1)
    write_state(paths.canary_alive, {"at": time.time()} | SAID | said, schema=1)
    shown = "\n".join(status_cli.screen(status(paths), io.StringIO()))
    assert f"canary run 34 of b against a: {words}" in shown


def test_a_run_that_is_over_is_not_what_its_controller_said_before(paths: Paths) -> None:
    write_state(paths.canary_run, RUN | {"phase": "settled", "weight": 0.0}, schema=1)
    write_state(paths.canary_alive, SAID | {"at": time.time()}, schema=1)
    shown = status(paths)["canary"]
    assert (shown["phase"], shown["weight"], shown["rule"]) == ("settled", 0.0, None)


def test_a_watchdog_that_ended_is_a_problem(paths: Paths) -> None:
    (paths.etc.parents[1] / "proc/77").mkdir(parents=True)
    write_state(paths.watchdog_state, {"pid": 77}, schema=1)
    assert status(paths)["watchdog"] == {"pid": 77, "running": True} and status(paths)["ok"]
    write_state(paths.watchdog_state, {"pid": 78}, schema=1)
    assert "the watchdog does not run" in status(paths)["problems"][0]


def test_numbers_for_people() -> None:
    assert [age(s) for s in (-5, 0, 59.9, 60, 3599, 3600, 86399, 86400, 900000)] == [
        "0s", "0s", "59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d00h", "10d10h",
    ]  # fmt: skip
    assert [binary_bytes(n) for n in (0, 1023, 1024, 1536, 150 << 20, 1610612736, 3 << 40)] == [
        "0B", "1023B", "1.0K", "1.5K", "150M", "1.5G", "3.0T",
    ]  # fmt: skip


@given(st.text(), st.integers(0, 30))
def test_cut_text_fits(text: str, width: int) -> None:
    assert sum(2 if ord(c) >= 0x1100 else 1 for c in cut(text, width) if c.isascii()) <= width
    assert cut("abcdef", 4) == "abc…" and cut("扇扇扇", 4) == "扇…" and cut("a\nb", 10) == "a\\nb"


def test_tables_stack_where_they_do_not_fit() -> None:
    rows = [["GPU", "UUID", "NOTE"], ["0", "GPU-5fd4f087", "long " * 10]]
    assert next(table(rows, 200)) == "GPU  UUID          NOTE"
    assert all(len(line) <= 40 for line in table(rows, 40))
    assert list(table(rows, 20)) == ["gpu: 0", "  uuid: GPU-5fd4f087", "  note: long long l…"]

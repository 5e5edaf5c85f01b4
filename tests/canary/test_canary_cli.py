"""The `canary` command as people and scripts use it: exit codes, JSON, views; and a rollback when nobody is there."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from appliance.canary_guard import refuse_during_run
from appliance.events import append_event
from appliance.log import ApplianceError, BusyError
from appliance.releases import ReleaseStore
from appliance.slots import pointer
from canary import asking, rollback_cli, rules_cli, status_cli
from canary.cli import COMMANDS, main
from canary.run import Phase
from canary.store import Store
from tests.canary.processes import ControllerProcess
from tests.canary.stand_ins import make_parts
from tests.canary.test_life import check_rolled_back, wait_for
from tests.canary.test_machine import make
from tests.canary.test_preflight import add_renamed
from tests.canary.world import QUICK, World

QUICK_OPTIONS = [
    "--steps", "10,100", "--step-time", "50ms", "--interval", "50ms", "--warmup", "0s", "--settle", "50ms",
    "--cooldown", "0s", "--deadline", "30s",
]  # fmt: skip


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the command works on the rules itself it gets the file instead of netfilter."""
    for module in (rollback_cli, rules_cli, status_cli):
        monkeypatch.setattr(module, "real_parts", make_parts)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    """(exit code, the JSON document, stderr) of `canary ... --json`."""
    capsys.readouterr()
    try:
        code = main([*arguments, "--json"])
    except SystemExit as error:
        code = int(error.code or 0)
    out = capsys.readouterr()
    return code, json.loads(out.out) if out.out else None, out.err


def text(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(list(arguments))
    return code, capsys.readouterr().out


@pytest.mark.parametrize("name", [one.name for one in COMMANDS])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0 and f"usage: canary {name}" in capsys.readouterr().out


def test_a_run_from_start_to_end(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with ControllerProcess(world.paths) as controller:
        controller.call("status")
        code, checked, _ = command(capsys, "check", "v2")
        assert code == 0 and checked["passed"] and {c["status"] for c in checked["checks"]} == {"ok"}
        code, document, _ = command(capsys, "start", "v2", *QUICK_OPTIONS, "--wait", "--timeout", "30s")
        assert (code, document["run"]["phase"]) == (0, "settled")
        code, shown = text(capsys, "status")
        assert code == 0 and "v2 (canary) vs v1 (stable)" in shown and "settled" in shown and "canary undo" in shown
        assert "[10% ✔][100% ✔]" in shown
        code, listed, _ = command(capsys, "list")
        assert [(run["id"], run["phase"]) for run in listed["runs"]] == [("1", "settled")]
        assert "settled" in text(capsys, "list")[1]
        assert "looks" in text(capsys, "explain", "1")[1]
        assert "committed" in text(capsys, "events", "1")[1]
        code, document, _ = command(capsys, "undo", "--wait", "--timeout", "30s")
        assert code == 0 and document["run"]["id"] == "2"
    assert pointer(world.paths, "stable") == "v1"


def test_exit_codes_of_refusals(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "status")[0] == 1  # no run yet
    assert command(capsys, "rollback")[0] == 4
    assert command(capsys, "start", "v2")[0] == 1  # no controller
    for wrong in (
        ("start",), ("start", "v2", "--limit", "itl"), ("start", "v2", "--steps", "a"), ("weight", "101"),
        ("start", "v2", "--error-rate", "2"), ("start", "v2", "--no-itl", "--limit", "itl=1s"),
        ("pause", "x"), ("start", "v2", "--step-time", "5 minutes"),
    ):  # fmt: skip
        assert command(capsys, *wrong)[0] == 2, wrong
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        controller.call("status")
        code, document, _ = command(capsys, "start", "nosuch")
        assert code == 4 and document["error"]["message"].count("no release") == 1
        code, _, err = command(capsys, "start", "v2", "--policy", str(world.paths.state))
        assert code == 2 and "a file of TOML" in err
        assert command(capsys, "start", "v2", "--min-requests", "1" + 12 * "0")[0] == 2
        assert command(capsys, "start", "v1")[0] == 4
        assert command(capsys, "start", "v2", "--steps", "50,10")[0] == 2
        assert command(capsys, "start", "v2", *QUICK_OPTIONS, "--step-time", "1h")[0] == 0
        code, document, _ = command(capsys, "start", "v2", *QUICK_OPTIONS)
        assert code == 5 and "no run is on" not in document["error"]["message"]
        wait_for(world, lambda run: run.stage == "observe")
        code, document, _ = command(capsys, "undo")
        assert code == 5 and "canary rollback 1" in document["error"]["hint"]
        with pytest.raises(ApplianceError) as refused:
            ReleaseStore(world.paths).remove("v2")
        assert refused.value.exit_code == 4 and "canary rollback 1" in str(refused.value.hint)
        assert command(capsys, "pause", "7")[0] == 4  # pinned to another run
        assert command(capsys, "pause")[0] == 0
        code, document, _ = command(capsys, "status", "--wait")
        assert code == 3 and document["run"]["paused"] == "by hand"
        assert command(capsys, "promote", "--full")[0] == 2  # wants --confirm
        assert command(capsys, "resume")[0] == 0
        for weight in ("7", "3"):
            code, document, _ = command(capsys, "weight", weight)
            assert code == 0 and document["run"]["paused"].startswith(f"weight {weight} set by ")
        assert world.rules.read().weight == 3
        code, document, _ = command(capsys, "rollback", "--reason", "enough", "--kill", "--wait")
        assert code == 0 and document["run"]["phase"] == "aborted"
        code, document, _ = command(capsys, "rollback")  # what it asks for is so already
        assert code == 0 and document["run"]["phase"] == "aborted"
        code, shown = text(capsys, "rollback")
        assert code == 0 and "run 1 is over: rolled back" in shown and "stable is v1; nothing to do" in shown
        assert command(capsys, "resume")[0] == 4
    check_rolled_back(world)


def test_another_model_name_is_refused_unless_it_is_meant(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    add_renamed(world)
    with ControllerProcess(world.paths) as controller:
        controller.call("status")
        code, document, _ = command(capsys, "start", "renamed", *QUICK_OPTIONS)
        assert code == 4 and "gets 404" in document["error"]["message"]
        code, shown = text(capsys, "check", "renamed")
        assert code == 4 and "refused  model name clients call v1 'tiny'" in shown and "--model-name tiny" in shown
        found = command(capsys, "check", "renamed", "--other-model-name")[1]["checks"]
        assert [check["status"] for check in found if check["name"] == "model name"] == ["warn"]


def test_no_itl_takes_the_limit_out_of_whichever_policy(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    limits = [{"metric": "itl", "seconds": 0.08}, {"metric": "request", "seconds": 5.0}]
    tables = "".join(f'[[policy.limits]]\nmetric = "{x["metric"]}"\nseconds = {x["seconds"]}\n' for x in limits)
    with ControllerProcess(world.paths) as controller:
        controller.call("status")
        assert command(capsys, "check", "v2", "--no-itl")[1]["policy"]["limits"] == []
        world.paths.canary_config.write_text(tables)
        for options, metrics in (([], ["itl", "request"]), (["--no-itl"], ["request"])):
            policy = command(capsys, "check", "v2", *options)[1]["policy"]
            assert [limit["metric"] for limit in policy["limits"]] == metrics


@pytest.mark.parametrize("stage", ["observe", "verify"])
def test_rollback_with_the_controller_down(world: World, capsys: pytest.CaptureFixture[str], stage: str) -> None:
    """Killed, and nobody starts it again: the command does all of its work."""
    kill_in(world, stage)
    assert world.rules.read().weight == 10  # a dead controller moves no connection
    code, document, err = command(capsys, "rollback", "--reason", "by night", "--drain", "1s")
    assert code == 0 and (document["run"]["phase"], document["run"]["reason"]) == ("aborted", "by night")
    assert "rolling back from here" in err
    check_rolled_back(world)


def kill_in(world: World, stage: str) -> None:
    world.script.set(verdict="inconclusive" if stage == "observe" else "pass")
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK | {"step_seconds": 60.0 if stage == "observe" else 0.05})
        wait_for(world, lambda run: run.stage == stage and world.rules.read().weight == 10)
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()


def test_rollback_with_a_controller_that_hangs(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped (SIGSTOP), so it holds the lock and says nothing: the rule is 0 all the same, and it does the rest once
    it is back."""
    monkeypatch.setattr(rollback_cli, "_ANSWER_SECONDS", 0.3)
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK | {"step_seconds": 60.0})
        wait_for(world, lambda run: run.stage == "observe" and world.rules.read().weight == 10)
        os.kill(controller.pid, signal.SIGSTOP)
        code = main(["rollback", "--drain", "0s"])
        out = capsys.readouterr()
        assert code == 0 and "does not answer" in out.err
        assert world.rules.read().weight == 0
        os.kill(controller.pid, signal.SIGCONT)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "aborted"
    check_rolled_back(world)


def test_the_wish_to_abort_waits_for_the_next_controller(world: World) -> None:
    kill_in(world, "observe")
    from canary.store import AbortWish

    Store(world.paths).wish_abort(AbortWish("1", "left on disk", "me", 0.0))
    with ControllerProcess(world.paths) as controller:
        run = controller.run_to_end()
    assert run is not None and (run["phase"], run["reason"]) == ("aborted", "left on disk")
    assert world.rules.history()[-1] == 0 and 100 not in world.rules.history()
    check_rolled_back(world)


def test_watch_in_a_pipe_prints_changes_only_and_ends_with_the_run(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK | {"step_seconds": 0.3})
        code, out = text(capsys, "status", "--watch")
    lines = out.splitlines()
    assert code == 0 and "settled" in lines[-1] and "\x1b" not in out
    assert all(before != after for before, after in pairwise(lines))


def test_events_follow_prints_json_lines(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    lines: list[str] = []
    from canary.history_cli import Follower

    world.paths.events.touch()
    follower = Follower(world.paths.events)
    seen: list[str] = []
    stop = threading.Event()

    def follow() -> None:
        while not stop.is_set():
            seen.extend(event["event"] for event in follower.new())
            time.sleep(0.01)

    thread = threading.Thread(target=follow)
    thread.start()
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK)
        controller.run_to_end()
        # The log is rotated in the middle of it.
        os.replace(world.paths.events, world.paths.events.with_name("events.jsonl.1"))
        controller.call("undo")
        wait_for(world, lambda run: run.id == "2" and run.over)
    time.sleep(0.2)
    stop.set()
    thread.join()
    canary = [event for event in seen if event.startswith("canary_")]
    assert canary.count("canary_settled") == 2 and canary[0] == "canary_created"
    code = main(["events", "--json", "-n", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and [json.loads(line)["event"] for line in lines][-1] == "canary_settled"


def test_people_see_twelve_digits_of_a_digest_and_programs_all(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = "0123456789ab" + 52 * "c"
    reason = f"answer {digest} instead of {digest}"
    Store(world.paths).save(make(phase=Phase.FAILED, reason=reason))
    append_event(world.paths.events, "canary_failed", run="1", reason=reason)
    for verb in ("list", "events"):
        shown = text(capsys, verb)[1]
        assert "0123456789ab" in shown and "abcc" not in shown
        assert main([verb, "--json"]) == 0 and reason in capsys.readouterr().out


def test_cleanup_and_rules_without_a_controller(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.rules.set_weight("9", 25.0)
    code, rules, _ = command(capsys, "rules")
    assert code == 0 and rules["weight"] == 25
    code, done, _ = command(capsys, "cleanup")
    assert code == 0 and "25 %" in done["done"][0]
    assert world.rules.read().weight == 0


def test_a_rule_that_somebody_left_is_zeroed_when_the_controller_starts(world: World) -> None:
    world.rules.set_weight("9", 25.0)
    with ControllerProcess(world.paths) as controller:
        controller.call("status")
        deadline = time.monotonic() + 10
        while world.rules.read().weight != 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_broken_canary_toml_keeps_nobody_from_going_back(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """undo and retry take the earlier run's policy and hooks; what needs the file is refused with its fault."""
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK)
        controller.run_to_end()
        world.paths.canary_config.write_text("[policy\n")
        code, document, _ = command(capsys, "start", "v1")
        assert code == 4 and "canary.toml" in document["error"]["message"]
        code, document, err = command(capsys, "undo", "--wait", "--timeout", "30s")
        assert code == 0 and document["run"]["phase"] == "settled" and "warning:" in err and "canary.toml" in err
        world.script.set(verdict="fail")
        world.paths.canary_config.unlink()
        controller.call("start", release="v2", policy=QUICK)
        wait_for(world, lambda run: run.id == "3" and run.over)
        world.paths.canary_config.write_text("[policy\n")
        assert command(capsys, "retry")[0] == 0
        wait_for(world, lambda run: run.id == "4" and run.over)
    assert pointer(world.paths, "stable") == "v1"


def test_a_dry_run_gets_no_weight_by_hand(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK | {"step_seconds": 60.0}, dry_run=True)
        wait_for(world, lambda run: run.stage == "observe")
        code, document, _ = command(capsys, "weight", "5")
        assert code == 4 and "dry run" in document["error"]["message"]
        controller.call("rollback", reason="done", drain=0.0)
        controller.run_to_end()
    assert set(world.rules.history()) == {0}


def test_ctrl_c_ends_the_waiting_and_says_that_the_run_goes_on(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        controller.call("status")
        monkeypatch.setattr(asking.time, "sleep", interrupted)
        code, _, err = command(capsys, "start", "v2", *QUICK_OPTIONS, "--step-time", "1h", "--wait")
        monkeypatch.undo()
        assert code == 130 and "run 1 goes on" in err and "canary rollback 1" in err and "half done" not in err
        assert controller.call("status")["run"]["phase"] not in ("aborted", "failed", "settled")


def test_the_way_back_in_the_bake_is_what_the_hints_say(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK | {"settle_seconds": 600.0})
        wait_for(world, lambda run: run.stage == "bake")
        assert "canary rollback 1 takes v2 back" in text(capsys, "status")[1]
        code, document, _ = command(capsys, "start", "v1")
        assert code == 5 and "canary rollback 1" in document["error"]["hint"]
        with pytest.raises(BusyError) as refused:
            refuse_during_run(world.paths, "`release use`")
        assert "canary undo" in str(refused.value.hint)
        code, out = text(capsys, "undo")
        assert code == 0 and "v2 is taken back, v1 serves again" in out
        controller.run_to_end()
        assert text(capsys, "list")[1].count("after its promotion: undo") == 1
        code, document, _ = command(capsys, "rollback")
        assert code == 0 and document["run"]["reverted"]
    check_rolled_back(world)


def test_it_is_taken_back_in_the_bake_with_the_controller_down(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK | {"settle_seconds": 600.0})
        wait_for(world, lambda run: run.stage == "bake")
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
    code, document, err = command(capsys, "rollback", "--reason", "slow", "--drain", "1s")
    assert code == 0 and (document["run"]["phase"], document["run"]["reverted"]) == ("aborted", True)
    assert "rolling back from here" in err
    check_rolled_back(world)


def test_drain_says_what_is_in_work_now_and_waits_for_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Of this run, in any phase; what the run before left behind is not shown."""
    world.gateways["canary"].in_flight["v2"] = 4
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK | {"step_seconds": 60.0})
        wait_for(world, lambda run: run.stage == "observe" and world.rules.read().weight == 10)
        until(lambda: command(capsys, "drain")[1]["requests"] == 4 * world.gpus)
        world.gateways["canary"].in_flight.clear()
        until(lambda: command(capsys, "drain")[1]["requests"] == 0)
        code, document, err = command(capsys, "drain", "--wait", "--timeout", "0.7s")
        assert (code, document["drained"]) == (3, False) and "10 % of the new connections" in err
        world.gateways["canary"].in_flight["v2"] = 4
        controller.call("rollback", reason="test", drain=60.0)
        code, document, _ = command(capsys, "drain", "--wait", "--timeout", "0.7s")
        assert (code, document["requests"]) == (3, 4 * world.gpus)
        world.gateways["canary"].in_flight.clear()
        assert command(capsys, "drain", "--wait", "--timeout", "20s")[0] == 0
        controller.run_to_end()
        until(lambda: controller.call("status")["live"]["draining"] is None)
        world.gateways["canary"].in_flight["v2"] = 2
        controller.call("start", release="v2", policy=QUICK | {"step_seconds": 60.0})
        until(lambda: command(capsys, "drain")[1]["requests"] == 2 * world.gpus)


def test_drain_does_not_take_unknown_for_nothing(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    kill_in(world, "observe")
    code, document, _ = command(capsys, "drain", "--wait", "--timeout", "0.6s")
    assert (code, document["requests"]) == (3, None)


def test_an_idle_controller_knows_the_rule(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK)
        controller.run_to_end()
    with ControllerProcess(world.paths) as controller:
        assert controller.call("status")["live"]["rule"] == 0


def until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

"""The disk is full, or what lies on it is not what we wrote: the rule goes to 0, nothing crashes, nothing is lost that
was there. The disk is a tmpfs of its own below the world's state directory, filled to the last byte."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.events import read_events
from appliance.launcher.loop import Loop
from appliance.log import ExitCode
from appliance.service_facts import canary, describe
from appliance.slots import pointer
from canary import machine, rollback_cli, rules_cli, status_cli
from canary.cli import main
from canary.client import ControllerError
from canary.controller import Controller
from canary.goals import plan
from canary.happenings import Resumed, Tick
from canary.placement import Placement
from canary.preflight import now
from canary.run import RunError, from_state, to_state
from canary.store import AbortWish, Damaged, Store
from tests.canary.conftest import _directory
from tests.canary.processes import ControllerProcess
from tests.canary.stand_ins import FAST, FileRules, RuleState, make_parts
from tests.canary.test_life import check_rolled_back, start, wait_for
from tests.canary.world import World

LONG = {"step_seconds": 60.0, "settle_seconds": 0.2}
SECONDS = 20.0


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a command works on the rules itself it gets the file instead of netfilter."""
    for module in (rollback_cli, rules_cli, status_cli):
        monkeypatch.setattr(module, "real_parts", make_parts)


@pytest.fixture(scope="module")
def small_disk() -> Iterator[World]:
    """A world whose /var/lib/appliance is a file system of 4 MB."""
    with tempfile.TemporaryDirectory(dir=_directory()) as root:
        state = Path(root) / "var/lib/appliance"
        state.mkdir(parents=True)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=755", "canary-test", state], check=False)
        if mounted.returncode:
            pytest.skip("no right to mount a file system")
        try:
            made = World(Path(root), gpus=2)
            yield made
            made.close()
        finally:
            subprocess.run(["umount", "-l", state], check=True)


@pytest.fixture
def disk(small_disk: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("APPLIANCE_ROOT", str(small_disk.paths.etc.parents[1]))
    free(small_disk)
    small_disk.reset()
    yield small_disk
    free(small_disk)


def fill(world: World) -> None:
    with (world.paths.state / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    assert shutil.disk_usage(world.paths.state).free == 0


def free(world: World) -> None:
    (world.paths.state / "ballast").unlink(missing_ok=True)


def in_step(world: World, controller: ControllerProcess, **policy: Any) -> None:
    """A run that the canary has 10 % in, for as long as we like."""
    world.script.set(verdict="inconclusive")
    start(world, controller, **(LONG | policy))
    wait_for(world, lambda run: run.stage == "observe" and world.rules.read().weight == 10)


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def log(world: World) -> str:
    return (world.paths.run / "controller.log").read_text()


def events_are_whole(world: World, number: str) -> None:
    told = [e["seq"] for e in read_events(world.paths.events) if e.get("run") == number and "seq" in e]
    assert told == list(range(1, told[-1] + 1))


# -- a full disk


def test_a_full_disk_in_mid_run_ends_the_run_and_not_the_controller(disk: World) -> None:
    with ControllerProcess(disk.paths) as controller:
        in_step(disk, controller)
        fill(disk)
        until(lambda: disk.rules.read().weight == 0, "the rule was not set to 0")
        status = controller.call("status")["run"]
        assert status["phase"] == "rolling_back" and "No space left" in status["problem"]
        with pytest.raises(ControllerError) as refused:
            controller.call("promote")
        assert refused.value.exit_code == ExitCode.REFUSED
        with pytest.raises(ControllerError) as refused:
            start(disk, controller)
        assert refused.value.exit_code == ExitCode.BUSY  # the run is on until it can be saved
        time.sleep(0.3)  # nothing but the rule is done without a record
        assert disk.engines() == [["v1", "v2"]] * disk.gpus and pointer(disk.paths, "canary") == "v2"
        saved = Store(disk.paths).load()
        assert saved is not None and saved.phase == "step"
        until(
            lambda: "rolling back, rule 0 %" in describe(canary(disk.paths) or {}), "`appliance status` shows the file"
        )
        free(disk)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "failed" and "No space left" in run["reason"] and not run["problem"]
    check_rolled_back(disk)
    events_are_whole(disk, "1")


@pytest.mark.parametrize("kill", [False, True])
def test_rollback_on_a_full_disk_sets_the_rule_and_says_what_is_missing(
    disk: World, capsys: pytest.CaptureFixture[str], kill: bool
) -> None:
    """With the controller stopped (SIGSTOP), so that nobody but the command can have done it."""
    with ControllerProcess(disk.paths) as controller:
        in_step(disk, controller, interval=60.0)
        os.kill(controller.pid, signal.SIGSTOP)
        before = len(disk.rules.history())
        fill(disk)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollback_cli, "_ANSWER_SECONDS", 0.2)
            code = main(["rollback", *(["--kill"] if kill else [])])
        err = capsys.readouterr().err
        assert code == 0 and disk.rules.read().weight == 0
        assert "canary-abort.json could not be written: No space left" in err and "/run/" in err and "df -h" in err
        os.kill(controller.pid, signal.SIGCONT)
        until(lambda: controller.call("status")["run"]["phase"] == "rolling_back", "it does not see the wish")
        assert set(disk.rules.history()[before:]) == {0}, "who goes on does not put it back"
        free(disk)
        run = controller.run_to_end()
    assert run is not None and (run["phase"], run["reason"]) == ("aborted", "by hand")
    check_rolled_back(disk)
    assert not disk.paths.canary_abort_volatile.exists()


def test_rollback_on_a_full_disk_without_a_controller(disk: World, capsys: pytest.CaptureFixture[str]) -> None:
    with ControllerProcess(disk.paths) as controller:
        in_step(disk, controller)
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
    fill(disk)
    assert disk.rules.read().weight == 10
    code = main(["rollback", "--kill", "--reason", "full"])
    err = capsys.readouterr().err
    assert code == 1 and disk.rules.read().weight == 0
    assert "the rule is at 0, and run 1 is not ended" in err and "No space left" in err and "df -h" in err
    with ControllerProcess(disk.paths) as controller:  # comes up on the full disk: the wish still counts
        until(lambda: controller.call("status")["run"]["phase"] == "rolling_back", "it does not see the wish")
        free(disk)
        run = controller.run_to_end()
    assert run is not None and (run["phase"], run["reason"]) == ("aborted", "full")
    assert disk.rules.history().count(10) == 1
    check_rolled_back(disk)


def test_a_controller_that_starts_on_a_full_disk_waits_with_weight_0(disk: World) -> None:
    with ControllerProcess(disk.paths) as controller:
        in_step(disk, controller)
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
    fill(disk)
    for _ in range(2):  # a crash loop would end each of them
        with ControllerProcess(disk.paths) as controller:
            until(lambda: disk.rules.read().weight == 0, "the rule was not set to 0")
            assert "No space left" in controller.call("status")["run"]["problem"]
    with ControllerProcess(disk.paths) as controller:
        controller.call("status")
        free(disk)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "failed"
    check_rolled_back(disk)
    events_are_whole(disk, "1")


# -- a rollback while the controller looks at the rule


def test_a_rollback_is_not_taken_for_drift(disk: World) -> None:
    """It comes between the controller's look for a wish and its look at the rule, which others may have flushed."""
    with ControllerProcess(disk.paths) as process:
        in_step(disk, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    store, loop = Store(disk.paths), Loop()

    class Rules(FileRules):
        before: int | None = None  # how often the rule had been set

        def read(self) -> RuleState:
            if controller.live.rule == 10 and self.before is None:
                self.before = len(self.history())
                self.set_weight("1", 0.0)
                store.wish_abort(AbortWish("1", "by hand", "somebody", 0.0))
            return super().read()

    rules = Rules(disk.paths)
    parts = replace(make_parts(disk.paths), rules=rules)
    with store.controlling():
        controller = Controller(store, Placement(disk.paths), parts, loop, FAST)
        try:
            controller.start()
            assert loop.run(until=lambda: controller.run is not None and controller.run.over, timeout=SECONDS)
        finally:
            controller.close()
    assert set(rules.history()[rules.before :]) == {0.0}
    check_rolled_back(disk)


def test_a_rule_that_was_put_back_before_the_wish_was_there_is_set_to_0_again(
    disk: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish_abort = Store.wish_abort

    def late(store: Store, wish: AbortWish) -> Any:
        disk.rules.set_weight("1", 10.0)  # a controller's, which had looked for a wish just before
        return wish_abort(store, wish)

    with ControllerProcess(disk.paths) as controller:
        in_step(disk, controller, interval=60.0)
        os.kill(controller.pid, signal.SIGSTOP)
        monkeypatch.setattr(Store, "wish_abort", late)
        monkeypatch.setattr(rollback_cli, "_ANSWER_SECONDS", 0.2)
        assert main(["rollback", "--kill"]) == 0
        assert disk.rules.read().weight == 0
        os.kill(controller.pid, signal.SIGCONT)
        controller.run_to_end()
    check_rolled_back(disk)


def test_start_on_a_full_disk_is_refused_and_nothing_is_begun(disk: World) -> None:
    with ControllerProcess(disk.paths) as controller:
        controller.call("status")
        fill(disk)
        with pytest.raises(ControllerError) as refused:
            start(disk, controller)
        assert refused.value.exit_code == ExitCode.REFUSED and "No space left" in refused.value.message
        assert controller.alive() and controller.call("status")["run"] is None
        free(disk)
        start(disk, controller)
        run = controller.run_to_end()
    assert run is not None and (run["phase"], run["id"]) == ("settled", "1")


@pytest.mark.parametrize("phase", ["starting", "promoting", "settling", "rolling_back"])
def test_the_disk_fills_up_in_any_phase(disk: World, phase: str) -> None:
    """It goes on to a recorded end; before the commit point that is a rollback."""
    disk.script.set(verdict="inconclusive" if phase == "rolling_back" else "pass")
    if phase == "starting":
        disk.fleet.script(0, hangs=["v2"])
    if phase == "promoting":
        disk.paths.canary_config.write_text('[[hooks]]\nwhen = "promote"\nexec = ["/bin/sleep", "1"]\n')
    with ControllerProcess(disk.paths) as controller:
        policy = {"settle_seconds": 1.0} if phase == "settling" else {"progress_deadline": 1.5}
        start(disk, controller, **policy, **({"step_seconds": 60.0} if phase == "rolling_back" else {}))
        if phase == "rolling_back":
            disk.gateways["canary"].in_flight["v2"] = 1
            wait_for(disk, lambda run: run.stage == "observe")
            controller.call("rollback", reason="x", drain=0.3)
        wait_for(disk, lambda run: run.phase == phase)
        fill(disk)
        until(lambda: "cannot be written" in (controller.call("status")["run"]["problem"] or ""), "it was saved")
        assert disk.rules.read().weight in (0, None)
        time.sleep(0.2)
        disk.fleet.script(0, hangs=[])
        free(disk)
        run = controller.run_to_end()
    assert run is not None
    if phase == "settling":
        assert run["phase"] == "settled" and pointer(disk.paths, "stable") == "v2"
    else:
        assert run["phase"] == ("aborted" if phase == "rolling_back" else "failed")
        check_rolled_back(disk)
    events_are_whole(disk, "1")


def test_a_disk_that_became_read_only_after_an_error(disk: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Its locks can still be had, so there is one controller, and the rule goes to 0."""
    with ControllerProcess(disk.paths) as controller:
        in_step(disk, controller)
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
    remount(disk, "ro")
    try:
        with ControllerProcess(disk.paths) as controller:
            until(lambda: disk.rules.read().weight == 0, "the rule was not set to 0")
            assert "Read-only" in controller.call("status")["run"]["problem"]
            assert main(["rollback", "--kill"]) == 0 and "Read-only" in capsys.readouterr().err
            assert controller.call("status")["run"]["reason"] == "by hand"
        assert main(["rollback", "--kill"]) == 1 and "is not ended" in capsys.readouterr().err
    finally:
        remount(disk, "rw")
    with ControllerProcess(disk.paths) as controller:
        run = controller.run_to_end()
    assert run is not None and (run["phase"], run["reason"]) == ("aborted", "by hand")
    check_rolled_back(disk)


def remount(world: World, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", world.paths.state], check=True)


# -- canary.json is damaged


def damage(world: World, kind: str) -> None:
    path = world.paths.canary_run
    text = path.read_text()
    match kind:
        case "garbage":
            path.write_bytes(os.urandom(300))
        case "truncated":
            path.write_text(text[: len(text) // 2])
        case "empty":
            path.write_text("")
        case "types":
            path.write_text(json.dumps(json.loads(text) | {"step": "two"}))
        case "infinite":
            path.write_text(text.replace('"weight": 10.0', '"weight": 1e999'))
        case "clock":
            path.write_text(text.replace('"until": 0.0', '"until": 1e999'))
        case "event":
            path.write_text(json.dumps(json.loads(text) | {"last_event": {"seq": 3}}))
        case "id":
            path.write_text(json.dumps(json.loads(text) | {"id": "../../x"}))
        case "release":
            path.write_text(json.dumps(json.loads(text) | {"release": "../v2"}))
        case "huge":
            with path.open("r+b") as file:
                file.truncate(16 << 20)
        case "loop":  # open() fails, as for a file of mode 000 where root has no CAP_DAC_OVERRIDE
            path.unlink()
            path.symlink_to(path.name)
        case _:
            path.unlink()
            path.mkdir()
    assert kind in ("loop", "directory") or path.read_bytes()[: len(text) + 1] != text.encode()


KINDS = (
    "garbage", "truncated", "empty", "types", "infinite", "clock", "event", "id", "release", "huge", "loop",
    "directory",
)  # fmt: skip


def orphan(world: World, kind: str, stage: str = "observe") -> None:
    """The controller is dead, 10 % go to the canary, and nobody knows whose run it is."""
    with ControllerProcess(world.paths) as controller:
        in_step(world, controller)
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
    damage(world, kind)
    with pytest.raises(Damaged):
        Store(world.paths).load()
    assert world.rules.read().weight == 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_controller_that_finds_a_damaged_state_serves_nobody_and_cleans_up(world: World, kind: str) -> None:
    orphan(world, kind)
    with ControllerProcess(world.paths) as controller:
        run = controller.run_to_end() if controller.call("status") else None
        assert run is not None and controller.alive()
        assert (run["id"], run["phase"], run["release"]) == ("2", "aborted", "v2")  # 1 was used, as the events know
        assert "is lost" in run["reason"]
        world.script.set(verdict="pass")
        start(world, controller)  # and it is as usable as ever
        wait_for(world, lambda run: run.id == "3" and run.over)
        until(lambda: (world.paths.canary_runs / "3.json").exists(), "it was not kept")
    assert world.rules.history()[-4:] == [0, 10, 100, 0] and world.rules.history().count(10) == 2
    kept = list(world.paths.state.glob("canary.json.damaged-*"))
    assert len(kept) == 1 and os.path.lexists(kept[0])
    lost = [event for event in Store(world.paths).events() if event["event"] == "canary_state_lost"]
    assert len(lost) == 1 and lost[0]["kept"] == str(kept[0]) and lost[0]["left"] == ["v2"]
    if kept[0].is_dir():
        kept[0].rmdir()


@pytest.mark.parametrize("kind", ["garbage", "infinite", "loop"])
def test_rollback_with_a_damaged_state_and_no_controller(
    world: World, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    orphan(world, kind)
    assert main(["status"]) == 1
    out = capsys.readouterr()
    assert "rule 10%" in out.out and "canary rollback" in out.out and "is lost" in out.err
    assert main(["rollback", "--kill"]) == 0
    err = capsys.readouterr().err
    assert "is lost" in err and world.rules.read().weight == 0
    check_rolled_back(world)
    assert main(["status"]) == 0 and "aborted" in capsys.readouterr().out
    assert main(["cleanup"]) == 0


@pytest.mark.parametrize("effect", range(1, 9))
def test_killed_while_it_takes_over_what_a_lost_run_has_left(world: World, effect: int) -> None:
    """At each of the first things that it does; the next one goes on."""
    orphan(world, "truncated")
    with ControllerProcess(world.paths, kill_at=effect, after=effect % 2 == 0) as controller:
        assert controller.wait() == -signal.SIGKILL
    with ControllerProcess(world.paths) as controller:
        until(lambda: (run := controller.call("status")["run"]) and run["phase"] == "aborted", "it did not end")
    check_rolled_back(world)
    assert world.rules.history().count(10) == 1
    assert len(list(world.paths.state.glob("canary.json.damaged-*"))) == 1


def test_an_idle_state_that_was_damaged_is_not_no_run_ever(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with ControllerProcess(world.paths) as controller:
        start(world, controller)
        controller.run_to_end()
    world.paths.canary_run.write_text("{]")
    with ControllerProcess(world.paths) as controller:
        until(lambda: controller.call("status")["run"] is None, "it knows a run")
        for verb, code in (("status", 1), ("retry", 4), ("rollback", 4), ("pause", 4)):
            capsys.readouterr()
            assert main([verb]) == code
            err = capsys.readouterr().err
            assert "canary.json.damaged-" in err and "canary list" in err and "no run on this host" not in err
        assert main(["list"]) == 0 and "settled" in capsys.readouterr().out
    for aside in world.paths.state.glob("canary.json.damaged-*"):
        aside.unlink()
    assert main(["status"]) == 1 and "which run was the last is not known" in capsys.readouterr().err


def test_cleanup_with_a_damaged_state(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    orphan(world, "truncated")
    assert main(["cleanup"]) == 0
    assert "is lost" in capsys.readouterr().out
    check_rolled_back(world)
    assert list(world.paths.state.glob("canary.json.damaged-*"))


def test_a_damaged_state_on_a_full_disk(disk: World, capsys: pytest.CaptureFixture[str]) -> None:
    orphan(disk, "truncated")
    text = disk.paths.canary_run.read_bytes()
    fill(disk)
    with ControllerProcess(disk.paths) as controller:
        until(lambda: disk.rules.read().weight == 0, "the rule was not set to 0")
        assert "No space left" in controller.call("status")["run"]["problem"]
    with ControllerProcess(disk.paths) as controller:
        controller.call("status")
        free(disk)
        until(lambda: not controller.call("status")["run"]["problem"], "it was not saved")
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "aborted"
    check_rolled_back(disk)
    (kept,) = disk.paths.state.glob("canary.json.damaged-*")
    assert kept.read_bytes() == text


def test_a_lost_run_that_has_left_nothing_is_only_told_of(world: World) -> None:
    world.paths.canary_run.write_text("{]")
    world.rules.set_weight("7", 25.0)
    with ControllerProcess(world.paths) as controller:
        assert controller.call("status")["run"] is None
        until(lambda: world.rules.read().weight == 0, "the rule was not set to 0")
        start(world, controller)
        controller.run_to_end()
    assert not world.rules.read().weight


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=5,
)  # fmt: skip


@settings(max_examples=2000 if os.environ.get("APPLIANCE_FULL") == "1" else 150, deadline=None)
@given(data=st.data())
def test_what_is_taken_for_a_run_can_be_gone_on_with(data: st.DataObject) -> None:
    """One field of a good file is replaced by anything."""
    value = json.loads(json.dumps(GOOD))
    key = data.draw(st.sampled_from(sorted(value)))
    value[key] = data.draw(_JSON)
    try:
        run = from_state(value, "test")
    except RunError:
        return
    assert 0 <= plan(run, now().boot).weight <= 100 and run.id.isdecimal()
    for event in (Resumed("another boot", False), Tick()):
        json.dumps(to_state(machine.step(run, event, now())), allow_nan=False)
    assert isinstance(run.last_event.get("event", ""), str)


GOOD = {
    "id": "7", "release": "v2", "stable": "v1", "policy": {"steps": [10, 100]}, "boot_id": "b", "created_at": 1.0,
    "phase": "step", "stage": "observe", "step": 0, "attempt": 0, "seq": 5, "weight": 10.0, "entered": 1.0,
    "entered_at": 1.0, "step_began": 1.0, "step_ends": 2.0, "progress": 1.0, "retry": 0.0, "until": 0.0, "paused": None,
    "paused_since": 0.0, "held": None, "ending": None, "reason": None, "problem": None, "verdict": None,
    "decided": None, "results": [], "last_event": {"event": "weight", "seq": 5}, "ended_at": None, "evidence": None,
    "hooks": [],
}  # fmt: skip


# -- canary-abort.json is damaged


@pytest.mark.parametrize("text", ["{]", "", '{"schema": 1}', '{"schema": 1, "run": 1}', '{"schema": 9, "run": "1"}'])
def test_a_wish_that_cannot_be_read_is_a_wish(world: World, text: str) -> None:
    with ControllerProcess(world.paths) as controller:
        in_step(world, controller)
        world.paths.canary_abort.write_text(text)
        run = controller.run_to_end()
        assert run is not None and run["phase"] == "aborted" and "canary-abort.json" in run["reason"]
        check_rolled_back(world)
        assert not world.paths.canary_abort.exists()
        world.script.set(verdict="pass")
        start(world, controller)  # it ends one run, not every run
        wait_for(world, lambda run: run.id == "2" and run.phase == "settled")


def test_a_wish_that_is_a_directory(world: World) -> None:
    with ControllerProcess(world.paths) as controller:
        in_step(world, controller)
        world.paths.canary_abort.mkdir()
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "aborted"
    check_rolled_back(world)
    (kept,) = world.paths.state.glob("canary-abort.json.damaged-*")
    kept.rmdir()


@pytest.mark.parametrize("drain", ["1e999", "-1", "true", '"x"', "null"])
def test_a_drain_that_is_none_ends_all_the_same(world: World, drain: str) -> None:
    world.paths.canary_abort.write_text(f'{{"schema": 1, "run": "1", "reason": 5, "by": null, "drain": {drain}}}')
    wish = Store(world.paths).abort_wish("1")
    assert wish == AbortWish("1", "5", "None", 60.0)
    assert Store(world.paths).abort_wish("2") is None


# -- earlier runs are damaged


def test_a_bad_file_of_an_earlier_run_is_named_and_left_out(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with ControllerProcess(world.paths) as controller:
        start(world, controller)
        controller.run_to_end()
        (world.paths.canary_runs / "7.json").write_text("{]")
        (world.paths.canary_runs / "8.json").write_text((world.paths.canary_runs / "1.json").read_text())
        assert main(["list"]) == 0
        out = capsys.readouterr()
        assert "7.json" in out.err and "8.json" in out.err and "settled" in out.out
        assert main(["list", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert [run["id"] for run in shown["runs"]] == ["1"] and len(shown["skipped"]) == 2
        assert main(["explain", "7"]) == 1 and "7.json" in capsys.readouterr().err
        capsys.readouterr()
        assert main(["undo", "--json"]) == 0
        out = capsys.readouterr()
        assert "7.json" in out.err and len(json.loads(out.out)["skipped"]) == 2
        wait_for(world, lambda run: run.phase == "settled" and run.stable == "v2")
        assert Store(world.paths).load().id == "9"  # type: ignore[union-attr]
    assert pointer(world.paths, "stable") == "v1"


def test_without_root_rollback_is_refused(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to be root first")
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            code = main(["rollback"])
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == ExitCode.REFUSED
    err = capfd.readouterr().err
    assert "run as root" in err and ".lock" not in err

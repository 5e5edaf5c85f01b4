"""Runs of a controller in a process of its own, with launchers that speak the real protocol: what happens to rule,
pointers, engines, state file and event log."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from appliance.log import ExitCode
from appliance.slots import pointer, set_slot
from canary.client import ControllerError
from canary.store import Store
from tests.canary.processes import ControllerProcess
from tests.canary.world import QUICK, World


def start(world: World, controller: ControllerProcess, **policy: Any) -> dict[str, Any]:
    return controller.call("start", release="v2", policy=QUICK | policy)


def events(world: World) -> list[str]:
    return [event["event"].removeprefix("canary_") for event in Store(world.paths).events()]


def check_rolled_back(world: World) -> None:
    assert world.rules.read().weight in (0, None)
    assert (pointer(world.paths, "stable"), pointer(world.paths, "canary")) == ("v1", None)
    assert world.engines() == [["v1"]] * world.gpus
    assert not world.paths.canary_marker.exists()


def test_a_good_release_is_promoted_and_settled(world: World) -> None:
    with ControllerProcess(world.paths) as controller:
        start(world, controller)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "settled"
    assert (pointer(world.paths, "stable"), pointer(world.paths, "canary")) == ("v2", None)
    assert world.engines() == [["v2"]] * world.gpus
    assert world.rules.history() == [0, 10, 100, 0]
    assert [(r["weight"], r["outcome"]) for r in run["results"]] == [(10, "pass"), (100, "pass")]
    told = events(world)
    assert told[0] == "created" and told[-1] == "settled" and told.index("committed") < told.index("baking")
    assert not world.paths.canary_marker.exists()


@pytest.mark.parametrize("at", [10, 100])
def test_a_bad_release_is_rolled_back_from_any_step(world: World, at: float) -> None:
    world.script.set(fail_at=at)
    with ControllerProcess(world.paths) as controller:
        start(world, controller)
        run = controller.run_to_end()
    assert run is not None and (run["phase"], run["reason"]) == ("failed", "scripted fail")
    assert world.rules.history()[-1] == 0
    check_rolled_back(world)


def test_other_answers_than_recorded_say_what_to_look_at_first(world: World) -> None:
    """A damaged file of the release is likelier than a bad GPU; the hashes are long and a terminal cuts them off."""
    world.fleet.script(0, salt={"v2": "!"})
    with ControllerProcess(world.paths) as controller:
        start(world, controller)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "failed"
    first = "first `appliance release verify v2`: v2 on GPU 0 does not give its golden answers: prompt short"
    assert str(run["reason"]).startswith(first)
    check_rolled_back(world)


def test_a_release_that_does_not_start_gets_no_connection(world: World) -> None:
    world.fleet.script(1, dies={"v2": "CUDA error 2"})
    with ControllerProcess(world.paths) as controller:
        start(world, controller)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "failed" and "CUDA error 2" in run["reason"]
    assert set(world.rules.history()) == {0}
    check_rolled_back(world)


def test_a_canary_that_dies_is_cut_off_without_statistics(world: World) -> None:
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        start(world, controller, step_seconds=60)
        wait_for(world, lambda run: run.stage == "observe" and world.rules.read().weight == 10)
        world.script.set(alive=False)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "failed" and "not alive" in run["reason"]
    check_rolled_back(world)


def wait_for(world: World, condition: Any, seconds: float = 30.0) -> Any:
    import time

    deadline = time.monotonic() + seconds
    while True:
        run = Store(world.paths).load()
        if run is not None and condition(run):
            return run
        assert time.monotonic() < deadline, run and (run.job_key, run.problem, run.reason)
        time.sleep(0.005)


def test_requests_in_flight_are_waited_for(world: World) -> None:
    """Weight 0 at once, engines only when nothing is in work any more."""
    world.gateways["canary"].in_flight["v2"] = 3
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        start(world, controller, step_seconds=60)
        wait_for(world, lambda run: run.stage == "observe")
        reply = controller.call("rollback", reason="test", drain=60.0)
        assert reply["live"]["rule"] == 0 and reply["run"]["phase"] == "rolling_back"
        wait_for(
            world, lambda run: pointer(world.paths, "canary") == "v1"
        )  # what still comes there is served by stable
        assert world.engines() == [["v1", "v2"]] * world.gpus
        world.gateways["canary"].in_flight.clear()
        run = controller.run_to_end()
    assert run is not None and (run["phase"], run["reason"]) == ("aborted", "test")
    check_rolled_back(world)


def test_commands_on_a_run_that_is_over_are_refused(world: World) -> None:
    with ControllerProcess(world.paths) as controller:
        start(world, controller)
        controller.run_to_end()
        for op, args in (
            ("rollback", {"reason": "x", "drain": 0.0}), ("pause", {}), ("resume", {}), ("promote", {}),
            ("weight", {"weight": 5}),
        ):  # fmt: skip
            with pytest.raises(ControllerError) as refused:
                controller.call(op, **args)
            assert refused.value.exit_code == ExitCode.REFUSED, op
    assert pointer(world.paths, "stable") == "v2"


def test_identical_release_second_run_and_cooldown_are_refused(world: World) -> None:
    world.script.set(verdict="fail")
    with ControllerProcess(world.paths) as controller:
        with pytest.raises(ControllerError) as same:
            controller.call("start", release="v1", policy=QUICK)
        assert same.value.exit_code == ExitCode.REFUSED and "already" in same.value.message
        start(world, controller, cooldown=3600)
        with pytest.raises(ControllerError) as busy:
            start(world, controller)
        assert busy.value.exit_code == ExitCode.BUSY
        controller.run_to_end()
        with pytest.raises(ControllerError) as cool:
            start(world, controller)
        assert cool.value.exit_code == ExitCode.REFUSED and "cool-down" in cool.value.message
        world.script.set(verdict="pass")
        controller.call("start", release="v2", policy=QUICK, ignore_cooldown=True)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "settled" and run["id"] == "2"


def test_deadline_rolls_back_what_stays_inconclusive(world: World) -> None:
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        start(world, controller, progress_deadline=0.5)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "failed" and "no progress" in run["reason"]
    assert "extended" in events(world)
    check_rolled_back(world)


def test_flushed_rules_are_put_back(world: World) -> None:
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        start(world, controller, step_seconds=60)
        wait_for(world, lambda run: world.rules.read().weight == 10)
        world.rules.flush()
        wait_for(world, lambda run: world.rules.read().weight == 10)
        controller.call("rollback", reason="done", drain=0.0)
        controller.run_to_end()
    check_rolled_back(world)


def test_rules_that_cannot_be_changed_stop_neither_abort_nor_deadline(world: World) -> None:
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        start(world, controller, step_seconds=60)
        wait_for(world, lambda run: world.rules.read().weight == 10)
        world.script.set(rules_error="iptables is away")
        controller.call("rollback", reason="test", drain=0.3)
        # The rule still sends connections to the canary's gateway: it serves stable's release by now.
        wait_for(world, lambda run: run.over)
        assert pointer(world.paths, "stable") == "v1" and world.engines() == [["v1"]] * world.gpus
        world.script.set(rules_error=None)
        controller.run_to_end()
    check_rolled_back(world)


def test_pause_weight_resume_promote(world: World) -> None:
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK, manual=True)
        wait_for(world, lambda run: run.stage == "held")
        controller.call("weight", weight=3)
        assert world.rules.read().weight == 3
        controller.call("pause", reason="lunch")
        assert controller.call("status")["run"]["paused"]
        controller.call("resume")
        assert world.rules.read().weight == 10
        controller.call("promote")
        wait_for(world, lambda run: run.stage == "held" and run.step == 1)
        controller.call("promote")
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "settled"


def test_dry_run_never_changes_a_weight(world: World) -> None:
    world.script.set(verdict="fail")
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK, dry_run=True)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "aborted" and "10 %" not in run["reason"] and "fail" in run["reason"]
    assert set(world.rules.history()) == {0}
    check_rolled_back(world)


def test_undo_puts_the_former_release_back_without_analysis(world: World) -> None:
    with ControllerProcess(world.paths) as controller:
        start(world, controller)
        controller.run_to_end()
        world.script.set(verdict="fail")  # nobody asks
        controller.call("undo")
        wait_for(world, lambda run: run.id == "2" and run.over)
    assert pointer(world.paths, "stable") == "v1" and world.engines() == [["v1"]] * world.gpus


def test_somebody_elses_slot_change_ends_the_run(world: World) -> None:
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        start(world, controller, step_seconds=60)
        wait_for(world, lambda run: run.stage == "observe")
        set_slot(world.paths, "canary", "v1")
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "failed" and "somebody else" in run["reason"]


def test_sigterm_leaves_the_run_for_the_next_controller(world: World) -> None:
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        start(world, controller, step_seconds=60)
        wait_for(world, lambda run: run.stage == "observe" and world.rules.read().weight == 10)
        os.kill(controller.pid, signal.SIGTERM)
        assert controller.wait() == 0
    assert world.rules.read().weight == 10  # no connection is moved by a restart
    world.script.set(verdict="pass")
    with ControllerProcess(world.paths) as controller:
        wait_for(world, lambda run: "resumed_after_restart" in events(world) and run.step == 0)
        controller.call("rollback", reason="done", drain=0.0)
        controller.run_to_end()
    check_rolled_back(world)


def test_exclusive_moves_whole_gpus_and_stable_keeps_half(exclusive: World) -> None:
    world = exclusive
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths) as controller:
        start(world, controller, steps=[10, 50, 100], step_seconds=60)
        wait_for(world, lambda run: run.stage == "observe" and run.step == 0)
        assert sorted(map(tuple, world.engines())) == [("v1",), ("v1",), ("v1",), ("v2",)]
        world.script.set(verdict="pass")
        controller.call("promote")
        wait_for(world, lambda run: run.stage == "observe" and run.step == 1)
        assert sorted(map(tuple, world.engines())) == [("v1",), ("v1",), ("v2",), ("v2",)]
        controller.call("promote")
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "settled" and run["policy"]["steps"] == [10, 50]
    assert world.engines() == [["v2"]] * 4


def test_exclusive_rollback_gives_the_gpus_back(exclusive: World) -> None:
    world = exclusive
    world.script.set(fail_at=50)
    with ControllerProcess(world.paths) as controller:
        start(world, controller, steps=[25, 50])
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "failed"
    check_rolled_back(world)


@pytest.mark.parametrize("op", ["rollback", "undo"])
def test_a_promoted_release_is_taken_back_in_the_bake(world: World, op: str) -> None:
    """The former engines are kept for it: they are never stopped, and never started anew."""
    with ControllerProcess(world.paths) as controller:
        start(world, controller, settle_seconds=600)
        wait_for(world, lambda run: run.stage == "bake")
        world.fleet.script(0, log=[])
        world.gateways["stable"].in_flight["v2"] = 2
        reply = controller.call(op, **({"reason": "slow", "drain": 60.0} if op == "rollback" else {}))
        assert reply["run"]["phase"] == "rolling_back"
        wait_for(world, lambda run: run.stage == "drain")
        assert pointer(world.paths, "stable") == "v1" and world.engines() == [["v1", "v2"]] * world.gpus
        world.gateways["stable"].in_flight.clear()  # what it had begun with v2 is over
        run = controller.run_to_end()
    assert run is not None and (run["phase"], run["reverted"]) == ("aborted", True)
    check_rolled_back(world)
    assert "run" not in world.fleet.log(0) and "replace" not in world.fleet.log(0)
    told = events(world)
    assert told.index("committed") < told.index("reverting") < told.index("reverted") < told.index("aborted")


def test_a_former_engine_that_is_gone_is_started_before_the_release_goes(world: World) -> None:
    with ControllerProcess(world.paths) as controller:
        start(world, controller, settle_seconds=600)
        wait_for(world, lambda run: run.stage == "bake")
        world.fleet.ask(0, "sync")  # as a launcher that was started again reads its pointers
        controller.call("rollback", reason="slow", drain=0.0)
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "aborted"
    check_rolled_back(world)


def test_undo_never_brings_back_what_failed_since(world: World) -> None:
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK)
        controller.run_to_end()  # 1: v2 over v1
        reply = controller.call("undo")
        assert (reply["before"], reply["after"]) == ("v2", "v1")
        wait_for(world, lambda run: run.id == "2" and run.phase == "settled")  # 2: v1 over v2
        world.script.set(verdict="fail")
        start(world, controller)
        wait_for(world, lambda run: run.id == "3" and run.over)
        with pytest.raises(ControllerError, match=r"v2 into service without analysis.*run 3: scripted fail") as refused:
            controller.call("undo")
        assert refused.value.exit_code == ExitCode.REFUSED and "canary start v2" in str(refused.value.hint)
        assert pointer(world.paths, "stable") == "v1"
        controller.call("undo", force=True)
        wait_for(world, lambda run: run.id == "4" and run.phase == "settled")
    assert pointer(world.paths, "stable") == "v2"


def test_undo_knows_when_something_else_put_stable_there(world: World) -> None:
    with ControllerProcess(world.paths) as controller:
        start(world, controller)
        controller.run_to_end()
        set_slot(world.paths, "stable", "v1")
        with pytest.raises(ControllerError, match="stable is v1 by now"):
            controller.call("undo")

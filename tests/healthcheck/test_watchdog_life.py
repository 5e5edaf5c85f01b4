"""The watchdog as a process, with real launchers and real engines on the CPU: faults go their way, and come back."""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from appliance.control import ControlClient, ControlError
from appliance.engine_calls import EngineCalls
from appliance.events import read_events
from healthcheck.cli import main as healthcheck
from tests.healthcheck.watchdog_world import FULL, World

KILLS = 60 if FULL else 4
REPAIR = ["SUSPECT", "STOPPING", "RESETTING", "WARMUP", "VERIFY", "PROBATION", "HEALTHY"]


def pid(one: World, gpu: int) -> int:
    return one.launcher(gpu)["engines"][0]["pid"]  # type: ignore[no-any-return]


def test_a_fault_goes_its_way_and_nobody_else_notices(one: World) -> None:
    before = pid(one, 0), pid(one, 1)
    one.resets_say(seconds=1.0)
    one.start()
    one.inject("xid:48", detail="pid=7, an uncorrectable double bit error")
    one.until(lambda: one.resets())
    hold = one.hold()
    assert hold is not None and hold["level"] == "stop" and "xid:48" in hold["reason"]
    assert one.launcher(0)["engines"] == [], "no engine while the GPU is reset"
    shares = set()

    def healthy() -> bool:
        shares.add(one.launcher(0)["share"])
        return one.way()[-1:] == ["HEALTHY"]

    one.until(healthy)
    assert one.way() == REPAIR and one.way(1) == []
    assert one.resets() == ["CPU-0"] and one.hold() is None
    assert shares == {1.0, one_share(one)}, "on probation it had less"
    one.until(lambda: one.launcher(0)["share"] == 1.0)
    assert pid(one, 0) != before[0] and pid(one, 1) == before[1]
    assert one.gpu()["phases"].keys() == set(REPAIR[:-1])
    assert one.events("watchdog_verified", gpu=0)[0]["detail"].endswith("golden answers and weights as recorded")
    assert one.stop() == 0


def one_share(one: World) -> float:
    from healthcheck.policy import load_policy

    return load_policy(one.paths.healthcheck_config).probation.share


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
def test_what_an_application_does_costs_an_engine_not_a_reset(one: World) -> None:
    before = pid(one, 0)
    one.start()
    one.inject("xid:31")
    one.until(lambda: one.way()[-1:] == ["HEALTHY"])
    assert one.resets() == [] and pid(one, 0) != before
    assert "WARMUP" in one.way() and one.hold() is None


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
def test_an_engine_that_died_is_checked_before_it_serves_again(one: World) -> None:
    one.start()
    one.until(lambda: "v1" in str(one.gpu()["checks"]))
    engine = pid(one, 0)
    os.kill(engine, 11)
    one.until(lambda: one.events("watchdog_signal", gpu=0, key="engine:error"))
    one.until(lambda: one.way()[-1:] == ["HEALTHY"])
    assert one.resets() == [] and one.way()[-4:] == ["WARMUP", "VERIFY", "PROBATION", "HEALTHY"]
    assert pid(one, 0) != engine and one.hold() is None


def test_resets_that_do_not_help_end_in_quarantine_until_a_human_comes(one: World) -> None:
    one.resets_say(ok=False, detail="GPU 00000000:1B:00.0: In use by another client")
    one.start()
    one.inject("xid:95")
    gpu = one.reach("QUARANTINED")
    assert len(one.resets()) == 2, "attempts per 24 h"
    assert gpu["needs"] and "In use by another client" in gpu["reason"]
    hold = one.hold()
    assert hold is not None and hold["level"] == "stop"
    one.kill()
    one.start()  # a new one does not forget
    assert one.gpu()["state"] == "QUARANTINED" and len(one.gpu()["attempts"]) == 2
    assert one.events("watchdog_alert", gpu=0, key="quarantined")
    one.ask("set-healthy", gpu=0, reason="board swapped")
    one.reach("HEALTHY")
    assert one.hold() is None and len(one.resets()) == 2


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
def test_a_reset_that_cannot_begin_is_a_failed_one_and_the_other_gpu_stays(one: World) -> None:
    """Also: one of two GPUs may be out by automation; the other one serves on with its fault, and that is said."""
    one.resets_say(refuse=True)
    one.start()
    one.inject("xid:95")
    one.reach("QUARANTINED")
    assert "Access denied" in one.events("watchdog_reset", gpu=0, ok=False)[0]["detail"]
    one.inject("xid:79", gpu=1)
    assert "breaker" in one.reach("SUSPECT", 1)["reason"] and one.hold(1) is None
    assert one.events("watchdog_alert", gpu=1, key="breaker")
    for gpu in (1, 0):
        one.ask("set-healthy", gpu=gpu, reason="test")
        one.reach("HEALTHY", gpu)
        assert one.hold(gpu) is None


def test_in_maintenance_nothing_is_touched(one: World) -> None:
    one.start()
    one.ask("maintenance", on=True, reason="driver upgrade")
    one.inject("xid:79")
    time.sleep(1.0)
    assert one.gpu()["state"] == "MAINTENANCE" and one.hold() is None and one.resets() == []
    assert one.document()["maintenance"]["reason"] == "driver upgrade"
    one.ask("maintenance", on=True, reason="firmware as well")
    assert one.gpu()["reason"] == one.document()["maintenance"]["reason"] == "firmware as well"
    one.ask("maintenance", on=False, reason="done")
    assert one.reach("HEALTHY")["holds"] == []
    count = len(one.events("watchdog_maintenance"))
    assert "nothing has changed" in one.ask("maintenance", on=False, reason="again")["note"]
    assert len(one.events("watchdog_maintenance")) == count


def test_killed_at_random_moments_it_goes_on_where_it_was(one: World) -> None:
    """SIGKILL in the middle of a repair, again and again: one reset for one fault, and everything agrees in the end."""
    seed = int(os.environ.get("APPLIANCE_SEED", random.randrange(1 << 30)))
    dice = random.Random(seed)
    one.resets_say(seconds=0.7)
    one.start()
    one.inject("xid:48")
    for _ in range(KILLS):
        time.sleep(dice.uniform(0.0, 1.2))
        one.kill()
        one.start()
        if one.gpu()["state"] == "HEALTHY" and one.way()[-1:] == ["HEALTHY"]:
            one.until(lambda: one.launcher(0)["share"] == 1.0)
            assert len(one.resets()) == len(one.events("watchdog_signal", gpu=0)), f"seed {seed}:\n{told(one)}"
            one.inject("xid:48")
            # Attempts are per 24 h: a new fault would soon be one too many, which is another test's.
            forget_attempts(one)
    one.until(lambda: one.gpu()["state"] == "HEALTHY")
    assert len(one.resets()) <= len(one.events("watchdog_signal", gpu=0)), f"seed {seed}"
    assert "QUARANTINED" not in one.way(), f"seed {seed}: {one.way()}"
    ledger = json.loads(one.paths.gpus.read_text())["gpus"][0]
    assert ledger["state"] == "HEALTHY" and ledger["incident"] is None
    assert one.hold() is None
    one.until(lambda: one.launcher(0)["share"] == 1.0 and one.launcher(0)["engines"][0]["admitted"])


def told(one: World) -> str:
    events = [json.dumps(event) for event in read_events(one.paths.events)]
    return "\n".join([*events, (one.root / "resets.log").read_text()])


def forget_attempts(one: World) -> None:
    one.kill()
    ledger = json.loads(one.paths.gpus.read_text())
    for gpu in ledger["gpus"]:
        gpu["attempts"] = []
    one.paths.gpus.write_text(json.dumps(ledger))
    one.start()


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
def test_a_launcher_that_is_stopped_stops_nobody(one: World) -> None:
    """SIGSTOP: its hold is asked for until it is there; the loop answers all the while."""
    one.start()
    launcher = one.children[0].pid
    os.kill(launcher, 19)
    try:
        one.inject("xid:48")
        one.until(lambda: one.gpu()["state"] == "STOPPING", 10)
        begun = time.monotonic()
        for _ in range(20):
            assert one.gpu()["state"] == "STOPPING"
        assert time.monotonic() - begun < 20
        assert one.resets() == [], "no reset while an engine may be there"
    finally:
        os.kill(launcher, 18)
    one.reach("HEALTHY")
    assert one.way() == REPAIR


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
def test_where_an_operator_works_at_a_gpu_nothing_is_made_worse(one: World) -> None:
    """Its engines are stopped by somebody else's hold: no engine that could be restarted, none that could warm up."""
    launcher = ControlClient(one.paths, 0)
    launcher.call("hold", owner="operator", reason="looks at it", level="stop", wait=True)
    try:
        one.start()
        one.inject("xid:13")  # of what the operator runs there
        one.until(lambda: one.way()[-1:] == ["HEALTHY"])
        assert one.resets() == [] and one.hold() is None
        one.inject("xid:95")
        one.until(lambda: len(one.resets()) == 1)
        one.reach("HEALTHY")
        assert "are stopped" in one.events("watchdog_verified", gpu=0)[-1]["detail"]
        assert one.launcher(0)["engines"] == [], "it is the operator's to take back"
    finally:
        launcher.call("unhold", owner="operator", wait=True, timeout=60)


def test_faults_are_injected_only_where_it_was_started_for_that(one: World) -> None:
    one.arguments.remove("--test")
    try:
        one.start()
        with pytest.raises(ControlError) as error:
            one.inject("xid:48")
        assert error.value.exit_code == 4 and "not for tests" in error.value.message
    finally:
        one.arguments.append("--test")
    assert one.way() == []


def test_a_flipped_bit_of_the_weights_is_found_and_repaired(one: World) -> None:
    """By the checksum, without anybody's help: the engine is stopped, the GPU reset, the weights are loaded anew."""
    one.start("--golden-interval", "2")
    engine = EngineCalls(one.paths.engine_socket(1, "v1"))
    flip(engine)
    one.until(lambda: one.way(1)[-1:] == ["HEALTHY"], 90)
    assert one.events("watchdog_signal", gpu=1, key="checksum:mismatch")
    assert one.resets() == ["CPU-1"] and one.way(0) == []
    assert engine.checksum()["ok"]


def flip(engine: EngineCalls) -> None:
    engine._control("flip", {"offset": 4096, "bit": 3}, {})


def test_the_command_talks_to_it(one: World, capsys: pytest.CaptureFixture[str]) -> None:
    one.start()
    one.until(lambda: "v1" in str(one.gpu()["checks"]))
    assert healthcheck(["check", "--golden"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for gpu in (0, 1):
        for name in ("NVML", "engine v1", "golden answers v1", "weights v1"):
            (line,) = [line for line in lines if line.startswith(f"gpu {gpu} ") and f" {name} " in line]
            assert " ok " in line, line
    assert healthcheck(["status"]) == 0
    assert healthcheck(["maintenance", "on", "--reason", "driver"]) == 0
    capsys.readouterr()
    assert healthcheck(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["maintenance"]["reason"] == "driver"
    assert healthcheck(["maintenance", "off", "--reason", "done"]) == 0
    assert healthcheck(["inject-fault", "1", "xid:31", "--i-know"]) == 0
    one.until(lambda: one.way(1)[-1:] == ["HEALTHY"])
    assert healthcheck(["history", "--gpu", "1"]) == 0
    assert "xid:31" in capsys.readouterr().out

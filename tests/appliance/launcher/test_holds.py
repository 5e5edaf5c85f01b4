"""Holds: who, how far, and that nothing loses one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from appliance.launcher.holds import Holds
from appliance.statefile import StateError
from tests.appliance.launcher.world import World


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, os.strerror(28))


def test_a_held_launcher_is_ready_says_held_and_runs_nothing(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    Holds(world.paths.holds(0)).add("watchdog", "stop", "XID 79")
    world.start()
    world.run(0.3)
    messages = world.notified()
    assert [message for message in messages if message.get("READY") == "1"]
    assert "held by watchdog: XID 79" in messages[-1]["STATUS"]
    assert world.state()["engines"] == [] and world.state()["admitted"] is False
    assert not world.starts("r1")
    assert world.answer("unhold", owner="watchdog", wait=True) == {"ok": True}
    assert world.engine("r1")["admitted"] and world.state()["admitted"]


def test_a_drain_hold_keeps_the_engine_up_but_not_admitted(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    pid = world.reach("r1", "ready")["pid"]
    world.says("r1", requests={"running": 1, "waiting": 0, "in_flight_http": 1})
    world.run(0.3)
    client = world.ask("hold", owner="operator", reason="fan noise", level="drain", wait=True)
    world.run(1.0)
    assert not world.engine("r1")["admitted"]
    assert client.answer is None  # one request is still in flight
    world.says("r1")
    world.until(lambda: client.answer == {"ok": True})
    assert world.engine("r1")["pid"] == pid
    assert world.answer("restart", wait=True)["ok"]  # allowed: a drain does not forbid engines
    assert not world.engine("r1")["admitted"]


def test_holds_of_several_owners_add_up(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    world.answer("hold", owner="operator", reason="a", level="drain")
    world.answer("hold", owner="watchdog", reason="b", level="stop", wait=True)
    assert world.state()["engines"] == []
    assert "still held by operator: a" in world.answer("unhold", owner="watchdog", wait=True)["note"]
    assert not world.reach("r1", "ready")["admitted"]
    assert world.answer("unhold", owner="operator", wait=True) == {"ok": True}
    assert world.engine("r1")["admitted"]


def test_nothing_else_overrides_a_stop_hold(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    world.answer("hold", owner="watchdog", reason="XID 79", level="stop", wait=True)
    for op, args in (("run", {"release": "r1"}), ("restart", {}), ("replace", {"release": "r1"})):
        reply = world.answer(op, **args)
        assert reply["exit_code"] == 4 and "XID 79" in reply["error"], op
    world.answer("sync")
    world.run(0.2)
    assert world.state()["engines"] == []


def test_a_gpu_that_was_held_comes_back_with_what_the_slots_name_then(world: World) -> None:
    """`release use` leaves out a GPU that is held, and the release that it had may be removed meanwhile."""
    world.add_release("old")
    world.add_release("new")
    world.use("old")
    world.start()
    world.reach("old", "ready")
    for owner in ("watchdog", "operator"):
        assert world.answer("hold", owner=owner, reason="x", level="stop", wait=True) == {"ok": True}
    world.use("new")
    world.answer("unhold", owner="watchdog")
    assert world.answer("unhold", owner="operator", wait=True) == {"ok": True}
    assert [entry["release"] for entry in world.state()["engines"]] == ["new"]
    assert len(world.starts("old")) == 1
    world.use("old")  # nothing but the slot keeps "new"
    assert world.answer("sync", wait=True) == {"ok": True}
    assert [entry["release"] for entry in world.state()["engines"]] == ["old"]


def test_who_waits_for_an_engine_hears_of_a_hold(world: World) -> None:
    world.add_release("r1", status="loading")
    world.start()
    client = world.ask("run", release="r1", wait=True)
    world.reach("r1", "loading")
    world.answer("hold", owner="operator", reason="stop it", level="stop")
    world.until(lambda: client.answer is not None)
    assert client.answer and client.answer["exit_code"] == 4 and "stop it" in client.answer["error"]


def test_the_file_is_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "holds/gpu0.json"
    Holds(path).add("operator", "drain", "fan")
    table = json.loads(path.read_text())
    since = table["holds"]["operator"].pop("since")
    assert isinstance(since, float)
    assert table == {"schema": 1, "holds": {"operator": {"level": "drain", "reason": "fan"}}}
    again = Holds(path)
    again.add("operator", "stop", "fire")  # the same owner asks for more: since stays
    assert json.loads(path.read_text())["holds"]["operator"] == {"level": "stop", "reason": "fire", "since": since}
    again.remove("operator")
    assert len(Holds(path)) == 0


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": 2, "holds": {}}', '{"schema": 1, "holds": []}', '{"schema": 1, "holds": {"a": {}}}',
     '{"schema": 1, "holds": {"a": {"level": "maybe", "reason": "x", "since": 1}}}',
     '{"schema": 1, "holds": {}, "shares": {"a": "much"}}', '{"schema": 1, "holds": {}, "shares": []}'],
)  # fmt: skip
def test_a_file_that_is_not_understood_is_an_error_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpu0.json"
    path.write_text(text)
    with pytest.raises(StateError, match=r"gpu0\.json"):
        Holds(path)
    assert path.read_text() == text


def test_full_disk_a_hold_is_in_force_and_the_caller_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.launcher import holds, launcher

    monkeypatch.setattr(launcher, "_TICK", 0.2)
    world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    with monkeypatch.context() as patch:
        patch.setattr(holds, "write_state", full)
        reply = world.answer("hold", owner="watchdog", reason="XID 79", level="stop")
        assert not reply["ok"] and "No space left" in reply["error"] and "only until" in reply["error"]
        world.until(lambda: world.state()["engines"] == [])
        assert "NOT SAVED" in world.state()["status"]
        assert not world.paths.holds(0).exists()
    world.until(lambda: world.paths.holds(0).exists(), 12)  # tried again by itself
    world.run(0.1)
    assert "NOT SAVED" not in world.state()["status"]


def test_full_disk_an_unhold_does_not_happen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.launcher import holds

    world.start()
    world.answer("hold", owner="watchdog", reason="x", level="stop")
    with monkeypatch.context() as patch:
        patch.setattr(holds, "write_state", full)
        reply = world.answer("unhold", owner="watchdog")
    assert not reply["ok"] and "still held" in reply["error"]
    assert "watchdog" in world.state()["holds"]
    assert "watchdog" in Holds(world.paths.holds(0))


def test_full_disk_state_and_events_go_on_when_there_is_room(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from appliance.launcher import launcher, state

    world.add_release("r1")
    world.use("r1")
    with monkeypatch.context() as patch:
        patch.setattr(state, "write_state", full)
        patch.setattr(launcher, "append_event", full)
        world.start()
        world.until(lambda: world.launcher.engines and world.launcher.engines["r1"].serving)
    world.reach("r1", "ready")
    text = capfd.readouterr().err
    assert "is out of date" in text and "only in the journal" in text


def test_unhold_waits_for_the_engine_and_reports_its_failure(world: World) -> None:
    behave = world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    world.answer("hold", owner="watchdog", reason="x", level="stop", wait=True)
    (behave / "exit").write_text("4")
    reply = world.answer("unhold", owner="watchdog", wait=True)
    assert not reply["ok"] and "exit status 4" in reply["error"]


def test_a_share_is_in_the_state_and_survives_a_restart_beside_the_holds(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    Holds(world.paths.holds(0)).set_share("watchdog", 0.25)
    Holds(world.paths.holds(0)).add("operator", "drain", "fan")
    world.start()
    world.reach("r1", "ready")
    assert world.state()["share"] == 0.25
    assert world.answer("share", owner="canary", share=0.5) == {"ok": True, "share": 0.25}  # the smallest counts
    assert world.answer("share", owner="watchdog", share=1) == {"ok": True, "share": 0.5}
    world.until(lambda: world.state()["share"] == 0.5)
    world.answer("unhold", owner="operator")
    assert json.loads(world.paths.holds(0).read_text()) == {"schema": 1, "holds": {}, "shares": {"canary": 0.5}}
    world.answer("share", owner="canary", share=1.0)
    world.until(lambda: world.state()["share"] == 1.0)
    assert json.loads(world.paths.holds(0).read_text()) == {"schema": 1, "holds": {}}


def test_from_stopped_to_drained_the_engine_that_comes_back_is_the_slots(world: World) -> None:
    world.add_release("r1")
    world.add_release("r2")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    assert world.answer("hold", owner="watchdog", reason="XID 48", level="stop", wait=True) == {"ok": True}
    world.use("r2")  # a change of releases leaves out a GPU that is held
    world.answer("hold", owner="watchdog", reason="verify", level="drain")
    assert not world.reach("r2", "ready")["admitted"]
    assert not world.engine("r1")

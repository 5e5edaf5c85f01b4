"""What a launcher does with its engines, seen in state.json, the event log and the engines' own notes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from appliance.events import read_events
from appliance.launcher.scope import Findings
from tests.appliance.launcher.world import World

NewWorld = Callable[..., World]


def test_the_release_of_the_stable_slot_comes_up_ready_and_admitted(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    entry = world.reach("r1", "ready")
    assert entry["admitted"] is True
    assert entry["scope"] == "appliance-gpu0-r1.scope"
    assert entry["pid"] == world.starts("r1")[0]["pid"] == world.scopes.pids["r1"]  # what was put in the scope is it
    assert world.history("r1") == ["starting", "loading", "ready"]


def test_what_the_engine_gets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_LAUNCHER", "x")
    world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    start = world.starts("r1")[0]
    argv = start["argv"]
    assert argv[argv.index("--uds") + 1] == str(world.paths.engine_socket(0, "r1"))
    assert argv[argv.index("--model-dir") + 1] == str(world.paths.release("r1") / "model")
    assert argv[argv.index("--backend") + 1] == "cpu"
    assert "SECRET_OF_THE_LAUNCHER" not in start["env"]
    assert "NOTIFY_SOCKET" not in start["env"]


def test_nothing_starts_before_the_leftovers_are_stopped(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    held: list[Callable[[dict[str, Any]], None]] = []
    world.scopes.clean = lambda gpu, *, kill, seconds, done: held.append(done)  # type: ignore[method-assign]
    world.start()
    world.run(0.3)
    assert not world.starts("r1")
    held[0]({"ok": True, "stopped": ["appliance-gpu0-old.scope"]})
    world.reach("r1", "ready")


def test_a_killed_engine_is_started_again_and_counted(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    first = world.reach("r1", "ready")["pid"]
    os.kill(first, signal.SIGKILL)
    world.until(lambda: world.engine("r1").get("state") == "ready" and world.engine("r1")["pid"] != first)
    entry = world.engine("r1")
    assert entry["restarts"] == 1
    assert "SIGKILL" in entry["last_exit"]
    assert world.history("r1")[3:] == ["stopping", "backoff", "starting", "loading", "ready"]


def test_it_gives_up_after_the_limit_and_comes_back_when_asked(world: World) -> None:
    behave = world.add_release("r1")
    (behave / "exit").write_text("1")
    world.use("r1")
    world.start()
    entry = world.reach("r1", "failed")
    assert len(world.starts("r1")) == 3  # [restart] limit
    assert "exit status 1" in entry["last_exit"]
    world.run(0.4)
    assert len(world.starts("r1")) == 3
    (behave / "exit").unlink()
    assert world.answer("restart", release="r1", wait=True) == {"ok": True}
    assert world.engine("r1")["state"] == "ready"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            b"a context of 1 tokens holds no prompt; --max-model-len >= 2\0old",
            ": a context of 1 tokens holds no prompt; --max",
        ),
        (b"\x1b[2J two\nlines \xff" + b"x" * 900, ": \\x1b[2J two lines \ufffdxxx"),
        (b"", "; see `appliance logs --gpu 0`"),
    ],
)
def test_the_engines_own_last_sentence_is_in_its_end(world: World, said: bytes, shown: str) -> None:
    behave = world.add_release("r1")
    (behave / "exit").write_text("4")
    (behave / "words").write_bytes(said)
    world.use("r1")
    world.start()
    text = world.reach("r1", "failed")["last_exit"]
    assert text.startswith(f"exit status 4 (refused: configuration, model or sizes){shown}") and len(text) < 500


@pytest.mark.parametrize("status", [2, 4])
def test_a_refusal_of_the_engine_is_not_repeated(world: World, status: int) -> None:
    (world.add_release("r1") / "exit").write_text(str(status))
    world.use("r1")
    world.start()
    assert f"exit status {status}" in world.reach("r1", "failed")["last_exit"]
    world.run(0.4)
    assert len(world.starts("r1")) == 1


def test_a_broken_release_json_fails_with_the_file_and_the_key(world: World) -> None:
    world.add_release("r1")
    path = world.paths.release("r1") / "release.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_bytes": "many"}))
    world.use("r1")
    world.start()
    entry = world.reach("r1", "failed")
    assert "release.json" in entry["last_exit"] and "model_bytes" in entry["last_exit"]


def test_a_scope_that_is_not_as_asked_stops_the_engine_before_it_ran(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.scopes.findings = Findings(wrong=("memory.max is 'max', not '1000'",))
    world.start()
    assert "memory.max" in world.reach("r1", "failed")["last_exit"]
    assert not world.starts("r1")


def test_what_could_not_be_checked_is_said_aloud(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.scopes.findings = Findings(unknown=("no memory controller: its limits do not bite",))
    world.start()
    world.reach("r1", "ready")
    world.run(0.1)
    assert "no memory controller" in world.state()["status"]
    assert any("no memory controller" in message.get("STATUS", "") for message in world.notified())


def test_systemd_that_fails_leads_to_backoff_and_no_engine(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.scopes.start_error = "systemd did not answer within 20 s"
    world.start()
    world.until(lambda: len(world.scopes.plans) == 2)
    world.scopes.start_error = None
    world.reach("r1", "ready")
    assert len(world.starts("r1")) == 1


def test_systemd_may_be_late_more_often_than_an_engine_may_end(world: World) -> None:
    """As on a host that is just booting: no GPU stays out of service for it."""
    world.add_release("r1")
    world.use("r1")
    world.scopes.start_error = "systemd did not answer within 20 s"
    world.start()
    limit = world.launcher.config.restart.limit
    world.until(lambda: len(world.scopes.plans) > limit + 1)
    world.scopes.start_error = None
    world.reach("r1", "ready")


def test_no_process_to_be_had_is_backoff_not_the_end_of_the_launcher(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    real, calls = world.launcher.around.spawn, []

    def spawn(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(*args)

    world.launcher.around.spawn = spawn
    world.reach("r1", "ready")
    assert world.history("r1")[0] == "backoff"


def test_a_gpu_that_is_away_is_tried_again_then_failed(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.paths.config.write_text(world.paths.config.read_text().replace('"cpu"', '"cuda"'))
    world.start()
    entry = world.reach("r1", "failed")
    assert "GPU CPU-0 is not there" in entry["last_exit"]
    assert world.history("r1") == ["backoff", "backoff", "failed"]


@pytest.mark.parametrize("state", ["failed", "backoff"])
def test_a_reload_starts_what_had_given_up(world: World, state: str) -> None:
    """systemd/README.md, "After a reload of the driver": it failed for want of its device, which is there again."""
    config = world.paths.config
    if state == "backoff":
        config.write_text(config.read_text().replace("_delay = 0.05", "_delay = 60").replace("= 0.2", "= 60"))
    behave = world.add_release("r1")
    (behave / "exit").write_text("1")
    world.use("r1")
    world.start()
    world.reach("r1", state)
    (behave / "exit").unlink()
    world.launcher.sync()  # SIGHUP
    world.reach("r1", "ready")


def test_an_engine_on_the_wrong_device_does_not_serve(world: World) -> None:
    world.add_release("r1", engine={"backend": "cuda"})
    world.use("r1")
    world.start()
    assert "cuda" in world.reach("r1", "failed")["last_exit"]
    assert "ready" not in world.history("r1")


def test_a_stalled_engine_is_killed_and_started_again(new_world: NewWorld) -> None:
    world = new_world(stall_timeout=0.5)
    world.add_release("r1", requests={"running": 1, "waiting": 2, "in_flight_http": 3})
    world.use("r1")
    world.start()
    first = world.reach("r1", "ready")["pid"]
    world.until(lambda: world.engine("r1")["restarts"] == 1, 15)
    assert "no step for" in world.engine("r1")["last_exit"]
    assert world.engine("r1")["pid"] != first


def test_an_idle_engine_is_not_stalled(new_world: NewWorld) -> None:
    world = new_world(stall_timeout=0.4)
    world.add_release("r1")
    world.use("r1")
    world.start()
    first = world.reach("r1", "ready")["pid"]
    world.run(1.2)
    assert world.engine("r1")["pid"] == first


def test_an_engine_that_does_not_answer_is_killed(new_world: NewWorld) -> None:
    world = new_world(stall_timeout=1)
    behave = world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    (behave / "silent").touch()
    world.until(lambda: "no answer for" in str(world.engine("r1").get("last_exit")), 40)


def test_a_load_without_progress_is_killed(new_world: NewWorld) -> None:
    world = new_world(start_timeout=1)
    world.add_release("r1", status="loading", loading={"phase": "read", "done_bytes": 10, "total_bytes": 40})
    world.use("r1")
    world.start()
    world.until(lambda: world.engine("r1").get("progress") == 0.25)
    world.until(lambda: "no progress of the load" in str(world.engine("r1").get("last_exit")), 15)


def test_a_load_with_progress_is_not(new_world: NewWorld) -> None:
    world = new_world(start_timeout=0.5)
    world.add_release("r1", status="loading")
    world.use("r1")
    world.start()
    for step in range(1, 9):
        world.says("r1", status="loading", loading=step / 10)
        world.run(0.2)
    world.says("r1")
    world.reach("r1", "ready")
    assert len(world.starts("r1")) == 1


def test_an_engine_that_drains_by_itself_is_not_admitted(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    world.says("r1", status="draining", draining="by hand")
    world.until(lambda: not world.engine("r1")["admitted"])
    assert world.engine("r1")["problem"] == "draining"
    world.says("r1")
    world.until(lambda: world.engine("r1")["admitted"])


# -- releases


def test_two_releases_side_by_side_and_the_old_one_drained(world: World) -> None:
    world.add_release("old")
    world.add_release("new")
    world.use("old")
    world.start()
    world.reach("old", "ready")
    assert world.answer("run", release="new", wait=True) == {"ok": True}
    assert world.engine("old")["admitted"] and world.engine("new")["admitted"]
    world.use("new")
    assert world.answer("sync", wait=True) == {"ok": True}
    assert world.engine("old") == {} and world.engine("new")["admitted"]
    assert world.history("old")[-3:] == ["draining", "stopping", "gone"]
    world.use("old")  # the lease of "new" went when a slot named it: nothing keeps it now
    assert world.answer("sync", wait=True) == {"ok": True}
    assert world.engine("new") == {}


def test_not_admitted_is_published_before_the_engine_hears_of_it(world: World) -> None:
    behave = world.add_release("r1")
    (behave / "drain").write_text("1")
    world.use("r1")
    world.start()
    pid = world.reach("r1", "ready")["pid"]
    world.ask("hold", owner="operator", reason="x", level="stop")
    world.reach("r1", "draining")
    assert not world.engine("r1")["admitted"]
    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    world.until(lambda: world.engine("r1") == {})


def test_an_undone_run_leaves_nothing(world: World) -> None:
    world.add_release("old")
    (world.add_release("new") / "exit").write_text("4")
    world.use("old")
    world.start()
    world.reach("old", "ready")
    failed = world.answer("run", release="new", wait=True)
    assert not failed["ok"] and "exit status 4" in failed["error"] and "journalctl" in failed["hint"]
    assert world.answer("stop", release="new", wait=True)["stopped"] is True
    assert [entry["release"] for entry in world.state()["engines"]] == ["old"]


def test_exclusive_replace_and_its_undo(new_world: NewWorld) -> None:
    world = new_world(placement="exclusive")
    world.add_release("old")
    (world.add_release("bad") / "exit").write_text("4")
    world.add_release("new")
    world.use("old")
    world.start()
    world.reach("old", "ready")
    refused = world.answer("run", release="new")
    assert refused["exit_code"] == 4 and "exclusive" in refused["error"]
    assert not world.answer("replace", release="bad", wait=True)["ok"]
    assert world.answer("stop", release="bad")["ok"]
    assert world.answer("sync", wait=True) == {"ok": True}
    assert world.engine("old")["state"] == "ready"
    assert world.answer("replace", release="new", wait=True) == {"ok": True}
    assert [entry["release"] for entry in world.state()["engines"]] == ["new"]
    assert world.history("new") == ["starting", "loading", "ready"]


def test_one_device_never_has_two_engines_when_exclusive(new_world: NewWorld) -> None:
    world = new_world(placement="exclusive")
    (world.add_release("old") / "drain").write_text("0.7")
    world.add_release("new")
    world.use("old")
    world.start()
    world.reach("old", "ready")
    client = world.ask("replace", release="new", wait=True)

    def alive(name: str) -> bool:
        return any(e.live for e in world.launcher.engines.values() if e.release == name)

    seen_both = []
    world.until(lambda: seen_both.append(alive("old") and alive("new")) or client.answer is not None)
    assert client.answer == {"ok": True}
    assert not any(seen_both)


def test_stopping_what_a_slot_names_keeps_it(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    reply = world.answer("stop", release="r1", wait=True)
    assert reply["ok"] and reply["stopped"] is False


def test_wanted_again_while_it_drains(world: World) -> None:
    behave = world.add_release("r1")
    (behave / "drain").write_text("0.5")
    world.start()
    assert world.answer("run", release="r1", wait=True) == {"ok": True}
    world.ask("stop", release="r1")
    world.reach("r1", "draining")
    assert world.answer("run", release="r1", wait=True) == {"ok": True}
    assert world.engine("r1")["state"] == "ready" and len(world.starts("r1")) == 2


def test_a_deaf_engine_is_killed_in_the_end(new_world: NewWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.launcher import engine_process

    monkeypatch.setattr(engine_process, "_STOP_GRACE", -1.5)
    world = new_world()
    (world.add_release("r1") / "deaf").touch()
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    began = time.monotonic()
    assert world.answer("hold", owner="operator", reason="x", level="stop", wait=True) == {"ok": True}
    assert time.monotonic() - began >= 0.5
    assert world.state()["engines"] == []


def test_abort_does_not_wait(world: World) -> None:
    (world.add_release("r1") / "deaf").touch()
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    reply = world.answer("hold", owner="watchdog", reason="XID 79", level="stop", mode="abort", wait=True)
    assert reply == {"ok": True}
    assert "draining" not in world.history("r1")


def test_the_end_of_the_launcher_drains_and_leaves_no_state_file(world: World) -> None:
    (world.add_release("r1") / "drain").write_text("0.3")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    world.notified()
    world.launcher.terminate()
    assert world.loop.run(timeout=10)
    assert world.history("r1")[-3:] == ["draining", "stopping", "gone"]
    assert "1" in [message.get("STOPPING") for message in world.notified()]
    world.launcher.close()
    assert not world.paths.launcher_state(0).exists()
    assert not world.paths.control_socket(0).exists()


def test_giving_up_records_what_became_of_the_gpu(world: World) -> None:
    """A GPU that the driver does not show: tried again, given up, and the event says what was seen of it."""
    world.add_release("r1")
    world.use("r1")
    world.paths.config.write_text(world.paths.config.read_text().replace('"cpu"', '"cuda"'))
    world.start()
    world.reach("r1", "failed")
    first, *_, last = [event for event in read_events(world.paths.events) if event["event"] == "engine"]
    assert last["state"] == "failed" and last["gpu_state"] in ("no-driver", "not-shown", "off-bus")
    assert first["state"] == "backoff" and "gpu_state" not in first


def test_without_a_gpu_there_are_no_facts_of_one(world: World) -> None:
    (world.add_release("r1") / "exit").write_text("4")
    world.use("r1")
    world.start()
    world.reach("r1", "failed")
    assert not [event for event in read_events(world.paths.events) if "gpu_state" in event]

"""What systemd hears, in order."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import pytest

from appliance.launcher import launcher
from tests.appliance.launcher.world import World

NewWorld = Callable[..., World]


def test_ready_comes_after_the_warm_up_not_before(world: World) -> None:
    world.add_release("r1", status="loading", loading=0.5)
    world.use("r1")
    world.start()
    world.until(lambda: "50 %" in world.state()["status"])
    before = world.notified()
    assert not any("READY" in message for message in before)
    assert "r1 loading 50 %" in [message.get("STATUS") for message in before]
    world.says("r1")
    world.reach("r1", "ready")
    world.run(0.1)
    after = world.notified()
    assert [message["READY"] for message in after if "READY" in message] == ["1"]


@pytest.mark.parametrize("state", ["ready", "no release"])
def test_a_systemd_that_does_not_listen_for_a_while_hears_of_ready_later(world: World, state: str) -> None:
    """While it executes itself again (`systemctl daemon-reexec`), or when its queue is full."""
    if state == "ready":
        world.add_release("r1")
        world.use("r1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as other:
        other.connect(world.environ["NOTIFY_SOCKET"])
        with contextlib.suppress(BlockingIOError):
            while True:
                other.send(b"STATUS=of somebody else")
    world.start()
    if state == "ready":
        world.reach("r1", "ready")
    world.run(0.3)
    assert not any("READY" in message for message in world.notified())
    said: list[dict[str, str]] = []
    for _ in range(25):
        world.run(0.1)
        said += world.notified()
    assert [message["READY"] for message in said if "READY" in message] == ["1"]


def test_more_time_is_asked_for_while_it_loads_and_not_after(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_TICK", 0.1)
    world.add_release("r1", status="loading", loading=0.1)
    world.use("r1")
    world.start()
    world.reach("r1", "loading")
    world.run(0.5)
    asked = [int(m["EXTEND_TIMEOUT_USEC"]) for m in world.notified() if "EXTEND_TIMEOUT_USEC" in m]
    assert len(asked) >= 3 and min(asked) > 5 * 0.1 * 1e6  # longer than until it asks again
    world.says("r1")
    world.reach("r1", "ready")
    world.run(0.1)
    world.notified()
    world.run(0.5)
    assert not any("EXTEND_TIMEOUT_USEC" in message for message in world.notified())


def test_a_load_that_stands_still_gets_no_more_time(new_world: NewWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_TICK", 0.05)
    monkeypatch.setattr(launcher, "_EXTEND_SECONDS", 0)
    world = new_world(start_timeout=0.6)
    world.add_release("r1", status="loading", loading=0.1)
    world.use("r1")
    world.start()
    world.reach("r1", "loading")
    engine = world.launcher.engines["r1"]
    engine._told = lambda reply: None  # type: ignore[method-assign]  # nobody notices that it stands still
    world.run(0.8)
    world.notified()
    world.run(0.4)
    assert not any("EXTEND_TIMEOUT_USEC" in message for message in world.notified())


def test_more_time_is_asked_for_while_it_drains(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_TICK", 0.1)
    (world.add_release("r1") / "drain").write_text("0.8")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    world.run(0.1)
    world.notified()
    world.launcher.terminate()
    assert world.loop.run(timeout=10)
    keys = [key for message in world.notified() for key in message]
    assert keys[0] == "STOPPING" and keys.count("EXTEND_TIMEOUT_USEC") >= 3


def test_no_release_is_ready_and_says_what_to_do(world: World) -> None:
    world.start()
    world.run(0.1)
    message = [message for message in world.notified() if "READY" in message]
    assert len(message) == 1 and "no release" in message[0]["STATUS"]


def test_an_engine_that_gave_up_makes_it_ready_and_says_failed(world: World) -> None:
    (world.add_release("r1") / "exit").write_text("4")
    world.use("r1")
    world.start()
    world.reach("r1", "failed")
    world.run(0.1)
    message = [message for message in world.notified() if "READY" in message]
    assert len(message) == 1 and "r1 failed: exit status 4" in message[0]["STATUS"]


def test_the_watchdog_hears_from_the_loop(world: World) -> None:
    world.environ["WATCHDOG_USEC"] = "300000"
    world.start()
    world.run(0.65)
    beats = [message for message in world.notified() if "WATCHDOG" in message]
    assert len(beats) >= 6  # every 0.1 s, a third of the limit


def test_no_watchdog_where_nobody_waits_for_it(world: World) -> None:
    world.start()
    world.run(0.2)
    assert not any("WATCHDOG" in message for message in world.notified())

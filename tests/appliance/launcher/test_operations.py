"""Requests with wrong arguments: always one reply in words, never the end of the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.appliance.launcher.world import World

OPS = ["status", "run", "stop", "replace", "sync", "restart", "hold", "unhold", "share"]
KEYS = ["release", "owner", "share", "reason", "level", "mode", "wait", "timeout", "other"]
VALUES: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=600)
    | st.lists(st.integers(), max_size=2) | st.sampled_from(["drain", "stop", "abort", "r1", "operator", "../r1"])
)  # fmt: skip


@pytest.mark.parametrize(
    ("op", "args", "words"),
    [
        ("dance", {}, "unknown op"),
        ("run", {}, "release"),
        ("run", {"release": "../../etc"}, "release"),
        ("run", {"release": "nothere"}, "there is no release 'nothere'"),
        ("run", {"release": "r1", "force": True}, "'force'"),
        ("run", {"release": "r1", "wait": "yes"}, "wait"),
        ("run", {"release": "r1", "timeout": -1}, "timeout"),
        ("run", {"release": "r1", "timeout": float("nan")}, "timeout"),
        ("hold", {"owner": "Me!", "reason": "x"}, "owner"),
        ("hold", {"owner": "operator"}, "reason"),
        ("hold", {"owner": "operator", "reason": "x" * 501}, "reason"),
        ("hold", {"owner": "operator", "reason": "x", "level": "maybe"}, "level"),
        ("hold", {"owner": "operator", "reason": "x", "mode": "abort"}, "abort goes with level stop"),
        ("restart", {"release": "nothere"}, "no engine of release"),
        ("restart", {"release": ["r1"]}, "release"),
        ("hold", {"owner": "operator", "reason": "two\nlines"}, "reason"),
        ("hold", {"owner": "operator", "reason": "\ud800"}, "reason"),
        ("share", {"owner": "watchdog"}, "share"),
        ("share", {"owner": "watchdog", "share": True}, "share"),
        ("share", {"owner": "watchdog", "share": 1.01}, "share"),
        ("share", {"owner": "watchdog", "share": float("nan")}, "share"),
        ("share", {"owner": "Me!", "share": 0.5}, "owner"),
    ],
)
def test_wrong_arguments_are_named(world: World, op: str, args: dict[str, Any], words: str) -> None:
    world.add_release("r1")
    world.start()
    reply = world.answer(op, **args)
    assert reply["ok"] is False and words in reply["error"]
    assert reply["exit_code"] in (2, 4)


def test_a_wait_ends_in_time(world: World) -> None:
    world.add_release("r1", status="loading")
    world.start()
    reply = world.answer("run", release="r1", wait=True, timeout=0.3)
    assert reply["exit_code"] == 3 and "r1" in reply["error"]
    assert world.engine("r1")  # it goes on


def test_without_wait_the_answer_is_at_once(world: World) -> None:
    world.add_release("r1", status="loading")
    world.start()
    assert world.ask("run", release="r1").answer == {"ok": True}


def test_status_is_the_state_file(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    reply = world.answer("status")
    assert reply["state"] | {"schema": 1} == world.state()


def test_a_broken_configuration_is_not_taken_at_sync(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")
    world.paths.config.write_text("[engine]\nplacement = 'somewhere'\n")
    assert world.answer("sync", wait=True) == {"ok": True}
    assert world.launcher.config.engine.placement == "shared"
    world.paths.config.write_text("[gpus]\nbackend = 'cpu'\n[engine]\nplacement = 'exclusive'\n")
    assert world.answer("sync", wait=True) == {"ok": True}
    assert world.launcher.config.engine.placement == "exclusive"


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(op=st.sampled_from(OPS), args=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_arguments_get_one_answer(tmp_path_factory: pytest.TempPathFactory, op: str, args: dict[str, Any]) -> None:
    world = _shared(tmp_path_factory)
    client = world.ask(op, **args | {"timeout": 0.0} if args.get("wait") is True else args)
    world.loop.run(until=lambda: client.answer is not None, timeout=5)
    assert client.answer is not None and isinstance(client.answer["ok"], bool)
    if not client.answer["ok"]:
        assert client.answer["error"] and client.answer["exit_code"] in (1, 2, 3, 4)


_worlds: list[World] = []


def _shared(factory: pytest.TempPathFactory) -> World:
    """One launcher for all examples: it has to survive them."""
    if not _worlds:
        root: Path = factory.mktemp("fuzz")
        world = World(root)
        world.start()
        _worlds.append(world)
    return _worlds[0]


@pytest.fixture(scope="module", autouse=True)
def _end() -> Any:
    yield
    while _worlds:
        _worlds.pop().close()

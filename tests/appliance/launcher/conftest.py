from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from appliance.launcher import engine_process
from tests.appliance.launcher.world import World


@pytest.fixture
def new_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """`new_world(**options)`; not started yet. Engines are looked at more often than in earnest."""
    monkeypatch.setattr(engine_process, "LOADING_POLL", 0.03)
    monkeypatch.setattr(engine_process, "READY_POLL", 0.1)
    monkeypatch.setattr(engine_process, "ADMISSION_LEAD", 0.1)
    monkeypatch.setattr(engine_process, "_QUESTION_SECONDS", 0.3)
    with ExitStack() as stack:

        def make(**options: Any) -> World:
            world = World(tmp_path, **options)
            stack.callback(world.close)
            return world

        yield make


@pytest.fixture
def world(new_world: Callable[..., World]) -> World:
    return new_world()

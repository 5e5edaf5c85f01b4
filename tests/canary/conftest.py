from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.canary.world import World


def _directory() -> str | None:
    """In memory where there is such a place: fsyncs of a sweep are slow on a shared disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(scope="session")
def shared_world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir=_directory()) as root:
        made = World(Path(root), gpus=2)
        yield made
        made.close()


@pytest.fixture
def world(shared_world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Two GPUs, shared placement, v1 in service."""
    monkeypatch.setenv("APPLIANCE_ROOT", str(shared_world.paths.etc.parents[1]))
    shared_world.reset()
    return shared_world


@pytest.fixture(scope="session")
def exclusive_session() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir=_directory()) as root:
        made = World(Path(root), gpus=4, config='[engine]\nplacement = "exclusive"\n')
        yield made
        made.close()


@pytest.fixture
def exclusive(exclusive_session: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Four GPUs, exclusive placement."""
    monkeypatch.setenv("APPLIANCE_ROOT", str(exclusive_session.paths.etc.parents[1]))
    exclusive_session.reset()
    return exclusive_session

"""A host with launchers and engines that the tests of the running watchdog share: it takes ten seconds to make."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.healthcheck.watchdog_world import World, fresh, world


@pytest.fixture(scope="session")
def watchdog_host() -> Iterator[World]:
    with world(2) as one:
        one.launch()
        one.release()
        yield one


@pytest.fixture
def one(watchdog_host: World) -> Iterator[World]:
    """Each test starts its own watchdog, on a ledger that is all HEALTHY."""
    yield from fresh(watchdog_host)

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from appliance.paths import Paths

from .world import Front, Host, fronted


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that the product runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    """In a directory with a short name: a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gw") as directory:
        host = Host(Paths.under(Path(directory)))
        host.point("stable", "r1")
        yield host
        await host.close()


@pytest.fixture
async def front(host: Host) -> AsyncIterator[Callable[..., Any]]:
    """`await front(**options)`: a gateway before the engines that `host` has."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> Front:
            return await stack.enter_async_context(fronted(host, **options))

        yield start

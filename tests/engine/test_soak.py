"""A short soak of the real server: every kind of request, errors, aborts, disconnects; nothing may be left behind."""

from __future__ import annotations

import os

import pytest

from tests.bench.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("processes")
async def test_soak_leaves_nothing_behind() -> None:
    """Pages free = start, no 5xx, memory flat after the caches have filled (20,000 requests with APPLIANCE_FULL=1)."""
    full = os.environ.get("APPLIANCE_FULL") == "1"
    result = await soak(20_000 if full else 1_000)
    assert result.pages[0] == result.pages[1]
    assert not result.server_errors
    if full:  # a short run is still filling free lists and caches
        assert max(result.growth_mib.values()) < 8, result.memory_mib

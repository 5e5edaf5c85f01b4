"""For all tests: the test hosts' fixtures and reports, and temporary directories with short names."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.host.plugin"]

_FAILED = pytest.StashKey[bool]()
_LONGEST = 24  # of a TMPDIR that leaves room for /run/appliance/gpuN/engines/RELEASE.sock below


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As pytest's, but short: the address of a Unix socket has at most 107 bytes, and pytest's own names (user, run,
    xdist's worker, the test) alone may be longer. What a failed test leaves is moved to where pytest keeps such."""
    place = tempfile.gettempdir()
    path = Path(tempfile.mkdtemp(prefix="ap-", dir=place if len(place) <= _LONGEST else "/tmp"))
    yield path
    if request.node.stash.get(_FAILED, False):
        kept = tmp_path_factory.mktemp(request.node.name[:30].replace("/", "_"))
        shutil.move(path, kept)
    shutil.rmtree(path, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report

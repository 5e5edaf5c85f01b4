"""Both real processes with the CUDA backend: every test of tests/engine/test_processes.py once more, on the GPU, and
what only a GPU has to show."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.engine import test_processes as processes
from tests.engine.test_processes import *  # noqa: F403 - the tests themselves
from tests.gpu.device import Gpu
from tests.serving import MODEL, Server
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def on_the_gpu(gpu: Gpu) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APPLIANCE_TEST_BACKEND", "cuda")
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / MODEL, poison_token=processes.POISON)


@pytest.fixture
async def server(model_dir: Path) -> AsyncIterator[Server]:
    """A tenth of the GPU: the session's own context and a second server must fit beside it."""
    started = await Server.start(model_dir, "--kv-tokens", "16384", "--gpu-memory-fraction", "0.1")
    try:
        yield started
    finally:
        await started.stop()


async def test_the_step_ring_is_readable_from_outside(server: Server) -> None:
    """Another process prints percentiles of the steps of a running engine."""
    async with aiohttp.ClientSession() as session:
        await processes.complete(session, server, max_tokens=40, ignore_eos=True)
    (path,) = {match[1] for line in server.log_lines() if (match := re.search(r"step_ring (/proc/\d+/fd/\d+)", line))}
    printed = subprocess.run(
        [sys.executable, "-m", "engine.cuda.step_ring", path], capture_output=True, text=True, timeout=60
    )
    assert printed.returncode == 0 and "decode_graph" in printed.stdout, printed.stdout + printed.stderr

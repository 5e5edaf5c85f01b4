"""The real server as a child of a test: two processes on a free loopback port, stopped by whoever started it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

import aiohttp
import psutil

from engine.spawn import python_env, python_module

MODEL = "tiny"
START_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """A killed test run leaves no server behind (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """The endpoint on a free loopback port, with its two processes' memory and metrics in reach."""

    url: str
    port: int

    def __init__(self, process: asyncio.subprocess.Process, log: IO[str]) -> None:
        self.process, self._log = process, log

    @classmethod
    async def start(cls, model_dir: Path, *options: str, backend: str | None = None) -> Server:
        """With `--port 0`; the port is read from the log. Raises, with the log's end, when it does not become ready.

        backend: default $APPLIANCE_TEST_BACKEND or cpu, so that tests/gpu runs the endpoint's tests once more."""
        backend = backend or os.environ.get("APPLIANCE_TEST_BACKEND", "cpu")
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the Server
        process = await asyncio.create_subprocess_exec(
            *python_module("engine"), "--model-dir", str(model_dir), "--model-name", MODEL, "--backend", backend,
            "--port", "0", *options, stderr=log, env=python_env(), preexec_fn=_die_with_parent,
        )  # fmt: skip
        server = cls(process, log)
        try:
            await asyncio.wait_for(server._wait_ready(), START_SECONDS)
        except BaseException as error:
            tail = server.log_lines()[-20:]
            await server.kill()
            raise RuntimeError("the server did not become ready:\n" + "\n".join(tail)) from error
        return server

    async def _wait_ready(self) -> None:
        while self.process.returncode is None:
            for line in self.log_lines():
                event = json.loads(line)
                if event["event"] == "listening" and "url" not in self.__dict__:
                    port = re.search(r"'127\.0\.0\.1', (\d+)", event["msg"])
                    assert port, event
                    self.port = int(port[1])
                    self.url = f"http://127.0.0.1:{self.port}"
                if event["event"] == "ready":
                    return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"it ended with status {self.process.returncode}")

    def log_lines(self) -> list[str]:
        """What it logged so far, one JSON object a line."""
        self._log.seek(0)
        return [line for line in self._log.read().splitlines() if line.startswith("{") and line.endswith("}")]

    def memory_mib(self) -> tuple[float, float]:
        api = psutil.Process(self.process.pid)
        core = [p for p in api.children() if "engine.core" in " ".join(p.cmdline())]
        return api.memory_info().rss / 2**20, sum(p.memory_info().rss for p in core) / 2**20

    async def metric(self, session: aiohttp.ClientSession, name: str) -> float:
        async with session.get(self.url + "/metrics") as response:
            text = await response.text()
        match = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)
        assert match, f"no metric {name}"
        return float(match.group(1))

    async def stop(self) -> int:
        """SIGTERM, then SIGKILL after a minute; the exit status."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.process.wait(), 60)
        except TimeoutError:
            await self.kill()
            raise
        finally:
            self._log.close()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, _type: type | None, _value: BaseException | None, _trace: TracebackType | None) -> None:
        await self.stop()

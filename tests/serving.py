"""The real server as a child of a test: two processes on a free loopback port, stopped by whoever started it."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType

import aiohttp
import psutil

MODEL = "tiny"


class Server:
    """The endpoint on a free loopback port, with its two processes' memory and metrics in reach."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}"

    @classmethod
    async def start(cls, model_dir: Path, *options: str) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine", "--model-dir", str(model_dir), "--model-name", MODEL, "--backend", "cpu",
            "--port", str(port), *options,
        )  # fmt: skip
        server = cls(process, port)
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                try:
                    async with session.get(server.url + "/readyz") as response:
                        if response.status == 200:
                            return server
                except aiohttp.ClientError:
                    pass
                if process.returncode is not None:
                    break
                await asyncio.sleep(0.1)
        raise RuntimeError("the server did not become ready")

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
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 60)

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, _type: type | None, _value: BaseException | None, _trace: TracebackType | None) -> None:
        await self.stop()

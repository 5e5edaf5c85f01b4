"""A host without GPUs: launcher state files, slot pointers, engines that do what a test says, and a gateway in front.

An engine is a small HTTP server on a Unix socket. It knows only its own few lines of HTTP, so it is no mirror of the
gateway's parser.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from appliance.gateway.server import Worker, admin_listeners, public_socket
from appliance.gateway.settings import Settings, make_settings
from appliance.hostconfig import Gateway, HostConfig
from appliance.paths import Paths
from appliance.statefile import write_state


@dataclass
class Received:
    """One request as an engine saw it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the gateway closed this connection

    def get(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) <= 1, values
        return values[0] if values else None


Script = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def answer(status: int = 200, body: bytes = b'{"ok":true}', headers: str = "", kind: str = "application/json") -> bytes:
    return (
        f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body
    )


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-Appliance-Seed: 7\r\n"
    b"X-Appliance-Created: 1700000000\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(index: int, number: int) -> bytes:
    """Event `number` (from 1) of a choice, as an engine with X-Appliance-Relay writes it."""
    return b'id: %d:%d.0.1.-.00000000\ndata: {"i":%d,"t":"%d "}\n\n' % (index, number, index, number)


DONE = b"data: [DONE]\n\n"


def resumed(request: Received) -> dict[int, int]:
    """How far each choice is, by X-Appliance-Resume."""
    value = request.get("X-Appliance-Resume")
    entries = value.split(",") if value else []
    return {int(entry.split(":")[0]): int(entry.split(":")[1].split(".")[0]) for entry in entries}


def counting(total: int, *, choices: int = 1, cut_after: int | None = None, delay: float = 0.0) -> Script:
    """Streams events 1..total of each choice, from where the request wants to go on; drops the connection after
    `cut_after` events."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        at = resumed(request)
        writer.write(STREAM_HEAD)
        sent = 0
        for number in range(1, total + 1):
            for index in range(choices):
                if number <= at.get(index, 0):
                    continue
                if sent == cut_after:
                    await writer.drain()
                    writer.transport.abort()
                    return
                writer.write(chunk(event(index, number)))
                sent += 1
                if delay:
                    await writer.drain()
                    await asyncio.sleep(delay)
        writer.write(chunk(DONE) + b"0\r\n\r\n")
        await writer.drain()

    return script


async def ok(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer())


async def no_metrics(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(body=b"", kind="text/plain"))


class FakeEngine:
    """Answers /livez by itself, /metrics by `metrics` and everything else by `script`."""

    def __init__(self, path: Path, script: Script = ok) -> None:
        self.path, self.script = path, script
        self.metrics: Script = no_metrics
        self.requests: list[Received] = []
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def die(self) -> None:
        """As SIGKILL: connections break, the socket file stays and refuses."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        try:
            while (request := await self._read(reader)) is not None:
                if request.target == "/livez":
                    writer.write(answer())
                    continue
                if request.target == "/metrics":
                    await self.metrics(request, writer)
                    continue
                self.requests.append(request)
                work = asyncio.ensure_future(self.script(request, writer))
                watch = asyncio.ensure_future(_gone(reader, writer))
                try:
                    await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    watch.cancel()
                    work.cancel()
                try:
                    await work
                except (asyncio.CancelledError, ConnectionError):
                    request.gone.set()
                except RuntimeError as error:  # uvloop's word for a write after the end
                    assert "closed" in str(error)
                    request.gone.set()
                if writer.is_closing() or request.gone.is_set():
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Received | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("utf-8", "surrogateescape")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head[:-4].split("\r\n")
        method, target, _ = first.split(" ")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        return Received(method, target, headers, await reader.readexactly(length))


async def _gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Returns when the other side has closed; the gateway sends nothing while an answer is under way."""
    while not reader.at_eof() and not writer.is_closing():
        await asyncio.sleep(0.005)


@dataclass
class Host:
    """The state files of launchers, and the slots."""

    paths: Paths
    engines: dict[tuple[int, str], FakeEngine] = field(default_factory=dict)
    _states: dict[int, dict[str, Any]] = field(default_factory=dict)

    async def engine(self, gpu: int = 0, release: str = "r1", script: Script = ok, **entry: Any) -> FakeEngine:
        """A running engine that its launcher admits."""
        engine = FakeEngine(self.paths.engine_socket(gpu, release), script)
        await engine.start()
        self.engines[gpu, release] = engine
        self.report(gpu, release, **entry)
        return engine

    def report(self, gpu: int = 0, release: str = "r1", **entry: Any) -> None:
        """What the launcher says of one engine."""
        state = self._states.setdefault(gpu, {"engines": {}, "holds": {}})
        old = state["engines"].get(release, {})
        state["engines"][release] = {
            "release": release, "model": "m", "engine_version": "0.1.0", "state": "ready", "admitted": True,
            "socket": str(self.paths.engine_socket(gpu, release)), "scope": f"appliance-gpu{gpu}-{release}.scope",
            "pid": 1000 + gpu, "since": 1.0, "restarts": 0, "last_exit": None, "progress": None, "retry_at": None,
            "memory_max": 1 << 30,
        } | old | entry  # fmt: skip
        self.write(gpu)

    def remove(self, gpu: int, release: str) -> None:
        del self._states[gpu]["engines"][release]
        self.write(gpu)

    def hold(self, gpu: int, **holds: Any) -> None:
        self._states.setdefault(gpu, {"engines": {}, "holds": {}})["holds"] = holds
        self.write(gpu)

    def share(self, gpu: int, share: float) -> None:
        self._states[gpu]["share"] = share
        self.write(gpu)

    def write(self, gpu: int) -> None:
        state, path = self._states[gpu], self.paths.launcher_state(gpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        engines = [
            dict(entry, admitted=entry["admitted"] and not state["holds"]) for entry in state["engines"].values()
        ]
        write_state(
            path,
            {"gpu": gpu, "uuid": f"CPU-{gpu}", "backend": "cpu", "pid": os.getpid(), "since": 1.0, "status": "ready",
             "holds": state["holds"], "admitted": not state["holds"], "share": state.get("share", 1.0),
             "engines": engines},
            schema=1, durable=False,
        )  # fmt: skip

    def point(self, slot: str, release: str | None) -> None:
        path = self.paths.slot_pointer(slot)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{slot}")
        temporary.unlink(missing_ok=True)
        if release is None:
            path.unlink(missing_ok=True)
            return
        temporary.symlink_to(f"../releases/{release}")
        temporary.rename(path)

    def drain(self, reason: str | None) -> None:
        self.paths.host_drain.parent.mkdir(parents=True, exist_ok=True)
        if reason is None:
            self.paths.host_drain.unlink(missing_ok=True)
        else:
            write_state(self.paths.host_drain, {"reason": reason, "since": 1.0}, schema=1)

    async def close(self) -> None:
        for engine in self.engines.values():
            await engine.die()


@dataclass
class Front:
    """A gateway in this process, and a client of it."""

    worker: Worker
    port: int
    http: aiohttp.ClientSession
    host: Host
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def post(self, path: str = "/v1/completions", body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
        headers = {"Content-Type": "application/json"} | kwargs.pop("headers", {})
        async with self.http.post(self.url + path, data=data, headers=headers, **kwargs) as response:
            self.headers = response.headers
            raw = await response.read()
            return response.status, json.loads(raw) if response.content_type == "application/json" else raw

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **kwargs) as response:
            self.headers = response.headers
            raw = await response.read()
            return response.status, json.loads(raw) if response.content_type == "application/json" else raw.decode()

    async def stream(self, body: Any = None, path: str = "/v1/completions") -> bytes:
        """The whole body of a stream; aiohttp raises if its chunks do not end properly."""
        async with self.http.post(self.url + path, json=body or {"stream": True}) as response:
            assert response.status == 200, (response.status, await response.text())
            return await response.read()

    async def raw(self, data: bytes, *, seconds: float = 5.0) -> bytes:
        """What comes back for these bytes until the gateway closes (or `seconds` are over)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        out = b""
        try:
            writer.write(data)
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(seconds):
                    while piece := await reader.read(65536):
                        out += piece
        finally:
            writer.close()
        return out

    async def metric(self, name: str, **labels: str) -> float:
        return metric_value((await self.get("/metrics"))[1], name, **labels)

    async def until(self, condition: Callable[[], Any], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)


def metric_value(text: str, name: str, **labels: str) -> float:
    """The sum of the samples with these labels, read by prometheus-client's parser."""
    from prometheus_client.parser import text_string_to_metric_families

    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def settings_for(paths: Paths, slot: str = "stable", *, keys: Path | None = None, **options: Any) -> Settings:
    """`options`: of [gateway], or of Settings. Times are short."""
    of_gateway = {name: options.pop(name) for name in list(options) if name in Gateway.__struct_fields__}
    gateway = Gateway(**({"wait_timeout": 3.0, "replay_timeout": 5.0, "drain_timeout": 3.0} | of_gateway))
    settings = make_settings(HostConfig(gateway=gateway), slot, paths, keys=keys)
    import dataclasses

    return dataclasses.replace(settings, **options) if options else settings


@contextlib.asynccontextmanager
async def fronted(host: Host, /, *, wait: bool = True, **options: Any) -> AsyncIterator[Front]:
    """A gateway on a free port. `wait`: until it has probed the engines that are there."""
    ssl = options.pop("client_ssl", None)
    settings = settings_for(host.paths, **({"port": 0} | options))
    worker = Worker(settings)
    ready = asyncio.Event()
    with public_socket(settings) as listener:
        port = listener.getsockname()[1]
        async with admin_listeners(worker):
            running = asyncio.create_task(
                worker.run(listener, ready=ready.set, draining=lambda: None, handle_signals=False)
            )
            try:
                async with asyncio.timeout(5):
                    await ready.wait()
                connector = aiohttp.TCPConnector(limit=0, **({"ssl": ssl} if ssl else {}))
                timeout = aiohttp.ClientTimeout(total=30)
                async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
                    front = Front(worker, port, http, host, "https" if ssl else "http")
                    if wait:
                        admitted = worker.gateway.engines.admitted
                        await front.until(lambda: all(engine.reachable is not None for engine in admitted))
                    yield front
            finally:
                worker.leave()
                worker.leave()
                assert await asyncio.wait_for(running, 15) == 0

"""What the gateway costs: added latency, relayed tokens a second, idle memory.

`python -m tests.bench.bench_gateway [--streams 64] [--seconds 3] [--json]`. The engine here is a fast fake on a Unix
socket: every tick it writes one event to each open stream. Engine, gateway and client are processes of their own; on a
machine with fewer cores than processes the wall rate says little, CPU time a token says what one core can relay.
  added     unary request through the gateway minus the same on the engine's socket, alternating, one at a time
  relay     as fast as it goes, through 1, 2 and 4 workers: reads then take several tokens at once
  lockstep  CPU time a token where every token is read and written on its own, which is the most one can cost: engine,
            relay and client in one process, one token to each stream a round, less the same without a relay
  peer      the same two with a relay of aiohttp.ClientSession and StreamResponse.write
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import psutil
import uvloop
from aiohttp import web

from appliance.paths import Paths
from engine.spawn import python_env, python_module
from tests.appliance.gateway.world import Host, fronted

EVENT = (
    b'id: 0:123.0.1.-.0123456789abcdef\ndata: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":'
    b'1700000000,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
DONE = b"data: [DONE]\n\n"
LAST = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE)
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Appliance-Seed: 1\r\nX-Appliance-Created: 1700000000\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"ok":true}'
FAST, STEPPED = "/v1/completions", "/generate"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 2000}]}).encode()


def request(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


# ---- the fake engine -----------------------------------------------------------------------------------------------


class FastEngine(asyncio.Protocol):
    """/v1/completions streams as fast as it can, /generate one token a `tick`, both until the client goes; everything
    else is answered at once."""

    fast: set[asyncio.Transport] = set()  # noqa: RUF012  # one process, one engine
    stepped: set[asyncio.Transport] = set()  # noqa: RUF012

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.buffer = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, separator, body = self.buffer.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length: ")
        length = int(head[at + 16 :].split(b"\r\n")[0]) if at >= 0 else 0
        if not separator or len(body) < length:
            return
        self.buffer = b""
        if head.startswith(b"POST /v1/completions"):
            self.transport.write(HEAD)
            self.fast.add(self.transport)
        elif head.startswith(b"POST /generate"):
            self.transport.write(HEAD)
            self.stepped.add(self.transport)
        else:
            self.transport.write(ANSWER)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.fast.discard(self.transport)
        self.stepped.discard(self.transport)


async def run_engine(path: str) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_unix_server(FastEngine, path)
    while True:
        for transport in list(FastEngine.fast):
            if transport.get_write_buffer_size() < 1 << 16:
                transport.write(CHUNK)
        await asyncio.sleep(0 if FastEngine.fast else 0.01)


# ---- the peer: the same relay with aiohttp's client ----------------------------------------------------------------


async def run_peer(path: str, port: int) -> None:
    session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path, limit=0))

    async def handler(incoming: web.BaseRequest) -> web.StreamResponse:
        body = await incoming.read()
        async with session.post(f"http://engine{incoming.path}", data=body) as upstream:
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": "text/event-stream"})
            await response.prepare(incoming)
            async for data in upstream.content.iter_any():
                await response.write(data)
        return response

    server = await asyncio.get_running_loop().create_server(web.Server(handler, access_log=None), "127.0.0.1", port)
    await server.serve_forever()


# ---- the client ----------------------------------------------------------------------------------------------------


async def run_client(port: int, streams: int, seconds: float) -> None:
    """Prints events a second over `streams` streams."""
    counted = 0
    running = False

    async def one() -> None:
        nonlocal counted
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(FAST, b"{}"))
        while data := await reader.read(1 << 16):
            if running:
                counted += data.count(b"data: ")

    tasks = [asyncio.create_task(one()) for _ in range(streams)]
    await asyncio.sleep(0.5)
    print("begin", flush=True)
    running, began = True, time.perf_counter()
    await asyncio.sleep(seconds)
    running = False
    print(json.dumps({"tokens_per_second": counted / (time.perf_counter() - began), "tokens": counted}), flush=True)
    for task in tasks:
        task.cancel()


async def latencies(open_connection: Any, count: int) -> list[float]:
    """Seconds of `count` unary requests on one connection, one at a time."""
    reader, writer = await open_connection
    out = []
    for _ in range(count):
        began = time.perf_counter()
        writer.write(request("/v1/chat/completions", BODY))
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(11)
        out.append(time.perf_counter() - began)
        assert b" 200 " in head, head
    writer.close()
    return out


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# ---- the run -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(
    *arguments: str, module: str = "tests.bench.bench_gateway", **environment: str
) -> Iterator[subprocess.Popen]:
    child = subprocess.Popen(
        [*python_module(module), *arguments], env=python_env() | environment, stderr=subprocess.DEVNULL
    )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def answers(port: int) -> None:
    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/readyz") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def gateway(root: Path, workers: int, slot: str = "stable") -> AsyncIterator[tuple[int, psutil.Process]]:
    ports = {"stable": free_port(), "canary": free_port()}
    config = root / f"appliance-{slot}.toml"
    lines = [f"port = {ports['stable']}", f"canary_port = {ports['canary']}", f"workers = {workers}"]
    config.write_text("\n".join(["[gateway]", "drain_timeout = 0.1", *lines]))
    options = ("--slot", slot, "--config", str(config), "--log-level", "error")
    with process(*options, module="appliance.gateway", APPLIANCE_ROOT=str(root)) as child:
        await answers(ports[slot])
        await asyncio.sleep(0.5)
        yield ports[slot], psutil.Process(child.pid)


def family(root: psutil.Process) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


def cpu_seconds(root: psutil.Process) -> float:
    return sum(p.cpu_times().user + p.cpu_times().system for p in family(root))


def pss_mib(root: psutil.Process) -> float:
    return sum(p.memory_full_info().pss for p in family(root)) / 2**20


async def measure_relay(
    port: int, root: psutil.Process, args: argparse.Namespace, path: str = FAST
) -> dict[str, float]:
    client = await asyncio.create_subprocess_exec(
        *python_module("tests.bench.bench_gateway"), "--role", "client", "--port", str(port),
        "--streams", str(args.streams), "--seconds", str(args.seconds), env=python_env(), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    await client.stdout.readline()
    before, began = cpu_seconds(root), time.perf_counter()
    result = json.loads(await client.stdout.readline())
    cpu, wall = cpu_seconds(root) - before, time.perf_counter() - began
    await client.wait()
    return {
        "tokens_per_second": round(result["tokens_per_second"]),
        "cpu_us_per_token": round(cpu / max(result["tokens"], 1) * 1e6, 2),
        "cores_used": round(cpu / wall, 2),
    }


async def measure_added(port: int, path: str, count: int) -> dict[str, float]:
    direct: list[float] = []
    through: list[float] = []
    for part in range(10):
        direct += (await latencies(asyncio.open_unix_connection(path), count // 10))[10 if part else 0 :]
        through += (await latencies(asyncio.open_connection("127.0.0.1", port), count // 10))[10 if part else 0 :]
    return {
        f"{name}_ms_{label}": round(percentile(values, share) * 1e3, 3)
        for label, share in (("p50", 0.5), ("p99", 0.99))
        for name, values in (("direct", direct), ("gateway", through))
    } | {
        f"added_ms_{label}": round((percentile(through, share) - percentile(direct, share)) * 1e3, 3)
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"bench": "gateway", "cores": len(os.sched_getaffinity(0)), "streams": args.streams}
    with tempfile.TemporaryDirectory(prefix="gw") as directory:
        root = Path(directory)
        host = Host(Paths.under(root))
        socket_path = str(host.paths.engine_socket(0, "r1"))
        Path(socket_path).parent.mkdir(parents=True)
        for slot in ("stable", "canary"):
            host.point(slot, "r1")
        with process("--role", "engine", "--uds", socket_path):
            host.report(0, "r1")
            async with gateway(root, 1) as (port, stable):
                result["added"] = await measure_added(port, socket_path, args.requests)
                result["relay"] = {"1": await measure_relay(port, stable, args)}
            for workers in (2, 4):
                async with gateway(root, workers) as (port, stable):
                    result["relay"][str(workers)] = await measure_relay(port, stable, args)
            peer_port = free_port()
            with process("--role", "peer", "--uds", socket_path, "--port", str(peer_port)) as peer:
                await asyncio.sleep(1.0)
                result["relay"]["peer"] = await measure_relay(peer_port, psutil.Process(peer.pid), args)
            async with gateway(root, 1) as (_, stable), gateway(root, 1, "canary") as (_, canary):
                result["idle_pss_mib"] = {"stable": round(pss_mib(stable), 1), "canary": round(pss_mib(canary), 1)}
    result["lockstep_us_per_token"] = await measure_lockstep(args.streams)
    return result


class Counting(asyncio.Protocol):
    """A client of one stream."""

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived = arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(request(STEPPED, b"{}"))

    def data_received(self, data: bytes) -> None:
        self._arrived(data.count(b"data: "))


async def lockstep(connect: Callable[[Callable[[], Counting]], Any], streams: int, rounds: int) -> float:
    """CPU seconds of this process a token."""
    left, done = 0, asyncio.Event()

    def arrived(count: int) -> None:
        nonlocal left
        left -= count
        if left <= 0:
            done.set()

    async def round_() -> None:
        nonlocal left
        done.clear()
        left = len(FastEngine.stepped)
        for engine_side in list(FastEngine.stepped):
            engine_side.write(CHUNK)
        await done.wait()

    clients = [(await connect(lambda: Counting(arrived)))[0] for _ in range(streams)]
    while len(FastEngine.stepped) < streams:
        await asyncio.sleep(0.01)
    for _ in range(20):
        await round_()
    began = time.process_time()
    for _ in range(rounds):
        await round_()
    cost = (time.process_time() - began) / (rounds * streams)
    for transport in (*clients, *FastEngine.stepped):
        transport.abort()
    while FastEngine.stepped:
        await asyncio.sleep(0.01)
    return cost


async def measure_lockstep(streams: int, rounds: int = 300) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="gw") as directory:
        host = Host(Paths.under(Path(directory)))
        host.point("stable", "r1")
        path = str(host.paths.engine_socket(0, "r1"))
        Path(path).parent.mkdir(parents=True)
        server = await loop.create_unix_server(FastEngine, path)
        host.report(0, "r1")
        peer_port = free_port()
        peer = loop.create_task(run_peer(path, peer_port))
        async with fronted(host, drain_timeout=0.1) as front:
            through = await lockstep(
                lambda make: loop.create_connection(make, "127.0.0.1", front.port), streams, rounds
            )
            other = await lockstep(lambda make: loop.create_connection(make, "127.0.0.1", peer_port), streams, rounds)
            direct = await lockstep(lambda make: loop.create_unix_connection(make, path), streams, rounds)
        peer.cancel()
        server.close()
    return {"gateway": round((through - direct) * 1e6, 2), "peer": round((other - direct) * 1e6, 2)}


def show(result: dict[str, Any]) -> None:
    added = result["added"]
    print(f"gateway, {result['cores']} cores, {result['streams']} streams")
    for label in ("p50", "p99"):
        values = [f"{name} {added[f'{name}_ms_{label}']:.3f}" for name in ("direct", "gateway", "added")]
        print(f"  unary request, {label}, ms: " + "  ".join(values))
    for name, row in result["relay"].items():
        print(
            f"  relay, {name if name == 'peer' else name + ' worker(s)':12} {row['tokens_per_second']:8} tokens/s on "
            f"{row['cores_used']} cores, {row['cpu_us_per_token']} us of CPU a token"
        )
    for name, cost in result["lockstep_us_per_token"].items():
        print(f"  lockstep, {name:9} {cost:8} us of CPU a token = {1e6 / cost:.0f} tokens/s a core")
    print("  idle PSS, MiB: " + "  ".join(f"{slot} {size}" for slot, size in result["idle_pss_mib"].items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=["engine", "peer", "client"], help=argparse.SUPPRESS)
    parser.add_argument("--uds", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "engine":
        uvloop.run(run_engine(args.uds))
    elif args.role == "peer":
        uvloop.run(run_peer(args.uds, args.port))
    elif args.role == "client":
        uvloop.run(run_client(args.port, args.streams, args.seconds))
    else:
        result = uvloop.run(measure(args))
        if not args.json:
            show(result)
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

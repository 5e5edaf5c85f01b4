"""Traffic for tests of what stands between clients and servers: a server that counts, clients that notice everything.

    python -m tests.canary.traffic serve --name stable --port 8000 [--requests-per-connection 100]
    python -m tests.canary.traffic load --to 10.0.0.1 --to fd00::1 --pool 8 --new 4 --streams 4

Both print one JSON line once they are ready, and one for each line read from stdin: what they counted so far. They end
at the end of stdin, with a last line. No dependency but Python, so that they run in any network namespace or machine.
A client's connection must answer every request until the server has said `Connection: close`; a reset, an end in the
middle, a refused or timed-out connect, an answer from another server than before: each is a failure, by kind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

ANSWER_SECONDS = 20.0  # far above any pause of a busy machine; a lost packet of a dropped connection never comes


class Server(asyncio.Protocol):
    """One connection. `GET /stream/N/GAP` answers N server-sent events GAP seconds apart."""

    counts: Counter[str]
    name: str
    most_requests: int | None

    def __init__(self, shared: dict[str, Any]) -> None:
        self.__dict__.update(shared)
        self._data = b""
        self._requests = 0
        self._transport: asyncio.Transport | None = None
        self._stream: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.counts["connections"] += 1
        self.counts["open"] += 1

    def connection_lost(self, error: Exception | None) -> None:
        self.counts["open"] -= 1
        if error is not None:
            self.counts["lost"] += 1  # the client was gone in the middle
        if self._stream:
            self._stream.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, self._data = self._data.split(b"\r\n\r\n", 1)
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        assert self._transport is not None
        self._requests += 1
        self.counts["requests"] += 1
        path = head.split(b" ", 2)[1].decode()
        last = b"connection: close" in head.lower() or self._requests == self.most_requests
        if path.startswith("/stream/"):
            _, _, events, gap = path.split("/")
            self._stream = asyncio.get_running_loop().create_task(self._events(int(events), float(gap)))
            return
        body = self.name.encode()
        close = b"Connection: close\r\n" if last else b""
        self._transport.write(b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (close, len(body), body))
        if last:
            self._transport.close()

    async def _events(self, events: int, gap: float) -> None:
        """Ends with the connection, as HTTP/1.0 does; the client knows how many there must be."""
        assert self._transport is not None
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for number in range(events):
            self._transport.write(b"data: %d %s\n\n" % (number, self.name.encode()))
            await asyncio.sleep(gap)
        self._transport.close()


class Failure(Exception):
    """What a client of the endpoint must never see."""


class Answer(NamedTuple):
    side: str
    closing: bool  # the server ends this connection


class Connection:
    """One client connection; remembers who answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.side: str | None = None

    @classmethod
    async def open(cls, host: str, port: int, source: str | None) -> Connection:
        local = (source, 0) if source else None
        async with asyncio.timeout(ANSWER_SECONDS):
            return cls(*await asyncio.open_connection(host, port, local_addr=local))

    async def get(self, path: str = "/", *, close: bool = False) -> Answer:
        last = "Connection: close\r\n" if close else ""
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{last}\r\n".encode())
        async with asyncio.timeout(ANSWER_SECONDS):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.partition("Content-Length: ")[2].split("\r\n")[0])
            side = (await self._reader.readexactly(length)).decode()
        self._check(side)
        return Answer(side, "Connection: close" in head)

    async def stream(self, events: int, gap: float) -> str:
        self._writer.write(f"GET /stream/{events}/{gap} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await self._reader.readuntil(b"\r\n\r\n")
        for number in range(events):
            async with asyncio.timeout(ANSWER_SECONDS):
                line = (await self._reader.readuntil(b"\n\n")).decode()
            _, got, side = line.split()
            if int(got) != number:
                raise Failure(f"event {got} instead of {number}")
            self._check(side)
        if await self._reader.read():
            raise Failure("more events than there are")
        return self.side or ""

    def _check(self, side: str) -> None:
        if self.side not in (None, side):
            raise Failure("moved to another server")
        self.side = side

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Load:
    """Clients of all kinds, until `stop`; `counts` has what happened."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._args = args
        self._stopping = False
        self._sources = itertools.cycle(args.source or [None])
        self._targets = itertools.cycle(args.to)

    async def run(self) -> None:
        """All clients, until they have ended."""
        args = self._args
        per_client, rest = divmod(args.connections or 0, args.new or 1)
        loops = [self._new(per_client + (n < rest) if args.connections else None) for n in range(args.new)]
        loops += [self._pooled() for _ in range(args.pool)]
        loops += [self._streams() for _ in range(args.streams)]
        await asyncio.gather(*loops)

    def stop(self) -> None:
        self._stopping = True

    def report(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "failures": dict(self.failures)}

    async def _open(self, kind: str) -> Connection:
        host = next(self._targets)
        source = next(self._sources)
        matching = source if source and (":" in source) == (":" in host) else None
        connection = await Connection.open(host, self._args.port, matching)
        self.counts[f"{kind}.connections"] += 1
        return connection

    async def _new(self, most: int | None) -> None:
        """A connection a request."""
        while not self._stopping and most != 0:
            most = None if most is None else most - 1
            with self._noticing("new"):
                connection = await self._open("new")
                answer = await connection.get(close=True)
                self.counts["requests"] += 1
                self.counts[f"new.{answer.side}"] += 1
                await connection.close()
            await self._think()

    async def _pooled(self) -> None:
        """One connection for as long as the server lets it live."""
        while not self._stopping:
            with self._noticing("pool"):
                connection, counted = await self._open("pool"), False
                while not self._stopping:
                    answer = await connection.get()
                    self.counts["requests"] += 1
                    self.counts[f"pool.{answer.side}.requests"] += 1
                    self.counts[f"pool.{answer.side}"] += not counted
                    counted = True
                    if answer.closing:
                        break
                    await self._think()
                await connection.close()

    async def _streams(self) -> None:
        while not self._stopping:
            with self._noticing("stream"):
                connection = await self._open("stream")
                side = await connection.stream(self._args.events, self._args.gap)
                self.counts["requests"] += 1
                self.counts[f"stream.{side}"] += 1
                await connection.close()

    async def _think(self) -> None:
        if self._args.think:
            await asyncio.sleep(random.uniform(0, 2 * self._args.think))

    @contextlib.contextmanager
    def _noticing(self, kind: str) -> Any:
        try:
            yield
        except Failure as error:
            self.failures[f"{kind}: {error}"] += 1
        except TimeoutError:
            self.failures[f"{kind}: no answer"] += 1
        except asyncio.IncompleteReadError as error:
            self.failures[f"{kind}: ended after {len(error.partial)} bytes"] += 1
        except OSError as error:
            self.failures[f"{kind}: {errno.errorcode.get(error.errno or 0, error)}"] += 1


async def _serve(args: argparse.Namespace) -> None:
    counts: Counter[str] = Counter()
    shared = {"counts": counts, "name": args.name, "most_requests": args.requests_per_connection}
    loop = asyncio.get_running_loop()
    host = args.host or None  # None: all addresses of both families
    server = await loop.create_server(lambda: Server(shared), host, args.port, backlog=4096)
    async for _ in _asked({"ready": args.name}):
        _say(dict(counts))
    server.close()
    _say(dict(counts))


async def _load(args: argparse.Namespace) -> None:
    load = Load(args)
    running = asyncio.get_running_loop().create_task(load.run())
    if args.connections:
        await running
        _say(load.report())
        return
    async for _ in _asked({"ready": "load"}):
        _say(load.report())
    load.stop()
    await running
    _say(load.report())


async def _asked(first: dict[str, Any]) -> Any:
    """A turn for each line of stdin."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say(first)
    while await reader.readline():
        yield


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    serve = kinds.add_parser("serve")
    serve.add_argument("--name", required=True)
    serve.add_argument("--host", default="")
    serve.add_argument("--port", type=int, required=True)
    serve.add_argument("--requests-per-connection", type=int)
    load = kinds.add_parser("load")
    load.add_argument("--to", action="append", required=True, help="address of the server; several take turns")
    load.add_argument("--port", type=int, default=8000)
    load.add_argument("--source", action="append", help="address of this host to come from; several take turns")
    load.add_argument("--new", type=int, default=0, help="clients that make a connection for each request")
    load.add_argument("--connections", type=int, help="stop after so many of them")
    load.add_argument("--pool", type=int, default=0, help="clients that keep their connection")
    load.add_argument("--streams", type=int, default=0, help="clients that read server-sent events")
    load.add_argument("--events", type=int, default=20)
    load.add_argument("--gap", type=float, default=0.02)
    load.add_argument("--think", type=float, default=0.0, help="mean seconds between requests of one client")
    args = parser.parse_args(arguments)
    asyncio.run(_serve(args) if args.kind == "serve" else _load(args))


if __name__ == "__main__":
    main()

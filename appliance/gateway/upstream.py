"""HTTP/1.1 to an engine over its Unix socket: one asyncio.Protocol a connection, kept alive and used again.

Not aiohttp.ClientSession: the relay of streamed tokens is the hot path, and there a chunk must cost one callback, not a
task switch, a StreamReader and a chunk object. Measured by tests/bench/bench_gateway.py, kernel included: 19 us of CPU
a token against 24 to 31 with aiohttp's client; of these 19, 3 are Python. What an engine sends is bounded and strict
(RFC 9112): no obs-fold, no second length, chunks without extensions or trailers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import cast

MAX_HEAD_BYTES = 32 << 10
MAX_EARLY_BYTES = 256 << 10
"""Of a body that came before somebody wanted it; then reading pauses."""
CONNECT_SECONDS = 2.0
_MAX_CHUNK_LINE = 18
_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2})(?: [\x20-\x7e\x80-\xff]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\x20-\x7e\x80-\xff\t]*)")
"""No two repetitions that can share a blank: with those a line of 32 KiB costs seconds."""


class UpstreamError(Exception):
    """An exchange that failed. `kind`: "connect" nothing was sent; "stale" a kept connection was closed before the
    request was read; "closed" the engine went away with the request in work; "bad" what it sent is not HTTP as we know
    it; "silent" it sent nothing for too long."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Head:
    """Status and headers of a response; names in lower case, values as Latin-1 text."""

    __slots__ = ("chunked", "headers", "keep_alive", "length", "status")

    def __init__(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.status, self.headers = status, headers
        self.length: int | None = None  # None: until the end of the chunks or of the connection
        self.chunked = False
        self.keep_alive = True

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


def parse_head(data: bytes) -> Head:
    """The head of a response, without its empty line. UpstreamError("bad") for anything ambiguous."""
    lines = data.split(b"\r\n")
    matched = _STATUS_LINE.fullmatch(lines[0])
    if matched is None:
        raise UpstreamError("bad", f"not a status line: {lines[0][:80]!r}")
    headers = []
    for line in lines[1:]:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise UpstreamError("bad", f"not a header line: {line[:80]!r}")
        headers.append((field[1].decode().lower(), field[2].decode("latin-1").strip(" \t")))
    head = Head(int(matched[1]), headers)
    if head.status < 200:
        raise UpstreamError("bad", f"an interim response {head.status} that nobody asked for")
    lengths = [value for name, value in headers if name == "content-length"]
    codings = [value.lower() for name, value in headers if name == "transfer-encoding"]
    if len(lengths) + len(codings) > 1 or (codings and codings != ["chunked"]):
        raise UpstreamError("bad", "the length of the body is said twice or in an unknown coding")
    if lengths and (not lengths[0].isascii() or not lengths[0].isdigit() or len(lengths[0]) > 15):
        raise UpstreamError("bad", f"not a length: {lengths[0][:40]!r}")
    head.chunked = bool(codings)
    head.length = 0 if head.status in (204, 304) else int(lengths[0]) if lengths else None
    head.keep_alive = (head.get("connection") or "").lower() != "close" and (head.chunked or head.length is not None)
    return head


class Exchange:
    """One request and its response. `head` and `ended` are futures (Head; None) that may end with UpstreamError;
    between the two, `attach(sink)`: it gets the pieces of the body as they come, first those that came before."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.head: asyncio.Future[Head] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.last_data = loop.time()
        self._connection: Connection | None = connection
        self._sink: Callable[[bytes], None] | None = None
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._want_pause = False

    def attach(self, sink: Callable[[bytes], None]) -> None:
        early, self._early, self._early_bytes = self._early, [], 0
        self._sink = sink
        for data in early:
            sink(data)
        self._update_reading()

    def pause(self) -> None:
        """Back-pressure: read no more until `resume`."""
        self._want_pause = True
        self._update_reading()

    def resume(self) -> None:
        self._want_pause = False
        self.last_data = asyncio.get_running_loop().time()  # the silence was ours
        self._update_reading()

    def close(self, kind: str = "closed", message: str = "given up") -> None:
        """Nobody listens any more. If it is not complete its connection goes, which tells the engine to stop."""
        self._sink = _drop
        if self._connection is not None:
            self._connection.fail(kind, message)

    def deliver(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink(data)
        elif data:
            self._early.append(data)
            self._early_bytes += len(data)
            self._update_reading()

    def finish(self, error: UpstreamError | None) -> None:
        """Called by the connection, which is done with it."""
        if self._connection is None:
            return
        self._connection = None
        if error is None:
            if not self.ended.done():  # whoever waited for it was cancelled
                self.ended.set_result(None)
            return
        for future in (self.head, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # somebody may look at only one of them

    def _update_reading(self) -> None:
        if self._connection is not None:
            early = self._sink is None and self._early_bytes > MAX_EARLY_BYTES
            self._connection.set_paused(self._want_pause or early)


class Connection(asyncio.Protocol):
    """One connection to an engine, one exchange at a time. `on_idle` is called when it can be used again, `on_lost`
    when it is gone."""

    def __init__(self, on_idle: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_idle, self._on_lost = on_idle, on_lost
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._uses = 0
        self._answered = False  # a byte of this exchange's response has come
        self._paused = False
        self.closed = False
        self._begin_parsing()

    def _begin_parsing(self) -> None:
        self._buffer = b""  # of the head, or of a chunk's line
        self._parsed: Head | None = None
        self._left = 0  # bytes of this chunk, or of the whole body, that are still to come
        self._at_crlf = self._last_chunk = False

    def send(self, head: bytes, body: bytes | bytearray) -> Exchange:
        """Begin an exchange: `head` with its empty line, then the body."""
        assert self._transport is not None and self._exchange is None
        exchange = self._exchange = Exchange(self, self._loop)
        self._begin_parsing()
        self._answered = False
        self._uses += 1
        if body:
            self._transport.writelines([head, body])
        else:
            self._transport.write(head)
        return exchange

    def shut(self) -> None:
        """Close an idle connection."""
        if self._transport is not None:
            self._transport.close()

    def fail(self, kind: str, message: str) -> None:
        """End the exchange, if there is one, with an error, and the connection."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.finish(UpstreamError(kind, message))
        if self._transport is not None:
            self._transport.abort()

    def set_paused(self, pause: bool) -> None:
        if pause == self._paused or self._transport is None or self.closed:
            return
        self._paused = pause
        (self._transport.pause_reading if pause else self._transport.resume_reading)()

    # ---- asyncio's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.fail("bad", "it sent what nobody asked for")
            return
        self._answered = True
        exchange.last_data = self._loop.time()
        try:
            if self._parsed is None:
                self._feed_head(exchange, data)
            elif self._parsed.chunked:
                self._feed_chunks(exchange, data)
            else:
                self._feed_body(exchange, data)
        except UpstreamError as error:
            self.fail(error.kind, str(error))

    def connection_lost(self, exc: BaseException | None) -> None:
        self.closed = True
        self._transport = None
        until_close = self._parsed is not None and not self._parsed.chunked and self._parsed.length is None
        if self._exchange is not None and until_close and exc is None:
            exchange, self._exchange = self._exchange, None
            exchange.finish(None)
        # Closed with our request unread, the kernel says so (EPIPE, ECONNRESET); after it was read: a plain end.
        stale = self._uses > 1 and not self._answered and isinstance(exc, BrokenPipeError | ConnectionResetError)
        self.fail("stale" if stale else "closed", "the engine closed the connection")
        self._on_lost(self)

    # ---- parsing ---------------------------------------------------------------------------------------------------

    def _feed_head(self, exchange: Exchange, data: bytes) -> None:
        data = self._buffer + data
        end = data.find(b"\r\n\r\n", max(0, len(self._buffer) - 3), MAX_HEAD_BYTES)
        if end < 0:
            if len(data) >= MAX_HEAD_BYTES:
                raise UpstreamError("bad", f"the head of the response is over {MAX_HEAD_BYTES} bytes")
            self._buffer = data
            return
        self._buffer = b""
        head = self._parsed = parse_head(data[:end])
        self._left = head.length or 0
        if not exchange.head.done():  # whoever waited for it was cancelled
            exchange.head.set_result(head)
        rest = data[end + 4 :]
        if head.chunked:
            self._feed_chunks(exchange, rest)
        elif head.length == 0:
            self._complete(exchange, rest)
        elif rest:
            self._feed_body(exchange, rest)

    def _feed_body(self, exchange: Exchange, data: bytes) -> None:
        assert self._parsed is not None
        if self._parsed.length is None:
            exchange.deliver(data)
            return
        rest = data[self._left :]
        self._left -= len(data) - len(rest)
        exchange.deliver(data[: len(data) - len(rest)] if rest else data)
        if not self._left:
            self._complete(exchange, rest)

    def _feed_chunks(self, exchange: Exchange, data: bytes) -> None:
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        out: list[bytes] = []
        position, size = 0, len(data)
        while position < size:
            if self._left:
                piece = data[position : position + self._left]
                out.append(piece)
                position += len(piece)
                self._left -= len(piece)
                self._at_crlf = not self._left
            elif self._at_crlf:
                if size - position < 2:
                    break
                if data[position : position + 2] != b"\r\n":
                    raise UpstreamError("bad", "a chunk is longer than it said, or has trailers")
                position += 2
                self._at_crlf = False
                if self._last_chunk:
                    exchange.deliver(b"".join(out))
                    self._complete(exchange, data[position:])
                    return
            else:
                end = data.find(b"\r\n", position, position + _MAX_CHUNK_LINE)
                if end < 0:
                    if size - position >= _MAX_CHUNK_LINE:
                        raise UpstreamError("bad", f"not a chunk: {data[position : position + 20]!r}")
                    break
                self._left = _chunk_size(data[position:end])
                self._last_chunk = self._at_crlf = not self._left
                position = end + 2
        self._buffer = data[position:]
        exchange.deliver(out[0] if len(out) == 1 else b"".join(out))

    def _complete(self, exchange: Exchange, rest: bytes) -> None:
        """The response is whole; the connection can be used again unless something speaks against it."""
        if self._exchange is not exchange or self._transport is None:
            return  # the sink closed it
        assert self._parsed is not None
        self._exchange = None
        written = not self._transport.get_write_buffer_size()  # it may have answered before it read all of the request
        reusable = self._parsed.keep_alive and not rest and written and not self._transport.is_closing()
        self.set_paused(False)
        exchange.finish(None)
        if reusable:
            self._on_idle(self)
        else:
            self._transport.abort()  # a close would wait until an engine that reads no more has taken the rest


def _chunk_size(line: bytes) -> int:
    if not line.isalnum():  # int() would also take signs, blanks and underscores
        raise UpstreamError("bad", f"not a chunk: {line[:20]!r}")
    try:
        return int(line, 16)
    except ValueError:
        raise UpstreamError("bad", f"not a chunk: {line[:20]!r}") from None


def _drop(data: bytes) -> None:
    """The sink of an exchange that nobody listens to any more."""


class Pool:
    """The connections to one engine."""

    MAX_IDLE = 64

    def __init__(self, path: str) -> None:
        self.path = path
        self._idle: list[Connection] = []
        self._closed = False
        self.on_idle_lost: Callable[[], None] | None = None  # the last idle connection went away by itself

    async def acquire(self, *, fresh: bool = False) -> Connection:
        """A connection that is ready to `send`; UpstreamError("connect")."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_unix_connection(lambda: Connection(self._put, self._lost), self.path)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError; ValueError: no path at all
            reason = "no connection in time" if isinstance(error, TimeoutError) else str(error)
            raise UpstreamError("connect", f"{self.path}: {reason}") from None
        return connection

    def release(self, connection: Connection) -> None:
        """Give back a connection that was acquired and not used."""
        self._put(connection)

    def close(self) -> None:
        """Idle connections go now, the others when their exchange ends."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.shut()

    def _put(self, connection: Connection) -> None:
        if self._closed or len(self._idle) >= self.MAX_IDLE:
            connection.shut()
        else:
            self._idle.append(connection)

    def _lost(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)
            if not self._idle and self.on_idle_lost is not None and not self._closed:
                self.on_idle_lost()

"""A stream of events to one client, which may come from several engines one after the other."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, cast

import msgspec
from aiohttp import web

from appliance.gateway.downstream import ClientConnection, Pipe
from appliance.gateway.sse import EventError, Events, resume_value
from engine.api.errors import ApiError, unavailable

if TYPE_CHECKING:
    from appliance.gateway.service import Call, Gateway
    from appliance.gateway.upstream import Exchange, Head


def shutting_down() -> ApiError:
    """This process has to go before the answer is complete."""
    return unavailable("the gateway shut down before this answer was complete", "shutting_down", 1)


class StreamCut(Exception):
    """The stream ended before it was whole. `kind`: as UpstreamError's, or "error": the engine said so itself."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Stream:
    """`follow` one exchange; after a StreamCut another, which was sent `resume_headers`; or `fail`."""

    def __init__(
        self,
        gateway: Gateway,
        request: web.BaseRequest,
        call: Call,
        release: str,
        head: Head,
        headers: list[tuple[str, str]],
    ) -> None:
        self.response: web.StreamResponse | None = None  # None: nothing has been sent
        self._gateway, self._request, self._call = gateway, request, call
        self._headers = headers
        self._connection = cast(ClientConnection, request.protocol)
        self._seed, self._created = head.get("x-appliance-seed"), head.get("x-appliance-created")
        self._ids: dict[bytes, bytes] = {}
        self._events = Events(self._ids)
        self._pipe: Pipe | None = None
        self._first: list[bytes] = []
        self._wake = asyncio.Event()
        self._cut: StreamCut | None = None
        self._loop = asyncio.get_running_loop()
        self.token_seen = False  # a first token was sent
        self._gap = gateway.metrics.gap
        self._release = release
        self._gap_cell = self._gap.cell(gateway.settings.slot, release)
        self.last_sent = 0.0  # CLOCK_MONOTONIC seconds
        self._waiting: asyncio.TimerHandle | None = None
        self._noticing = True  # the next event is not only passed on: see _notice

    # ---- passing on ------------------------------------------------------------------------------------------------

    async def follow(self, exchange: Exchange) -> None:
        """Pass on what comes until the stream is whole. StreamCut when it will not be."""
        self._events = Events(self._ids)
        self._wake.clear()
        exchange.ended.add_done_callback(lambda _: self._wake.set())
        self._gateway.streams.add(self)
        self._call.streaming = True
        self._connection.follow(exchange)
        try:
            exchange.attach(self._receive)
            while True:
                await self._woken(exchange)
                if self.response is None and self._first:
                    await self._begin()
                if self._is_whole(exchange):
                    return
        finally:
            self._connection.follow(None)
            self._gateway.streams.discard(self)
            self._call.streaming = False

    def shut_down(self) -> None:
        """End it with an error event: the gateway has to go."""
        self._cut = StreamCut("shutdown", "the gateway shuts down")
        self._wake.set()

    def _receive(self, data: bytes) -> None:
        """The hot path: called by the engine's connection, writes to the client's."""
        try:
            block = self._events.feed(data)
        except EventError as error:
            self._cut = StreamCut("bad", str(error))
            self._wake.set()
            return
        if block and self._pipe is not None:
            now = monotonic()
            self._gap.add(self._gap_cell, now - self.last_sent)
            self.last_sent = now
            self._pipe.write(block)
            if self._noticing:
                self._notice(now)
        elif block:
            self._first.append(block)
            self._wake.set()
        if self._events.broken is not None:
            self._wake.set()

    def _notice(self, now: float) -> None:
        """An event came that waiting comments end with, or that may bring the first token: it moves a choice."""
        self.stop_waiting()
        if not self.token_seen and self._ids:
            self.token_seen = True
            gateway = self._gateway
            gateway.metrics.first_token.observe(now - self._call.arrival, gateway.settings.slot, self._release)
        self._noticing = not self.token_seen

    async def _begin(self) -> None:
        """The head of the response and what has come so far."""
        response = web.StreamResponse(status=200, headers=self._headers)
        if self._request.version < (1, 1) or self._connection.is_last_answer():
            response.force_close()  # without chunks the end of the connection is the only end of a stream
        self._call.begun = True
        writer = await response.prepare(self._request)
        assert writer is not None
        self.response = response
        self._call.first_byte()
        while self._first:
            data = b"".join(self._first)
            self._first.clear()
            await response.write(data)
        self.last_sent = monotonic()
        self._notice(self.last_sent)
        self._pipe = Pipe(self._connection, writer)

    async def _woken(self, exchange: Exchange) -> None:
        silence = self._gateway.settings.silence_timeout
        while not self._wake.is_set():
            try:
                async with asyncio.timeout(silence / 4):
                    await self._wake.wait()
            except TimeoutError:
                if not self._connection.full and self._loop.time() - exchange.last_data > silence:
                    raise StreamCut("silent", f"the engine sent nothing for {silence:g} s") from None
        self._wake.clear()

    def _is_whole(self, exchange: Exchange) -> bool:
        events = self._events
        if self._cut is not None:
            cut, self._cut = self._cut, None
            raise cut
        if events.done:  # only the end of the chunks may be missing
            return True
        if events.broken is not None:
            raise StreamCut("error", f"the engine gave up: {events.broken}")
        if not exchange.ended.done():
            return False
        if events.error is not None:
            self._call.error_code = events.error
            return True
        error = exchange.ended.exception()
        if error is not None:
            raise StreamCut(getattr(error, "kind", "closed"), str(error))
        if self.resumable:
            raise StreamCut("closed", "the stream ended without [DONE]")
        return True

    # ---- going on elsewhere ----------------------------------------------------------------------------------------

    @property
    def resumable(self) -> bool:
        return self._seed is not None and self._created is not None and resume_value(self._ids) is not None

    def resume_headers(self) -> tuple[tuple[str, str], ...]:
        """What the next engine has to know."""
        value = resume_value(self._ids)
        assert self._seed is not None and self._created is not None and value is not None
        return ("X-Appliance-Seed", self._seed), ("X-Appliance-Created", self._created), ("X-Appliance-Resume", value)

    def start_waiting(self) -> None:
        """From now on the client gets a comment every few seconds, until an event comes."""
        self.stop_waiting()
        self._noticing = True
        self._waiting = self._loop.call_later(self._gateway.settings.waiting_comment, self._comment)

    def stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _comment(self) -> None:
        if self._pipe is not None and not self._connection.full:
            self._pipe.write(b": waiting\n\n")
        self.start_waiting()

    async def fail(self, error: ApiError) -> None:
        """End the stream without [DONE]: with the event that the engine gave up with, where there is one. Its chunks
        end in order, so the connection goes on, as its head has said: who uses it again must not find it closed."""
        assert self.response is not None
        event = self._events.broken_event or b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
        self._call.error_code = self._events.broken or error.code
        await self.response.write(event)
        await self.response.write_eof()

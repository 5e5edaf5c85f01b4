"""Life of one relayed request: an engine is chosen, the bytes go there, the answer comes back; and what happens when
the engine does not live up to it.

Before the first byte of the answer another engine gets the request (or the same one again), `retries` times; what costs
the engine nothing (no connection, 503, 429) is not counted but only waited for. After it a stream goes on by an exact
replay on an engine of the same release (engine/api/relay.py), and the client sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from appliance.gateway.downstream import ClientConnection, Pipe, client_headers
from appliance.gateway.replay import Replay
from appliance.gateway.stream import Stream, StreamCut, shutting_down
from appliance.gateway.upstream import Exchange, Head, UpstreamError
from engine.api.errors import SERVER, ApiError, unavailable
from engine.log import log_event

if TYPE_CHECKING:
    from appliance.gateway.engines import Engine
    from appliance.gateway.service import Call, Gateway

logger = logging.getLogger(__name__)

MAX_WHOLE_BYTES = 8 << 20
"""An answer up to this size reaches its client only when it is whole, so that an engine may die in the middle of it."""
MAX_ERROR_BYTES = 1 << 20
_WANTS_STREAM = re.compile(rb'"stream"\s*:\s*true')  # inside a JSON string its quotes would be escaped
_RELAYED = ("accept", "content-encoding", "content-type", "user-agent", "traceparent")
"""Of a request's headers. A list of what is let through, so that nothing a client sends can be taken for ours."""


class Answered(Exception):
    """The engine's answer is an error that another engine may do better."""

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__(f"status {head.status}")
        self.head, self.body = head, body


class Relay:
    """Use as `await Relay(...).run()`. ApiError where no engine could answer."""

    def __init__(self, gateway: Gateway, request: web.BaseRequest, call: Call, target: str, body: bytearray) -> None:
        self.gateway, self.request, self.call = gateway, request, call
        self.engines, self.settings = gateway.engines, gateway.settings
        self._target, self._body = target, body
        self._attempts = 0  # that an engine broke with the request in work
        self._waited = 0.0
        self._avoid: list[Engine] = []
        self._begun_stream: Stream | None = None

    async def run(self) -> web.StreamResponse:
        """The answer, sent or to be sent."""
        try:
            return await self._run()
        except (asyncio.CancelledError, ConnectionError):
            if not self.call.aborted:
                self._client_left()
            raise

    def _client_left(self) -> None:
        """For how long it had waited for the first or next token: longer than a limit is an answer over the limit, or
        a release that answers nobody in time would have no slow answer at all."""
        stream, now = self._begun_stream, time.monotonic()
        release, left = self.call.release or self.engines.release or "", self.gateway.metrics.left
        if stream is not None and stream.token_seen:
            left.observe(now - stream.last_sent, self.settings.slot, release, "itl")
        elif stream is not None or _WANTS_STREAM.search(self._body) is not None:
            left.observe(now - self.call.arrival, self.settings.slot, release, "ttft")

    async def _run(self) -> web.StreamResponse:
        while True:
            engine = await self._next_engine()
            began = time.monotonic()
            try:
                return await self._attempt(engine)
            except UpstreamError as error:
                if error.kind == "connect":
                    self._waited += time.monotonic() - began
                self._broken(engine, error)
            except Answered as answer:
                if answer.head.status == 503:  # not counted as an attempt: so its time is a wait
                    self._waited += time.monotonic() - began
                if not self._try_further(engine, answer):
                    return self._response(answer.head, answer.body)

    # ---- choosing --------------------------------------------------------------------------------------------------

    async def _next_engine(self) -> Engine:
        """A usable engine, waited for at most `wait_timeout` in all; 503 otherwise."""
        gateway = self.gateway
        late = self._waited >= self.settings.gateway.wait_timeout
        if not late and (engine := self.engines.pick(avoid=self._avoid)) is not None:
            return engine
        self._avoid.clear()
        if self.engines.release is None:
            raise self._no_engine("no_release", f"no release is set for the slot {self.settings.slot}")
        if gateway.waiting >= self.settings.gateway.max_waiting:
            raise self._no_engine("queue_full", f"{gateway.waiting} requests are waiting for an engine already")
        gateway.waiting += 1
        began = time.monotonic()
        try:
            while late or (engine := self.engines.pick()) is None:
                left = self.settings.gateway.wait_timeout - self._waited - (time.monotonic() - began)
                if left <= 0:
                    _, reason = self.engines.not_ready() or ("", "its engines answer that they cannot take it")
                    raise self._no_engine("no_engine", f"no engine could take this request: {reason}")
                await self.engines.changed(left)
                if gateway.aborting:
                    raise shutting_down()
        finally:
            gateway.waiting -= 1
            self._waited += time.monotonic() - began
        return engine

    def _no_engine(self, code: str, reason: str) -> ApiError:
        return unavailable(reason, code)

    def _broken(self, engine: Engine, error: UpstreamError) -> None:
        """Count a failed attempt; ApiError 502 when there were enough of them."""
        log_event(
            logger, logging.WARNING, "engine_failed", str(error), req_id=self.call.request_id, kind=error.kind,
            gpu=engine.gpu, release=engine.release,
        )  # fmt: skip
        if error.kind in ("connect", "closed"):
            self.engines.suspect(engine)
        else:
            self.engines.rest(engine)
        if error.kind != "connect":
            self._attempts += 1
            if self._attempts > self.settings.gateway.retries:
                raise ApiError(502, f"the engine failed {self._attempts} times: {error}", code="engine_failed")
        self._count_retry(engine, error.kind)

    def _try_further(self, engine: Engine, answer: Answered) -> bool:
        """Whether an error of the engine is worth another attempt."""
        status = answer.head.status
        if status == 503:
            self.engines.rest(engine)
        else:
            self._avoid.append(engine)
            self._attempts += status != 429
            if self._attempts > self.settings.gateway.retries or self.engines.pick(avoid=self._avoid) is None:
                return False  # nobody else could: this answer is the answer
        self._count_retry(engine, str(status))
        return True

    def _count_retry(self, engine: Engine, reason: str) -> None:
        self.call.retries += 1
        self.gateway.metrics.retries.inc(self.settings.slot, engine.release, reason)

    # ---- one attempt -----------------------------------------------------------------------------------------------

    async def _attempt(self, engine: Engine) -> web.StreamResponse:
        with engine.busy():
            exchange, head = await self.open(engine)
            try:
                self.call.answered_by(engine)
                if head.status >= 500 or head.status == 429:
                    await self._judge(exchange, head)
                if not (head.get("content-type") or "").startswith("text/event-stream"):
                    return await self._whole(exchange, head)
                if self.request.method == "HEAD":
                    return await self._pass_on(exchange, head, bytearray())
                stream = Stream(self.gateway, self.request, self.call, engine.release, head, self._headers(head))
                self._begun_stream = stream
                cut = await self._stream(stream, exchange)
            finally:
                exchange.close()
        if cut is not None:
            await Replay(self, stream, engine).run(cut)
        assert stream.response is not None
        return stream.response

    async def _stream(self, stream: Stream, exchange: Exchange) -> StreamCut | None:
        """Pass the stream on; how it was cut, if something of it has been sent."""
        try:
            await stream.follow(exchange)
        except StreamCut as cut:
            if cut.kind == "shutdown" and stream.response is None:
                raise shutting_down() from None
            if stream.response is None:
                raise UpstreamError(cut.kind, str(cut)) from None
            return cut
        return None

    async def open(self, engine: Engine, *further: tuple[str, str]) -> tuple[Exchange, Head]:
        """Send the request with `further` headers; the head of the answer."""
        fresh = False
        while True:
            connection = await engine.pool.acquire(fresh=fresh)
            exchange = connection.send(self._request_head(further), self._body)
            try:
                async with asyncio.timeout(self.settings.head_timeout):
                    return exchange, await exchange.head
            except UpstreamError as error:
                if error.kind != "stale":
                    raise
                fresh = True  # closed while idle, as we sent: nobody has seen the request
            except TimeoutError:
                exchange.close()
                raise UpstreamError("silent", f"no answer in {self.settings.head_timeout:g} s") from None
            except BaseException:
                exchange.close()
                raise

    def _request_head(self, further: tuple[tuple[str, str], ...]) -> bytes:
        call, headers = self.call, self.request.headers
        lines = [f"{self.request.method if self.request.method != 'HEAD' else 'GET'} {self._target} HTTP/1.1"]
        lines += ["Host: engine", f"X-Request-Id: {call.request_id}", "X-Appliance-Relay: 1"]
        if call.tenant is not None:
            lines.append(f"X-Appliance-Tenant: {call.tenant}")
        for name in _RELAYED:
            value = headers.get(name)
            if value is not None:
                lines.append(f"{name}: {value}")
        lines += [f"{name}: {value}" for name, value in further]
        lines += [f"Content-Length: {len(self._body)}", "", ""]
        # aiohttp has refused CR, LF and NUL in what it read; stray bytes come as surrogates and leave as they were.
        return "\r\n".join(lines).encode("utf-8", "surrogateescape")

    async def _judge(self, exchange: Exchange, head: Head) -> None:
        """Answered for an error that another engine may do better."""
        verdict = head.get("x-appliance-error") or ""
        if head.status in (429, 502, 503) or verdict.endswith(" retry"):
            raise Answered(head, await self._collect(exchange))

    async def _collect(self, exchange: Exchange) -> bytes:
        """An error's body, which is small."""
        body = bytearray()

        def keep(data: bytes) -> None:
            body.extend(data)
            if len(body) > MAX_ERROR_BYTES:
                exchange.close("bad", f"the body of an error is over {MAX_ERROR_BYTES} bytes")

        exchange.attach(keep)
        await self._end(exchange)
        return bytes(body)

    async def _end(self, exchange: Exchange, *others: asyncio.Future[Any]) -> None:
        """Until the answer is complete, or one of the others is. UpstreamError when it broke, or when the engine says
        nothing although its client reads."""
        silence = self.settings.silence_timeout
        while not exchange.ended.done() and not any(other.done() for other in others):
            await asyncio.wait((exchange.ended, *others), timeout=silence / 4, return_when=asyncio.FIRST_COMPLETED)
            connection = cast(ClientConnection, self.request.protocol)
            if connection.exchange is exchange and connection.full:
                continue
            if not exchange.ended.done() and asyncio.get_running_loop().time() - exchange.last_data > silence:
                raise UpstreamError("silent", f"the engine sent nothing for {silence:g} s in the middle of its answer")
        if exchange.ended.done():
            exchange.ended.result()

    async def _whole(self, exchange: Exchange, head: Head) -> web.StreamResponse:
        """An answer that is no stream: kept until it is whole, or until it is too large for that."""
        kept, full = bytearray(), asyncio.Event()

        def keep(data: bytes) -> None:
            kept.extend(data)
            if len(kept) > MAX_WHOLE_BYTES or not self.gateway.try_reserve(self.call, len(data)):
                exchange.pause()
                full.set()

        exchange.attach(keep)
        if not exchange.ended.done():  # a small answer is here together with its head
            overflow = asyncio.ensure_future(full.wait())
            try:
                await self._end(exchange, overflow)
            finally:
                overflow.cancel()
        if not exchange.ended.done():
            return await self._pass_on(exchange, head, kept)
        exchange.ended.result()
        return self._response(head, bytes(kept))

    async def _pass_on(self, exchange: Exchange, head: Head, begun: bytearray) -> web.StreamResponse:
        response = web.StreamResponse(status=head.status, headers=self._headers(head))
        if head.length is not None:
            response.content_length = head.length
        if cast(ClientConnection, self.request.protocol).is_last_answer():
            response.force_close()
        self.call.begun = True
        writer = await response.prepare(self.request)
        assert writer is not None
        self.call.first_byte()
        if self.request.method == "HEAD":  # aiohttp would write a body all the same: the start of the next answer
            return response
        await response.write(bytes(begun))
        pipe = Pipe(cast(ClientConnection, self.request.protocol), writer)
        pipe.connection.follow(exchange)
        try:
            exchange.attach(pipe.write)
            await self._end(exchange)
        except UpstreamError as error:
            raise ApiError(502, f"the engine failed in the middle of a large answer: {error}", code="cut") from None
        finally:
            pipe.connection.follow(None)
        return response

    def _headers(self, head: Head) -> list[tuple[str, str]]:
        headers = client_headers(head.headers)
        if not any(name == "Server" for name, _ in headers):
            headers.append(("Server", SERVER))
        return headers

    def _response(self, head: Head, body: bytes) -> web.Response:
        self.call.first_byte()
        if head.status >= 400:
            self.call.error_code = (head.get("x-appliance-error") or "").partition(" ")[0] or None
        return web.Response(status=head.status, headers=self._headers(head), body=body)

"""One client connection: what aiohttp leaves open towards slow, greedy or broken clients is closed here.

Added to aiohttp's protocol: a cap on connections, a timeout for request headers (slowloris), a cut for readers that
stall, detection of peers that vanished, and our error shape for malformed HTTP. A half-closed connection counts as
closed: there is no way to tell it from a client that left, and pages must be freed for that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from engine.api.errors import ApiError
from engine.api.service import CONTEXT
from engine.errors import ConfigError
from engine.log import log_event

if TYPE_CHECKING:
    from engine.api.service import Context, Service

logger = logging.getLogger(__name__)


AIOHTTP = "3.14."
PRIVATE = frozenset(
    {"_buffer_paused", "_current_request", "_force_close", "_loop", "_messages", "_reading_paused",
     "_request_in_progress"}
)  # fmt: skip
"""What Connection uses of aiohttp's protocol. Without one of them (`_buffer_paused` came with 3.14.4), or where another
release gives it another meaning, every request would be dropped."""


def check_library() -> None:
    """ConfigError under a release of aiohttp that Connection was not made for."""
    known = {name for kind in RequestHandler.__mro__ for name in getattr(kind, "__slots__", ())}
    if not aiohttp.__version__.startswith(AIOHTTP) or not known >= PRIVATE:
        raise ConfigError(
            f"aiohttp {aiohttp.__version__} is installed; the endpoint was made for {AIOHTTP}4 and later {AIOHTTP}x",
            hint="run `make setup`, or install the locked packages of .ci/requirements",
        )


def raw_response(error: ApiError) -> bytes:
    """A complete HTTP/1.1 error response for the moments when there is no request to answer."""
    body = msgspec.json.encode(error.body())
    reason = {408: "Request Timeout", 503: "Service Unavailable"}.get(error.status, "Error")
    head = [f"HTTP/1.1 {error.status} {reason}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in error.headers.items()] + ["Connection: close", "", ""]
    return "\r\n".join(head).encode() + body


class Connection(RequestHandler):
    """aiohttp's protocol with our guards."""

    def __init__(self, manager: web.Server, service: Service, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._service = service
        self._timeouts = service.config.timeouts
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._counted = False
        self._begun = False  # bytes of the next request's head came while this one was at work

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writable = cast(asyncio.Transport, transport)
        service = self._service
        if service.connections >= service.config.limits.max_connections:
            self._force_close = True
            error = ApiError(503, "too many open connections", code="connections", headers={"Retry-After": "1"})
            writable.write(raw_response(error))
            writable.close()
            return
        service.connections += 1
        self._counted = True
        _detect_vanished(transport, self._timeouts.stall)
        super().connection_made(transport)
        self._arm_header_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._counted:
            self._service.connections -= 1
            self._counted = False
        for timer in (self._header_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._stall_timer = None
        super().connection_lost(exc)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        known = len(self._messages)
        body_ended = self._current_request is not None and self._current_request.content.is_eof()
        super().data_received(data)
        complete = len(self._messages) > known
        if complete or self._request_in_progress:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
            # The beginning of a further request, behind the one at work (or, without a body, in the same segment).
            self._begun = bool(data.rpartition(b"\r\n\r\n")[2]) if complete else body_ended
        elif self._header_timer is None:
            self._arm_header_timer()  # the first bytes of a request
        self._refuse_greedy_pipelining()

    def _refuse_greedy_pipelining(self) -> None:
        """While reading is paused a disconnect is not seen. So a client that sends so much behind a generating
        request that its connection has to be paused is cut off, and the request's pages are free at once."""
        request = self._current_request
        if (
            (self._buffer_paused or self._reading_paused)
            and (context := _context(request)) is not None
            and context.run is not None
            and self.transport is not None
        ):
            log_event(logger, logging.WARNING, "pipelining_refused", req_id=context.request_id)
            self.transport.abort()

    def _arm_header_timer(self) -> None:
        self._header_timer = self._loop.call_later(self._timeouts.header, self._headers_late)

    def _headers_late(self) -> None:
        self._header_timer = None
        if self._messages or self._request_in_progress or self.transport is None:
            return
        self.transport.write(
            raw_response(
                ApiError(
                    408, f"the request's headers did not arrive in {self._timeouts.header:g} s", code="header_timeout"
                )
            )
        )
        self.force_close()

    # ---- writing ---------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self._loop.call_later(self._timeouts.stall, self._stalled)

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def _stalled(self) -> None:
        """The peer took less than one write buffer in `stall` seconds: abort, which cancels its handler."""
        self._stall_timer = None
        context = _context(self._current_request)
        log_event(
            logger,
            logging.WARNING,
            "slow_reader",
            f"client stopped reading for {self._timeouts.stall:g} s",
            req_id=context.request_id if context is not None else None,
        )
        if self.transport is not None:
            self.transport.abort()

    # ---- aiohttp's own answers -------------------------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Malformed HTTP (400) and what escaped the middleware (500), in our shape; always closes."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun, it cannot be turned into an error")
        if status >= 500:
            log_event(logger, logging.ERROR, "unhandled", str(exc), exc_info=exc)
            error = ApiError(status, "internal error", code="internal_error")
        else:
            first = (message or str(exc)).strip().partition("\n")[0]
            first = re.split(r"(?:bytearray\()?b['\"]", first)[0].rstrip(" :,")[:200] or "malformed"  # no echo of bytes
            error = ApiError(status, f"this is not valid HTTP: {first}", code="bad_http")
        self._service.metrics.responses.labels("malformed", "other", str(status)).inc()
        response = error.response()
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # refused before the middleware ran
            resp = ApiError(resp.status, resp.text or resp.reason, code="http_error").response()
            resp.force_close()
        done = await super().finish_response(request, resp, start_time)
        if self._begun and not self._messages and self._header_timer is None and self.transport is not None:
            self._arm_header_timer()
        self._begun = False
        return done


def _context(request: web.BaseRequest | None) -> Context | None:
    return request.get(CONTEXT) if request is not None else None


def _detect_vanished(transport: asyncio.BaseTransport, seconds: float) -> None:
    """Let the kernel end a connection whose peer acknowledges nothing (tcp(7)): no FIN will ever come from it."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # best effort: the deadline still ends such a request
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

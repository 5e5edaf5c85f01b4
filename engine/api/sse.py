"""Server-sent events in OpenAI's format: `data: {json}` and an empty line, at the end `data: [DONE]`.

The response starts with the first batch, so that an error before it is still a proper HTTP status. Later errors are
an event with "error" and no [DONE]. A reader that stalls is cut off by connection.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from engine.api.errors import ApiError
from engine.api.relay import error_words
from engine.api.service import CONTEXT, SERVICE
from engine.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.api.choice import Choice, Delta
    from engine.api.run import Run

logger = logging.getLogger(__name__)
INLINE_LOGPROBS = 256
LOGPROB_BYTES = 256  # about, of one token's logprobs
_encode = msgspec.json.Encoder().encode


def event(payload: dict[str, Any], first_line: bytes = b"") -> bytes:
    """One legal SSE event; JSON has no raw newline, so one data line is enough. `first_line`: an id or a comment."""
    return first_line + b"data: " + _encode(payload) + b"\n\n"


async def stream(
    request: web.Request,
    run: Run,
    headers: dict[str, str],
    *,
    render: Callable[[Choice, Delta], bytes],
    last: Callable[[], bytes],
) -> web.StreamResponse:
    """Send the run as it comes. `render` makes the events of one delta, `last` those before [DONE]."""
    response = web.StreamResponse(headers=headers)
    response.content_type = "text/event-stream"
    response.charset = "utf-8"
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"  # nginx would otherwise collect events
    if request.version < (1, 1):
        response.force_close()  # without chunks the end of the connection is the only end of a stream
    try:
        batch = await run.next_batch()
        await response.prepare(request)
        while batch is not None:
            await response.write(await _render(request, batch, render) if batch else b": ping\n\n")
            batch = await run.next_batch()
        await response.write(last() + b"data: [DONE]\n\n")
    except ApiError as exc:
        if not response.prepared:
            raise
        await _end_with_error(request, response, exc)
    except asyncio.CancelledError:
        raise
    except ConnectionError:
        raise  # the client left; the run is aborted by its owner
    except Exception as exc:
        if not response.prepared:
            raise
        log_event(logger, logging.ERROR, "stream_failed", str(exc), req_id=run.request_id, exc_info=True)
        await _end_with_error(request, response, ApiError(500, "internal error", code="internal_error"))
    return response


async def _render(
    request: web.Request, batch: list[tuple[Choice, Delta]], render: Callable[[Choice, Delta], bytes]
) -> bytes:
    """The events of a batch; in a thread when there are so many logprobs (an echoed prompt's) that it takes long."""

    def events() -> bytes:
        return b"".join([render(choice, delta) for choice, delta in batch])

    count = sum(len(delta.logprobs) for _, delta in batch)
    if count <= INLINE_LOGPROBS:
        return events()
    return await request.app[SERVICE].offload(events, size=count * LOGPROB_BYTES)


async def _end_with_error(request: web.Request, response: web.StreamResponse, error: ApiError) -> None:
    service = request.app[SERVICE]
    service.metrics.stream_errors.inc()
    request[CONTEXT].error_code = error.code
    response.force_close()
    note = f": error {error_words(error)}\n".encode() if request[CONTEXT].relay.relay else b""
    await response.write(event(error.body(), note))
    await response.write_eof()

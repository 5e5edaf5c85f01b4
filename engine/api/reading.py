"""Reading the body of a request: bounded in size, time and, by its caller, over all requests. Also the gateway's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from engine.api.errors import ApiError, bad_request, too_large


async def read_bounded(
    request: web.BaseRequest, *, limit: int, seconds: float, reserve: Callable[[int], None]
) -> bytearray:
    """The whole body. ApiError 413 over `limit` bytes (counted on what really arrives), 408 too slow, 400 broken HTTP,
    417 an unknown expectation. `reserve` gets the size of each piece before it is kept, and may refuse it."""
    if request.content_length is not None and request.content_length > limit:
        raise too_large(f"the body has {request.content_length} bytes, the limit is {limit}", code="body_too_large")
    await _continue(request)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.content.iter_any():
                reserve(len(chunk))
                body += chunk
                if len(body) > limit:
                    raise too_large(f"the body is over the limit of {limit} bytes", code="body_too_large")
    except TimeoutError as exc:
        error = ApiError(408, f"the body did not arrive within {seconds:g} s", code="body_timeout")
        error.headers["Connection"] = "close"
        raise error from exc
    except web.RequestPayloadError as exc:
        raise bad_request(f"the body cannot be read as HTTP says it should: {exc}", code="bad_body") from exc
    return body


async def _continue(request: web.BaseRequest) -> None:
    """`100 Continue` when the body is wanted, not before the key and the size were looked at."""
    expect = request.headers.get("Expect")
    if expect is None:
        return
    if expect.lower() != "100-continue":
        raise ApiError(417, f"unknown expectation {expect[:100]}", param="Expect", code="expectation")
    if request.version >= (1, 1):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer itself was sent yet

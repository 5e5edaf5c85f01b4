"""The body of a request, kept whole for a retry or a replay: bounded in size, time and over all requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from engine.api.errors import ApiError, bad_request, too_large

if TYPE_CHECKING:
    from appliance.gateway.service import Call, Gateway


async def read_body(gateway: Gateway, request: web.BaseRequest, call: Call) -> bytearray:
    """ApiError 413 over max_body_bytes (counted on what really arrives), 408 too slow, 429 too much in all, 400."""
    limit, seconds = gateway.config.limits.max_body_bytes, gateway.config.timeouts.body
    body = bytearray()
    if not request.can_read_body:
        return body
    if request.content_length is not None and request.content_length > limit:
        raise too_large(f"the body has {request.content_length} bytes, the limit is {limit}", code="body_too_large")
    await _continue(request)
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.content.iter_any():
                gateway.reserve(call, len(chunk))
                body += chunk
                if len(body) > limit:
                    raise too_large(f"the body is over the limit of {limit} bytes", code="body_too_large")
    except TimeoutError as error:
        late = ApiError(408, f"the body did not arrive within {seconds:g} s", code="body_timeout")
        late.headers["Connection"] = "close"
        raise late from error
    except web.RequestPayloadError as error:
        raise bad_request(f"the body cannot be read as HTTP says it should: {error}", code="bad_body") from error
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

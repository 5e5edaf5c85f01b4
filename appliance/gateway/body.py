"""The body of a request, kept whole for a retry or a replay: bounded in size, time and over all requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.api.reading import read_bounded

if TYPE_CHECKING:
    from aiohttp import web

    from appliance.gateway.service import Call, Gateway


async def read_body(gateway: Gateway, request: web.BaseRequest, call: Call) -> bytearray:
    """ApiError 413 over max_body_bytes (counted on what really arrives), 408 too slow, 429 too much in all, 400."""
    if not request.can_read_body:
        return bytearray()
    config = gateway.config
    return await read_bounded(
        request,
        limit=config.limits.max_body_bytes,
        seconds=config.timeouts.body,
        reserve=lambda size: gateway.reserve(call, size),
    )

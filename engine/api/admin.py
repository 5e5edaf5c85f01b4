"""/admin/*: for the host's own processes (Unix socket) or a holder of an admin key. middleware.py keeps others out."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web

from engine.api.body import read_json
from engine.api.errors import ApiError, bad_request, from_engine
from engine.api.openai import json_response
from engine.api.probes import state
from engine.api.schema import ChecksumRequest, DrainRequest, FlipRequest, GoldenRequest
from engine.api.service import SERVICE
from engine.errors import AdmissionError, EngineError
from engine.log import log_event

logger = logging.getLogger(__name__)


async def admin_state(request: web.Request) -> web.Response:
    """GET /admin/state: the full state, with 200 whatever it is."""
    service = request.app[SERVICE]
    problem = service.not_ready()
    return json_response({"status": problem[0] if problem else "ready"} | state(service))


async def drain(request: web.Request) -> web.Response:
    """POST /admin/drain: take no new request, finish those in flight. Answers at once; poll /admin/state."""
    service = request.app[SERVICE]
    body = await read_json(request, DrainRequest)
    service.drain_reason = (body.reason or "drained by the operator")[:200]
    log_event(logger, logging.WARNING, "drain", service.drain_reason, in_flight=len(service.runs))
    return json_response({"draining": service.drain_reason, "in_flight_http": len(service.runs)})


async def undrain(request: web.Request) -> web.Response:
    """POST /admin/undrain: take requests again; refused while the process is shutting down."""
    service = request.app[SERVICE]
    await read_json(request, DrainRequest)
    if service.shutting_down:
        raise ApiError(409, "the process is shutting down; start it again instead", code="shutting_down")
    service.drain_reason = None
    log_event(logger, logging.WARNING, "undrain")
    return json_response({"draining": None})


async def golden(request: web.Request) -> web.Response:
    """POST /admin/golden {"args": {"prompt_ids": [...]}}: SHA-256 of the logits of every position of that prompt."""
    body = await read_json(request, GoldenRequest)
    return await _control(request, "golden", prompt_ids=body.args.prompt_ids)


async def checksum(request: web.Request) -> web.Response:
    """POST /admin/checksum: engine-core hashes its weight arena again."""
    await read_json(request, ChecksumRequest)
    return await _control(request, "checksum")


async def flip(request: web.Request) -> web.Response:
    """POST /admin/flip {"args": {"bit", "offset", "tensor"}}: damage one bit of the weights, for tests and drills. 400
    unless the engine was started with --allow-fault-injection."""
    args = (await read_json(request, FlipRequest)).args
    return await _control(request, "flip", bit=args.bit, offset=args.offset, tensor=args.tensor)


async def _control(request: web.Request, op: str, **args: Any) -> web.Response:
    """Ends with its client: when that one leaves, this handler is cancelled and the question to engine-core with it."""
    service = request.app[SERVICE]
    seconds = service.config.timeouts.control
    try:
        async with asyncio.timeout(seconds):
            result = await service.client.control(op, timeout_seconds=seconds, **args)
    except TimeoutError as exc:
        raise ApiError(504, f"{op} did not end within {seconds:g} s", code="timeout") from exc
    except AdmissionError as exc:
        raise bad_request(exc.message, "args") from exc
    except EngineError as exc:
        raise from_engine(exc) from exc
    ready = service.client.ready
    device = ready.device if ready is not None else None
    version = service.config.version
    return json_response({"op": op, "device": device, "engine_version": version, "result": result})

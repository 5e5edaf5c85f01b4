"""What happens to every request: an id, the key, errors in one shape, a metric and a log line."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from engine.api.auth import bearer
from engine.api.errors import SERVER, ApiError, bad_request, from_engine
from engine.api.relay import ERROR_HEADER, RELAY_HEADER, error_words, parse_headers
from engine.api.routes import ROUTES, Access, Route
from engine.api.service import CONTEXT, SERVICE, Context
from engine.errors import EngineError
from engine.log import log_event

if TYPE_CHECKING:
    from engine.api.service import Service

logger = logging.getLogger("engine.api.access")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ID_HEADER = "X-Request-Id"
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_BY_PATH = {(route.method, route.path.replace(":.+", "")): route for route in ROUTES}


@web.middleware
async def outer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Names the request, answers every error in the OpenAI shape, counts and logs the outcome."""
    service = request.app[SERVICE]
    given = request.headers.get(ID_HEADER)
    valid = given is None or _ID.fullmatch(given) is not None
    request_id = given if given is not None and valid else secrets.token_hex(12)
    request[CONTEXT] = Context(request_id, time.monotonic())
    route = _route(request)
    probe = route is not None and route.probe
    service.active += not probe
    try:
        return await _answer(service, request, handler, valid)
    finally:
        service.active -= not probe
        service.release(request[CONTEXT])


async def _answer(service: Service, request: web.Request, handler: Handler, valid: bool) -> web.StreamResponse:
    response: web.StreamResponse
    try:
        if not valid:
            raise bad_request(f"`{ID_HEADER}` must be 1 to 128 of A-Z a-z 0-9 . _ : / + = @ -", ID_HEADER)
        _check_host(service, request)
        authorize(service, request)
        _take_relay_headers(request)
        response = await handler(request)
    except ApiError as exc:
        response = _refused(request, exc)
    except EngineError as exc:
        response = _refused(request, from_engine(exc))
    except web.HTTPException as exc:
        response = _refused(request, _http_error(request, exc))
    except (asyncio.CancelledError, ConnectionError):
        _account(service, request, 499)
        raise
    except Exception as exc:
        log_event(logger, logging.ERROR, "unhandled", str(exc), req_id=request[CONTEXT].request_id, exc_info=True)
        message = "internal error; the log has it under this request id"
        response = _refused(request, ApiError(500, message, code="internal_error"))
    if not response.prepared:
        response.headers[ID_HEADER] = request[CONTEXT].request_id
        if service.shutting_down:
            response.force_close()
    _account(service, request, response.status)
    return response


def _refused(request: web.Request, error: ApiError) -> web.Response:
    context = request[CONTEXT]
    context.error_code, context.error_param = error.code, error.param
    response = error.response()
    if request.headers.get(RELAY_HEADER) == "1" and _is_unix(request):
        response.headers[ERROR_HEADER] = error_words(error)
    return response


def _take_relay_headers(request: web.Request) -> None:
    context, headers = request[CONTEXT], request.headers
    context.relay = parse_headers(headers, trusted=_is_unix(request), has_request_id=ID_HEADER in headers)
    if context.relay.tenant is not None:
        context.key_label = context.relay.tenant


async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    """Streams send their headers before the middleware sees them."""
    response.headers["Server"] = SERVER
    if CONTEXT in request:
        response.headers[ID_HEADER] = request[CONTEXT].request_id


def _check_host(service: Service, request: web.Request) -> None:
    """Without keys a web page could reach us through the browser of somebody on this host, by a domain name that it
    points at 127.0.0.1 (DNS rebinding). So then only addresses, localhost and plain host names are served."""
    if service.keys.configured or service.config.auth == "none" or _is_unix(request):
        return
    host = request.headers.get("Host", "")
    name = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.strip("[.").lower()
    if "." not in name or name.endswith(".localhost") or _is_address(name):
        return
    raise ApiError(
        403, f"the host name `{name[:100]}` is not served without keys; use an address, or configure keys", code="host"
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def authorize(service: Service, request: web.Request) -> None:
    """Default-deny: whatever is not listed as open needs a key, unknown paths too. Sets trusted and admin."""
    route = _route(request)
    access = route.access if route is not None else Access.KEY
    unix = _is_unix(request)
    token = bearer(request.headers.get("Authorization"))
    admin = unix or (token is not None and service.admin_keys.match(token) is not None)
    label = service.keys.match(token) if token is not None else None
    request[CONTEXT].admin = admin
    request[CONTEXT].trusted = admin or label is not None or not service.keys.configured
    request[CONTEXT].key_label = label
    if access in (Access.OPEN, Access.PARTLY) or admin:
        return
    if access is Access.ADMIN:
        if token is None:
            raise _denied("this route needs an admin key or the Unix socket")
        raise ApiError(403, "this key is not an admin key", code="admin_only")
    if not request[CONTEXT].trusted:
        raise _denied("give a valid API key in 'Authorization: Bearer KEY'")


def _denied(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _is_unix(request: web.Request) -> bool:
    transport = request.transport
    sock = transport.get_extra_info("socket") if transport is not None else None
    return sock is not None and sock.family == socket.AF_UNIX


def _route(request: web.Request) -> Route | None:
    resource = request.match_info.route.resource
    if resource is None:
        return None
    return _BY_PATH.get(("GET" if request.method == "HEAD" else request.method, resource.canonical))


def _http_error(request: web.Request, exc: web.HTTPException) -> ApiError:
    """aiohttp's own refusals in our shape."""
    if exc.status == 404:
        return ApiError(404, f"there is no {request.path[:200]}; see /openapi.json", code="unknown_route")
    if exc.status == 405:
        allow = exc.headers.get("Allow", "")
        return ApiError(
            405, f"{request.method[:20]} is not allowed here; use {allow}", code="method", headers={"Allow": allow}
        )
    return ApiError(exc.status, exc.text or exc.reason or "refused", code="http_error")


def _account(service: Service, request: web.Request, status: int) -> None:
    """The metric and the log line of one finished request."""
    route = _route(request)
    path = route.path.replace(":.+", "") if route is not None else "unknown"
    method = request.method if request.method in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS") else "other"
    context = request[CONTEXT]
    seconds = time.monotonic() - request[CONTEXT].arrival
    service.metrics.responses.labels(path, method, str(status)).inc()
    run = context.run
    if run is not None:
        service.metrics.latency.labels(path).observe(seconds)
    if route is not None and route.probe and (status < 500 or context.error_code == "loading"):
        return  # a poller that waits for us is no news
    log_event(
        logger,
        logging.INFO if status < 500 else logging.WARNING,
        "http_request",
        f"{method} {path} {status}",
        req_id=request[CONTEXT].request_id,
        method=method,
        route=path,
        status=status,
        seconds=round(seconds, 6),
        key=context.key_label,
        resumed=True if context.relay.resume is not None else None,
        prompt_tokens=run.prompt_tokens if run else None,
        completion_tokens=run.completion_tokens if run else None,
        seed=run.plan.params.seed if run else None,
        finish=[choice.finish_reason for prompt in run.prompts for choice in prompt.choices] if run else None,
        error=context.error_code,
        param=context.error_param,
    )

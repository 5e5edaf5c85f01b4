"""Errors as clients see them: the OpenAI shape {"error": {"message", "type", "param", "code"}}, always JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from engine.errors import AdmissionError, EngineDead, EngineError, QueueFull, TemplateError, TextError

SERVER = "appliance"  # instead of the versions of our libraries

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}


def _clean(text: str) -> str:
    """What a client sent may hold stray bytes (lone surrogates here), which no JSON can carry."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class ApiError(Exception):
    """An answer that is an error. `param` is the path of the offending field, `where` (engine errors) layer, op and
    position."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = _clean(message), _clean(param) if param is not None else None
        self.headers = dict(headers or {})
        self.where = where

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error: dict[str, Any] = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        if self.where:
            error["where"] = dict(self.where)
        return {"error": error}

    def response(self) -> web.Response:
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(self.body(), enc_hook=str),
            content_type="application/json",
            headers={"Server": SERVER} | self.headers,
        )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def too_large(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(413, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after_seconds: int = 5) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_seconds)})


def from_engine(exc: EngineError, param: str | None = None) -> ApiError:
    """The HTTP face of an engine error."""
    message = f"{exc.message} ({exc.hint})" if exc.hint else exc.message
    if isinstance(exc, QueueFull):
        return ApiError(
            429, message, code="queue_full", headers={"Retry-After": str(max(1, int(exc.retry_after_seconds)))}
        )
    if isinstance(exc, EngineDead):
        return unavailable(f"the engine is gone: {message}", "engine_dead")
    if isinstance(exc, AdmissionError):
        return too_large(message, param, "context_length_exceeded")
    if isinstance(exc, TextError | TemplateError):
        return bad_request(message, param, "invalid_text" if isinstance(exc, TextError) else "template_error")
    where = {key: getattr(exc, key) for key in ("layer", "op", "position") if getattr(exc, key, None) not in (None, "")}
    return ApiError(500, message, code="engine_error", where=where or None)

"""The table of routes: path, handler, who may call it, what it takes. openapi.json is made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from aiohttp import web

from engine.api import admin, openai, probes, schema, simple
from engine.api.service import SERVICE


class Access(StrEnum):
    OPEN = "open"  # no key: probes of load balancers
    PARTLY = "partly"  # open, but says more to a holder of a key
    KEY = "key"
    ADMIN = "admin"  # Unix socket or admin key


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    access: Access = Access.KEY
    body: type[schema.Request] | None = None
    probe: bool = False  # not in the access log


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: this API in OpenAPI 3.1."""
    return openai.json_response(document(request.app[SERVICE].config.version))


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/completions", openai.completions, body=schema.CompletionRequest),
    Route("POST", "/v1/chat/completions", openai.chat_completions, body=schema.ChatRequest),
    Route("GET", "/v1/models", openai.list_models),
    Route("GET", "/v1/models/{model:.+}", openai.get_model),
    Route("POST", "/infer", simple.infer, body=schema.InferRequest),
    Route("POST", "/generate", simple.generate, body=schema.GenerateRequest),
    Route("POST", "/tokenize", simple.tokenize, body=schema.TokenizeRequest),
    Route("POST", "/detokenize", simple.detokenize, body=schema.DetokenizeRequest),
    Route("POST", "/encoding/detect", simple.detect_encoding),
    Route("GET", "/livez", probes.livez, Access.OPEN, probe=True),
    Route("GET", "/readyz", probes.readyz, Access.OPEN, probe=True),
    Route("GET", "/health", probes.health, Access.PARTLY, probe=True),
    Route("GET", "/metrics", probes.metrics, probe=True),
    Route("GET", "/openapi.json", openapi),
    Route("GET", "/admin/state", admin.admin_state, Access.ADMIN, probe=True),
    Route("POST", "/admin/drain", admin.drain, Access.ADMIN, schema.DrainRequest),
    Route("POST", "/admin/undrain", admin.undrain, Access.ADMIN, schema.DrainRequest),
    Route("POST", "/admin/golden", admin.golden, Access.ADMIN, schema.GoldenRequest),
    Route("POST", "/admin/checksum", admin.checksum, Access.ADMIN, schema.ChecksumRequest),
    Route("POST", "/admin/flip", admin.flip, Access.ADMIN, schema.FlipRequest),
)


def document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1 document of ROUTES."""
    bodies = [route.body for route in ROUTES if route.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    references = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        summary = " ".join((route.handler.__doc__ or "").split())
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {"200": {"description": "done"}, "default": {"$ref": "#/components/responses/Error"}},
            "security": [] if route.access in (Access.OPEN, Access.PARTLY) else [{"key": []}],
        }
        if route.body is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": references[route.body]}},
            }
        elif route.path == "/encoding/detect":
            operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
        path = route.path.replace("{model:.+}", "{model}")
        if "{model}" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "LLM appliance", "version": version},
        "paths": paths,
        "components": {
            "schemas": dict(components) | {"Error": _ERROR},
            "responses": {
                "Error": {
                    "description": "OpenAI's error shape",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

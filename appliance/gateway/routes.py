"""What is served here, and what is relayed. Everything else is 404: an engine's /admin and /metrics have no entry, so
there is no spelling of them that reaches an engine."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from aiohttp import web

from engine.api.errors import ApiError

RELAYED: dict[str, str] = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/infer": "POST",
    "/generate": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/encoding/detect": "POST",
    "/openapi.json": "GET",
}
MODEL_PREFIX = "/v1/models/"
OWN = {"/livez": True, "/readyz": True, "/health": True, "/metrics": False}
"""Path -> whether it may be asked without a key (/health then says only its status)."""


@dataclass(slots=True, frozen=True)
class Target:
    """Where a request goes."""

    route: str  # for metrics: bounded, never what a client wrote
    path: str = ""  # sent to the engine
    own: str | None = None
    open: bool = False
    refusal: ApiError | None = None

    @property
    def probe(self) -> bool:
        return self.own is not None


def find(request: web.BaseRequest) -> Target:
    """The target by the decoded path; unknown paths and methods get a target that refuses (after the key)."""
    path, method = request.path, request.method
    if path in OWN:
        if method not in ("GET", "HEAD"):
            return Target(path, refusal=_not_allowed(method, "GET"))
        return Target(path, own=path, open=OWN[path])
    if path in RELAYED:
        route = target = path
        wanted = RELAYED[path]
    elif path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX) and not {".", ".."} & set(path.split("/")):
        route, wanted = MODEL_PREFIX + "{model}", "GET"
        target = MODEL_PREFIX + quote(path[len(MODEL_PREFIX) :], safe="", errors="surrogateescape")
    else:
        refusal = ApiError(404, f"there is no {path[:200]}; see /openapi.json", code="unknown_route")
        return Target("unknown", refusal=refusal)
    if method != wanted and not (method == "HEAD" and wanted == "GET"):
        return Target(route, refusal=_not_allowed(method, wanted))
    query = request.rel_url.raw_query_string
    return Target(route, path=f"{target}?{query}" if query else target)


def _not_allowed(method: str, wanted: str) -> ApiError:
    return ApiError(405, f"{method[:20]} is not allowed here; use {wanted}", code="method", headers={"Allow": wanted})

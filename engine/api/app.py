"""build_app: the aiohttp application of one engine. Listening, limits of connections and shutdown are server.py's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from engine.api.body import no_expect
from engine.api.middleware import on_prepare, outer
from engine.api.routes import ROUTES
from engine.api.service import SERVICE, Detokenizer, EngineClient, Service, StopMatcher, Tokenizer

if TYPE_CHECKING:
    from engine.api.config import ApiConfig


def build_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ApiConfig,
    *,
    make_detokenizer: Callable[..., Detokenizer] | None = None,
    make_stop_matcher: Callable[[list[str]], StopMatcher] | None = None,
) -> web.Application:
    """The application. `make_detokenizer(tokenizer, skip_special_tokens=...)` and `make_stop_matcher(stops)` default to
    the engine's own."""
    service = Service(
        client,
        tokenizer,
        config,
        make_detokenizer=make_detokenizer or _engine_part("engine.tokenizer", "Detokenizer"),
        make_stop_matcher=make_stop_matcher or _engine_part("engine.stop", "StopMatcher"),
    )
    # The body cap is ours (body.py counts what is read); aiohttp's own would answer in another shape.
    app = web.Application(middlewares=[outer], client_max_size=config.limits.max_body_bytes + 1)
    app[SERVICE] = service
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.handler, expect_handler=no_expect)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, route.handler, expect_handler=no_expect)
    app.on_response_prepare.append(on_prepare)
    app.on_cleanup.append(_cleanup)
    return app


def _engine_part(module: str, name: str) -> Callable[..., Any]:
    """Imported late: tests of the API run without the tokenizer's compiled core."""
    part: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return part


async def _cleanup(app: web.Application) -> None:
    for pool in (app[SERVICE].pool, app[SERVICE].large_pool):
        pool.shutdown(wait=False, cancel_futures=True)

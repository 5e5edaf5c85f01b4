"""The gateway's own routes: /livez, /readyz, /health, /metrics. Nothing here waits for an engine."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from appliance.gateway.canary_gauges import canary_gauges
from appliance.gateway.metrics import Gauge, Metric, render
from engine.api.errors import ApiError, unavailable

if TYPE_CHECKING:
    from appliance.gateway.engine_metrics import Part
    from appliance.gateway.service import Call, Gateway

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


async def livez(gateway: Gateway, request: web.BaseRequest, call: Call | None) -> web.Response:
    """200: this process turns its event loop. Its slot is in a header, for who asks through the canary's rules."""
    response = json_response({"status": "ok"})
    response.headers["X-Appliance-Slot"] = gateway.settings.slot
    return response


async def readyz(gateway: Gateway, request: web.BaseRequest, call: Call | None) -> web.Response:
    """200 when a request would be served now, else 503 with the reason and Retry-After."""
    problem = gateway.not_ready()
    if problem is not None:
        code, reason = problem
        raise unavailable(reason, code)
    return json_response({"status": "ready"})


async def health(gateway: Gateway, request: web.BaseRequest, call: Call | None) -> web.Response:
    """The status; for a holder of a key every GPU. 503 when not ready."""
    problem = gateway.not_ready()
    body: dict[str, Any] = {"status": problem[0] if problem else "ready", "reason": problem[1] if problem else None}
    if call is None or call.trusted:
        body |= state(gateway)
    response = json_response(body, 200 if problem is None else 503)
    if problem is not None:
        response.headers["Retry-After"] = "5"
    return response


async def metrics(gateway: Gateway, request: web.BaseRequest, call: Call | None) -> web.Response:
    """Prometheus text; on a public listener beyond loopback only the admin listener has it."""
    if call is not None and not gateway.settings.public_metrics:
        raise ApiError(403, "/metrics is on the admin listener only", code="admin_only")
    return web.Response(body=await gateway.exposition(), headers={"Content-Type": METRICS_TYPE})


Handler = Callable[["Gateway", web.BaseRequest, "Call | None"], Awaitable[web.Response]]
own_routes: dict[str, Handler] = {"/livez": livez, "/readyz": readyz, "/health": health, "/metrics": metrics}


def state(gateway: Gateway) -> dict[str, Any]:
    """What a trusted caller is told: /health with a key, /state on the admin socket. Of this process."""
    engines = gateway.engines
    here = {(engine.gpu, engine.release): engine for engine in engines.admitted}
    gpus = []
    for gpu, launcher in sorted(engines.launchers.items()):
        rows = []
        for entry in launcher.engines:
            engine = here.get((gpu, entry.release))
            rows.append({
                "release": entry.release, "state": entry.state, "admitted": engine is not None,
                "reachable": engine.reachable if engine else None, "in_flight": engine.in_flight if engine else 0,
                "restarts": entry.restarts, "last_exit": entry.last_exit, "progress": entry.progress,
            })  # fmt: skip
        gpus.append({
            "gpu": gpu, "uuid": launcher.uuid, "status": launcher.status, "admitted": launcher.admitted,
            "share": launcher.share, "holds": launcher.holds, "engines": rows,
        })  # fmt: skip
    return {
        "slot": gateway.settings.slot,
        "epoch": gateway.epoch,
        "canary_run": gateway.canary.run,
        "release": engines.release,
        "serving": engines.serving(),
        "draining": engines.draining,
        "in_flight": gateway.active,
        "waiting": gateway.waiting,
        "connections": gateway.connections,
        "buffered_bytes": gateway.buffered_bytes,
        "uptime_seconds": round(time.time() - gateway.started, 1),
        "gpus": gpus,
    }


def gauges(gateway: Gateway) -> list[Metric]:
    """Of one process; those of several are added up."""
    slot = gateway.settings.slot
    active = Gauge("appliance_gateway_requests_in_flight", "Requests in work", ("slot",))
    active.set(gateway.active, slot)
    waiting = Gauge("appliance_gateway_requests_waiting", "Of these: waiting for an engine", ("slot",))
    waiting.set(gateway.waiting, slot)
    connections = Gauge("appliance_gateway_connections", "Open client connections", ("slot",))
    connections.set(gateway.connections, slot)
    buffered = Gauge("appliance_gateway_buffered_bytes", "Bodies and answers in memory", ("slot",))
    buffered.set(gateway.buffered_bytes, slot)
    engines = Gauge(
        "appliance_gateway_engine_in_flight",
        "Requests that an engine has from this gateway",
        ("slot", "gpu", "release"),
    )
    for engine in gateway.engines.admitted:
        engines.inc(slot, str(engine.gpu), engine.release, by=engine.in_flight)
    return [active, waiting, connections, buffered, engines]


def host_gauges(gateway: Gateway) -> list[Metric]:
    """What the launchers' state files say: the same in every process, so never added up."""
    slot, engines = gateway.settings.slot, gateway.engines
    ready = Gauge("appliance_gateway_ready", "1 while /readyz answers 200", ("slot",))
    ready.set(gateway.not_ready() is None, slot)
    release = Gauge("appliance_slot_release", "1 for the release that the slot's pointer names", ("slot", "release"))
    if engines.release is not None:
        release.set(1, slot, engines.release)
    drained = Gauge("appliance_host_drained", "1 while the host is drained for its load balancers")
    drained.set(engines.draining is not None)
    admitted = Gauge("appliance_gpu_admitted", "1 while nothing holds this GPU", ("gpu", "uuid"))
    share = Gauge("appliance_gpu_share", "Of its usual load, 0 to 1; less than 1 on probation", ("gpu", "uuid"))
    holds = Gauge("appliance_gpu_hold", "1 for each owner that holds this GPU", ("gpu", "owner"))
    states = Gauge("appliance_engine_state", "1 for the state an engine is in", ("gpu", "release", "state"))
    restarts = Gauge("appliance_engine_restarts_total", "Restarts of an engine", ("gpu", "release"))
    restarts.kind = "counter"
    for gpu, launcher in engines.launchers.items():
        admitted.set(launcher.admitted, str(gpu), launcher.uuid)
        share.set(launcher.share, str(gpu), launcher.uuid)
        for owner in launcher.holds:
            holds.set(1, str(gpu), owner)
        for entry in launcher.engines:
            states.set(1, str(gpu), entry.release, entry.state)
            restarts.set(entry.restarts, str(gpu), entry.release)
    clients = Gauge(
        "appliance_gateway_run_clients",
        "Distinct addresses (IPv6: networks of 64 bits) that requests came from in the canary run that is on",
        ("slot",),
    )
    clients.set(gateway.canary.clients.number, slot)
    canary = canary_gauges(gateway.settings.paths)
    return [ready, release, drained, admitted, share, holds, states, restarts, clients, *canary]


def render_all(counted: list[Metric], gateway: Gateway, engines: list[Part]) -> bytes:
    """`counted`: of all processes. `engines`: what they say of themselves."""
    handed_on = gateway.engine_metrics
    ours = [*counted, *host_gauges(gateway), handed_on.errors]
    theirs = handed_on.render(engines, ours)  # first: it counts what it leaves out
    return render(ours) + theirs

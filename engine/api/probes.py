"""/livez, /readyz, /health, /metrics, /openapi.json: nothing here waits for the engine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from engine.api.errors import ApiError, unavailable
from engine.api.openai import json_response
from engine.api.service import CONTEXT, SERVICE
from engine.host_memory import resident_bytes

if TYPE_CHECKING:
    from engine.api.service import Service


async def livez(request: web.Request) -> web.Response:
    """GET /livez: this process turns its event loop. Nothing else is looked at."""
    return json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """GET /readyz: 200 when a request would be taken now, else 503 with the reason and Retry-After."""
    problem = request.app[SERVICE].not_ready()
    if problem is not None:
        code, reason = problem
        raise unavailable(reason, code)
    return json_response({"status": "ready"})


async def health(request: web.Request) -> web.Response:
    """GET /health: everything at a glance; 503 when not ready. Without a key only the status."""
    service = request.app[SERVICE]
    problem = service.not_ready()
    status = "ready" if problem is None else problem[0]
    body: dict[str, Any] = {"status": status, "reason": problem[1] if problem else None}
    if request[CONTEXT].trusted:
        body |= state(service)
    response = json_response(body)
    if problem is not None:
        response.set_status(503)
        response.headers["Retry-After"] = "5"
    return response


def state(service: Service) -> dict[str, Any]:
    """What /health and /admin/state tell a trusted caller."""
    client, stats, ready, loading = service.client, service.client.stats, service.client.ready, service.client.loading
    return {
        "model": service.config.model,
        "engine": {
            "state": client.state,
            "backend": ready.backend if ready else None,
            "heartbeat_age_seconds": round(time.monotonic() - client.last_stats_at, 3) if ready else None,
            "max_model_len": service.max_model_len,
            "weights_bytes": ready.weights_bytes if ready else None,
            "weights_checksum": ready.weights_checksum if ready else None,
            "load_seconds": ready.load_seconds if ready else None,
            "steps": stats.steps if stats else None,
            "preemptions": stats.preemptions if stats else None,
        },
        "device": ready.device if ready else None,
        "weights_checksum": ready.weights_checksum if ready else None,
        "loading": round(service.load_fraction, 4),
        "load": (
            {"phase": loading.phase, "done": loading.done, "total": loading.total} if loading and not ready else None
        ),
        "progress": progress(service),
        "kv": (
            {
                "pages_free": stats.kv_pages_free,
                "pages_total": stats.kv_pages_total,
                "slots_unused": stats.kv_slots_unused,
                "prefix_hit_tokens": stats.prefix_hit_tokens,
                "prefix_query_tokens": stats.prefix_query_tokens,
            }
            if stats
            else None
        ),
        "requests": {
            "running": stats.running if stats else None,
            "waiting": stats.waiting if stats else None,
            "waiting_by_length": stats.waiting_by_bucket if stats else {},
            "in_flight_http": len(service.runs),
            "streams": service.streams,
            "queued_requests": client.queued_requests,
            "queued_prompt_tokens": client.queued_prompt_tokens,
        },
        "errors": errors(service),
        "memory": memory() | {"core_resident_bytes": stats.rss_bytes if stats else None},
        "versions": {"appliance": service.config.version, "python": sys.version.split()[0]},
        "system_fingerprint": service.fingerprint,
        "uptime_seconds": round(time.time() - service.started, 1),
        "draining": service.drain_reason,
    }


def progress(service: Service) -> dict[str, Any]:
    """Whether work moves on: steps that stand still while `queued` is not 0 are a stall."""
    client, stats = service.client, service.client.stats
    stepped = client.last_step_at
    return {
        "steps": stats.steps if stats else 0,
        "queued": client.open_requests,
        "waiting": stats.waiting if stats else 0,
        "running": stats.running if stats else 0,
        "last_step_age_seconds": round(time.monotonic() - stepped, 3) if stepped is not None else None,
    }


def errors(service: Service) -> dict[str, Any]:
    """What went wrong on the device since this engine started: how often, and the newest with the kernel (`op`) and, as
    far as known, layer, head and position. `number` counts up, so that a reader sees what is new to it."""
    faults, now = service.client.faults, time.monotonic()
    recent = [
        {
            "number": fault.number,
            "kind": fault.kind,
            "error": fault.error,
            "where": fault.where,
            "age_seconds": round(max(0.0, now - fault.at), 3),
        }
        for fault in faults
    ]
    return {"total": faults[-1].number if faults else 0, "recent": recent}


def memory() -> dict[str, int | None]:
    """Memory of engine-api and of the host, in bytes (proc(5))."""
    resident = resident_bytes()
    host = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            host[name] = int(rest.split()[0]) * 1024
    return {
        "api_resident_bytes": resident,
        "host_total_bytes": host.get("MemTotal", 0),
        "host_available_bytes": host.get("MemAvailable", 0),
    }


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: Prometheus text; on a listener beyond loopback it is only on the admin (Unix) socket."""
    service = request.app[SERVICE]
    if not service.metrics_public and not request[CONTEXT].admin:
        raise ApiError(403, "/metrics is served on the admin socket only", code="admin_only")
    return web.Response(
        body=service.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    )

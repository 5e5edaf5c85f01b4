"""One gateway process: what its requests share, and what happens to each of them before and after the relay."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from appliance.gateway.body import read_body
from appliance.gateway.canary_run import RunWatch
from appliance.gateway.counts import counts
from appliance.gateway.downstream import ClientConnection
from appliance.gateway.engine_metrics import EngineMetrics
from appliance.gateway.engines import POLL_SECONDS, Engine, Engines
from appliance.gateway.metrics import GatewayMetrics
from appliance.gateway.probes import gauges, own_routes, render_all, state
from appliance.gateway.relay import Relay
from appliance.gateway.routes import Target, find
from appliance.gateway.stream import shutting_down
from engine.api.errors import SERVER, ApiError, bad_request, unavailable
from engine.api.service import CONTEXT
from engine.log import log_event

if TYPE_CHECKING:
    from appliance.gateway.settings import Access, Settings
    from appliance.gateway.stream import Stream
    from engine.api.config import ApiConfig

logger = logging.getLogger("appliance.gateway.access")
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # as engine/api/middleware.py takes it
_MAX_TENANT = 256  # engine/api/relay.py


@dataclass(slots=True, eq=False)
class Call:
    """What is known of one request. `run` and `request_id` are read by engine/api/connection.py."""

    request_id: str
    arrival: float  # CLOCK_MONOTONIC seconds
    gateway: Gateway
    route: str = "unknown"
    trusted: bool = False
    key_label: str | None = None
    run: object | None = None  # set while an engine may be at work for it
    buffered_bytes: int = 0
    release: str = ""  # of the engine that answered
    gpu: int | None = None
    retries: int = 0
    replays: int = 0
    error_code: str | None = None
    first_at: float | None = None
    begun: bool = False  # something of the answer may have been sent
    streaming: bool = False  # an engine's events go to the client; Stream.shut_down ends that
    aborted: bool = False  # cancelled by us, not by its client

    def take_abort(self) -> bool:
        """Whether a CancelledError is the gateway's own end: then it is taken back, and the client is told."""
        aborted, self.aborted = self.aborted, False
        if aborted and (task := asyncio.current_task()) is not None:
            task.uncancel()
        return aborted

    @property
    def tenant(self) -> str | None:
        """The key's label as the engine takes it (1 to 256 printable characters)."""
        label = self.key_label
        return label if label is None or (label.isprintable() and len(label) <= _MAX_TENANT) else _short(label)

    def answered_by(self, engine: Engine) -> None:
        self.release, self.gpu = engine.release, engine.gpu

    def first_byte(self) -> None:
        if self.first_at is None:
            self.first_at = time.monotonic()
            gateway = self.gateway
            gateway.metrics.first_byte.observe(
                self.first_at - self.arrival, gateway.settings.slot, self.release, self.route
            )


def _short(label: str) -> str:
    import hashlib

    return "sha256:" + hashlib.sha256(label.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass
class Gateway:
    """`handle` is the aiohttp handler of the public listener."""

    settings: Settings
    access: Access
    engines: Engines
    metrics: GatewayMetrics
    active: int = 0  # requests in work, probes not counted
    waiting: int = 0  # of these: for an engine
    connections: int = 0  # counted by engine/api/connection.py
    stopping: bool = False  # no new requests
    aborting: bool = False  # nor more time for those that wait
    started: float = field(default_factory=time.time)
    buffered_bytes: int = 0
    streams: set[Stream] = field(default_factory=set)
    calls: dict[Call, asyncio.Task[Any]] = field(default_factory=dict)  # in work, probes not among them
    engine_metrics: EngineMetrics = field(init=False)
    gather: Callable[[], Awaitable[bytes]] | None = None  # the metrics of all workers, where there are several
    describe_workers: Callable[[], Awaitable[dict[str, Any]]] | None = None
    count_workers: Callable[[], Awaitable[dict[str, Any]]] | None = None
    canary: RunWatch = field(init=False)
    epoch: str = field(default_factory=lambda: secrets.token_hex(8))  # of what `metrics` has counted

    def __post_init__(self) -> None:
        self.engine_metrics = EngineMetrics(self.engines, self.settings.paths.watchdog_socket)
        self.canary = RunWatch(self.settings.paths.canary_marker, self.settings.slot)

    def poll(self) -> None:
        """Look once at what others have written for us."""
        self.engines.poll()
        self.canary.poll()

    async def keep_up(self) -> None:
        """Poll for ever."""
        while True:
            self.poll()
            await asyncio.sleep(POLL_SECONDS)

    @property
    def config(self) -> ApiConfig:
        """For engine/api/connection.py."""
        return self.settings.api

    # ---- bounded memory --------------------------------------------------------------------------------------------

    def try_reserve(self, call: Call, num_bytes: int) -> bool:
        """Account for bytes of a body or an answer kept in memory; False when all together are too much."""
        if self.buffered_bytes + num_bytes > self.config.limits.max_buffered_bytes:
            return False
        self.buffered_bytes += num_bytes
        call.buffered_bytes += num_bytes
        return True

    def reserve(self, call: Call, num_bytes: int) -> None:
        """The same, or ApiError 429."""
        if not self.try_reserve(call, num_bytes):
            raise ApiError(429, "too many large requests at once", code="queue_full", headers={"Retry-After": "1"})

    # ---- one request -----------------------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Names the request, answers every error in the OpenAI shape, counts and logs the outcome."""
        given = request.headers.get("X-Request-Id")
        valid = given is None or _ID.fullmatch(given) is not None
        call = Call(given if given is not None and valid else secrets.token_hex(12), time.monotonic(), self)
        request[CONTEXT] = cast(Any, call)
        target = find(request)
        call.route = target.route
        self.active += not target.probe
        response: web.StreamResponse
        try:
            if not valid:
                raise bad_request("`X-Request-Id` must be 1 to 128 of A-Z a-z 0-9 . _ : / + = @ -", "X-Request-Id")
            self._authorize(request, call, target)
            response = await self._answer(request, call, target)
        except ApiError as error:
            response = self._failed(request, call, target, error)
        except asyncio.CancelledError:
            if not call.take_abort():
                self._gone(request, call, target)
                raise
            response = self._failed(request, call, target, shutting_down())
        except ConnectionError:
            self._gone(request, call, target)
            raise
        except Exception as error:
            log_event(logger, logging.ERROR, "unhandled", str(error), req_id=call.request_id, exc_info=True)
            internal = ApiError(500, "internal error; the log has it under this id", code="internal_error")
            response = self._failed(request, call, target, internal)
        finally:
            self.calls.pop(call, None)
            self.active -= not target.probe
            self.buffered_bytes -= call.buffered_bytes
            call.run = None
        if not response.prepared:
            response.headers["X-Request-Id"] = call.request_id
            response.headers["Server"] = SERVER
            last = cast(ClientConnection, request.protocol).is_last_answer()
            if last or self.stopping:
                response.force_close()
        self._account(request, call, target, response.status)
        return response

    def _failed(self, request: web.BaseRequest, call: Call, target: Target, error: ApiError) -> web.Response:
        """The answer that says so; ConnectionError where another one has begun: a second head would be read as its
        body, so a body that breaks off is the only way left to say that it is not whole."""
        call.error_code = error.code
        if not call.begun:
            return error.response()
        log_event(logger, logging.ERROR, "answer_cut", error.message, req_id=call.request_id, code=error.code)
        self.metrics.errors.inc(self.settings.slot, call.release, "cut")
        if request.transport is not None:
            request.transport.abort()
        self._account(request, call, target, 499)
        raise ConnectionError(error.message) from None

    def _gone(self, request: web.BaseRequest, call: Call, target: Target) -> None:
        """Its client left."""
        self.metrics.disconnects.inc(self.settings.slot, call.release)
        self._account(request, call, target, 499)

    def end_calls(self) -> None:
        """This process has to go: whoever has no answer yet is told so (a stream: by Stream.shut_down)."""
        for call, task in list(self.calls.items()):
            if not call.streaming and not call.aborted:
                call.aborted = True
                task.cancel()

    async def _answer(self, request: web.BaseRequest, call: Call, target: Target) -> web.StreamResponse:
        if target.refusal is not None:
            raise target.refusal
        if target.own is not None:
            return await own_routes[target.own](self, request, call)
        if self.stopping:
            raise unavailable("this gateway is shutting down", "shutting_down", 1)
        if self.active > self.settings.gateway.max_in_flight:
            raise ApiError(
                429, f"{self.active - 1} requests are in flight, which is the limit", code="too_many_requests",
                headers={"Retry-After": "1"},
            )  # fmt: skip
        task = asyncio.current_task()
        assert task is not None
        self.calls[call] = task
        cast(ClientConnection, request.protocol).note_client()
        body = await read_body(self, request, call)
        call.run = self  # from here on a client that floods its connection is cut off
        return await Relay(self, request, call, target.path, body).run()

    def _authorize(self, request: web.BaseRequest, call: Call, target: Target) -> None:
        """Default-deny: without keys only names that cannot be somebody else's, with keys only who holds one."""
        access = self.access
        if not access.any_host and _foreign(request.headers.get("Host", "")):
            raise ApiError(
                403, "this host name is not served without keys; use an address, or configure keys", code="host"
            )
        call.key_label = None if access.open else access.label(request.headers.get("Authorization"))
        call.trusted = access.open or call.key_label is not None
        if not call.trusted and not target.open:
            raise no_valid_key()

    def _account(self, request: web.BaseRequest, call: Call, target: Target, status: int) -> None:
        """The metrics and the log line of one finished request."""
        slot, seconds = self.settings.slot, time.monotonic() - call.arrival
        self.metrics.requests.inc(slot, call.release, call.route, str(status))
        if target.probe:
            return
        release = call.release or self.engines.release or ""
        if call.release or call.run is not None or status >= 500:  # an engine was asked, or should have been
            kind = f"{status // 100}xx" if status != 499 else "499"
            self.metrics.latency.observe(seconds, slot, release, call.route, kind)
        if (failure := _error_class(status, call.error_code)) is not None:
            self.metrics.errors.inc(slot, release, failure)
        log_event(
            logger,
            logging.INFO if status < 500 else logging.WARNING,
            "http_request",
            f"{request.method[:20]} {call.route} {status}",
            req_id=call.request_id,
            route=call.route,
            status=status,
            seconds=round(seconds, 6),
            first_byte=round(call.first_at - call.arrival, 6) if call.first_at is not None else None,
            key=call.key_label,
            release=call.release or None,
            gpu=call.gpu,
            retries=call.retries or None,
            replays=call.replays or None,
            error=call.error_code,
        )

    # ---- health ----------------------------------------------------------------------------------------------------

    async def exposition(self) -> bytes:
        """The metrics of this gateway, of all its processes."""
        if self.gather is not None:
            return await self.gather()
        theirs = await self.engine_metrics.collect()
        return render_all([*self.metrics.all(), *gauges(self)], self, theirs)

    async def describe(self) -> dict[str, Any]:
        """For /state on the admin socket."""
        return state(self) if self.describe_workers is None else await self.describe_workers()

    async def count(self) -> dict[str, Any]:
        """For /counts on the admin socket."""
        if self.count_workers is not None:
            return await self.count_workers()
        return counts(self, self.metrics.all(), connections=self.connections, in_flight=self.active, silent=[])

    def not_ready(self) -> tuple[str, str] | None:
        """(code, reason) why a load balancer should send nothing here, or None."""
        if self.stopping:
            return "shutting_down", "this gateway is shutting down"
        if self.engines.draining is not None:
            return "draining", f"this host is drained: {self.engines.draining}"
        return self.engines.not_ready()


def no_valid_key() -> ApiError:
    return ApiError(
        401, "give a valid API key in 'Authorization: Bearer KEY'", code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip


def _error_class(status: int, code: str | None) -> str | None:
    """What a client sees as the server's fault (design.md: 5xx, a stream ended by the server, a deadline); None: 4xx,
    and answers that are whole."""
    if status == 504 or (status == 200 and code == "deadline_exceeded"):
        return "deadline"
    if status == 200:
        return "stream" if code is not None else None
    if status < 500:
        return None
    own = {"no_engine": "no_engine", "no_release": "no_engine", "queue_full": "no_engine"}
    own |= {"shutting_down": "shutting_down", "engine_failed": "engine_failed", "internal_error": "internal"}
    return own.get(code or "", "engine")


def _foreign(host: str) -> bool:
    """A name in somebody's domain: a web page could point it at 127.0.0.1 (DNS rebinding) and so use an endpoint that
    asks for no key through the browser of a user of this host."""
    name = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.strip("[.").lower()
    if "." not in name or name.endswith(".localhost"):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False

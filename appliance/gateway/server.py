"""One gateway process that serves: listeners, signals, and the drain of a graceful end.

SIGTERM: /readyz 503 and new requests 503 + Retry-After while the listener stays open -> requests in flight finish
within gateway.drain_timeout (a second signal: 1 s) -> streams that are left end with an error event -> exit status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from appliance.gateway import probes
from appliance.gateway.downstream import ClientConnection
from appliance.gateway.engines import Engines
from appliance.gateway.metrics import GatewayMetrics
from appliance.gateway.service import Gateway, no_valid_key
from appliance.gateway.settings import Access, Refused, Settings, look_at_certificate, make_tls
from appliance.gateway.sharing import Acceptor
from appliance.log import ApplianceError, BusyError
from engine.api.config import ApiConfig, load_certificate, tls_context
from engine.api.connection import Connection, check_library
from engine.api.errors import ApiError
from engine.errors import EngineError
from engine.log import log_event

logger = logging.getLogger(__name__)

BACKLOG = 1024
MAX_ADMIN_CONNECTIONS = 128  # of each admin listener
ADDRESS_SECONDS = 20.0  # 20 starts (StartLimitBurst=) take longer than the 300 s that they are counted in
_ADDRESS_POLL = 0.5
_ADDRESS_HINT = (
    "{key}: no interface of this host has it (`ip addr`). It is tried again: one that comes later (VIP, DHCP) is taken "
    "then. None is bound before it is there (no IP_FREEBIND): a mistyped one would look as if it served"
)
_LOW_PORT_HINT = "a port below 1024 needs a drop-in: examples/low-port.conf; or choose another port"
_BIND_HINT = "may this program listen there?"
_SOCKET_MODE = 0o660
_FLUSH_SECONDS = 2.0  # for the last error events to reach their clients


def public_socket(settings: Settings) -> socket.socket:
    """The bound public listener, shared by the workers. BusyError where somebody else has it."""
    return _tcp_socket(settings.host, settings.port, settings.host_key)


def shown(listener: socket.socket) -> str:
    """Where it listens, for people: 0.0.0.0:8000, [::]:8000."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tcp_socket(host: str, port: int, key: str) -> socket.socket:
    """BusyError, which systemd retries, where the port is taken or the address has not come (a VIP, DHCP): that one is
    waited for, so long that StartLimitBurst= never counts the tries as a crash loop. Refused for the rest."""
    deadline = time.monotonic() + ADDRESS_SECONDS
    said = False
    while True:
        try:
            return _bound_socket(host, port)
        except OSError as error:
            message = f"cannot listen on {host}:{port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                raise BusyError(message, hint="another program has this port: `ss -ltnp` shows it") from None
            if error.errno != errno.EADDRNOTAVAIL:
                raise Refused(message, hint=f"{key}: {_LOW_PORT_HINT if port < 1024 else _BIND_HINT}") from None
            if time.monotonic() >= deadline:
                raise BusyError(message, hint=_ADDRESS_HINT.format(key=key)) from None
        if not said:
            log_event(logger, logging.WARNING, "address_missing", f"{message}; waiting for it", key=key)
            said = True
        time.sleep(_ADDRESS_POLL)  # nothing else runs yet: before READY=1


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def unix_socket(path: Path) -> socket.socket:
    """A bound socket, mode 0660 from its first moment; a stale one is replaced, anything else refused."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise Refused(f"{path} exists and is no socket", hint="move it away")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            if probe.connect_ex(os.fspath(path)) == 0:
                raise BusyError(f"another gateway serves {path}", hint="stop it first")
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    old = os.umask(0o777 & ~_SOCKET_MODE)
    try:
        sock.bind(os.fspath(path))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise Refused(f"cannot bind {path}: {error}", hint="does its directory exist and may we write?") from None
    finally:
        os.umask(old)
    return sock


Admin = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def admin_handler(gateway: Gateway, *, only_metrics: bool) -> Admin:
    """GET /metrics, /livez, /readyz, and on the Unix socket /state, /counts and /health."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        try:
            if request.method not in ("GET", "HEAD"):
                raise ApiError(405, "only GET", code="method", headers={"Allow": "GET"})
            if path == "/state" and not only_metrics:
                return probes.json_response(await gateway.describe())
            if path == "/counts" and not only_metrics:
                return probes.json_response(await gateway.count())
            if path == "/metrics" and only_metrics and not _may_see_metrics(gateway, request):
                raise no_valid_key()
            if path in probes.own_routes and not (only_metrics and path == "/health"):
                return await probes.own_routes[path](gateway, request, None)
            raise ApiError(404, "there is /metrics, /livez, /readyz, on the Unix socket also /state, /counts, /health")
        except ApiError as error:
            return error.response()

    return handle


def _may_see_metrics(gateway: Gateway, request: web.BaseRequest) -> bool:
    """Beyond loopback only who holds a key, as everywhere else; names of releases, GPUs and clients are in there."""
    access = gateway.access
    if not gateway.settings.admin_exposed or access.open:
        return True
    return access.label(request.headers.get("Authorization")) is not None


@dataclass
class AdminSide:
    """What engine/api/connection.py wants to know of an admin listener: without its guards a peer that opens
    connections there and says nothing takes the descriptors that clients need."""

    api: ApiConfig
    metrics: GatewayMetrics
    connections: int = 0

    @property
    def config(self) -> ApiConfig:
        return replace(self.api, limits=replace(self.api.limits, max_connections=MAX_ADMIN_CONNECTIONS))


def _admin_connections(server: web.Server, side: AdminSide) -> Callable[[], Connection]:
    timeouts = side.api.timeouts
    return lambda: Connection(
        server,
        cast(Any, side),
        loop=asyncio.get_running_loop(),
        keepalive_timeout=timeouts.keepalive,
        access_log=None,
        lingering_time=timeouts.linger,
    )


@contextlib.asynccontextmanager
async def admin_listeners(worker: Worker) -> AsyncIterator[None]:
    """The Unix socket, and where the public listener is not loopback an address for /metrics."""
    settings, gateway = worker.settings, worker.gateway
    path = settings.paths.gateway_socket(settings.slot)
    listeners = [(unix_socket(path), False)]
    loop = asyncio.get_running_loop()
    opened: list[tuple[asyncio.Server, web.Server]] = []
    try:
        if not settings.public_metrics:
            admin = _tcp_socket(settings.gateway.admin_host, settings.admin_port, "gateway.admin_host")
            listeners.append((admin, True))
        for sock, only_metrics in listeners:
            server = web.Server(admin_handler(gateway, only_metrics=only_metrics), access_log=None)
            factory = _admin_connections(server, AdminSide(settings.api, gateway.metrics))
            tls = worker.tls if only_metrics and settings.admin_exposed else None
            opened.append((await loop.create_server(factory, sock=sock, backlog=BACKLOG, ssl=tls), server))
        yield
    finally:
        for listener, server in opened:
            listener.close()
            await server.shutdown(_FLUSH_SECONDS)
        path.unlink(missing_ok=True)


class Worker:
    """One serving process: the gateway on a public listener that is bound already."""

    def __init__(self, settings: Settings) -> None:
        check_library()
        self.settings = settings
        self.gateway = Gateway(
            settings,
            Access(settings),
            Engines(settings.paths, settings.slot),
            GatewayMetrics(settings.slot, settings.gateway.metrics_buckets_seconds),
        )
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.tls = make_tls(settings)
        self._warn_of_certificate()

    async def run(
        self,
        listener: socket.socket,
        *,
        ready: Callable[[], None],
        draining: Callable[[], None],
        handle_signals: bool = True,
    ) -> int:
        """Serve until SIGTERM; the exit status. `ready` is called when requests are taken, `draining` at the end."""
        gateway, loop = self.gateway, asyncio.get_running_loop()
        gateway.poll()
        polling = loop.create_task(gateway.keep_up())
        server = web.Server(gateway.handle, handler_cancellation=True, access_log=None)
        with self._signals() if handle_signals else contextlib.nullcontext():
            accepting = await self._accept(server, listener)
            try:
                ready()
                stopping = loop.create_task(self.stop.wait())
                await asyncio.wait((stopping, polling), return_when=asyncio.FIRST_COMPLETED)
                if polling.done():  # it never ends by itself
                    log_event(logger, logging.CRITICAL, "polling_failed", str(polling.exception()))
                    return 1
                draining()
                await self._drain()
            finally:
                accepting.close()
                await server.shutdown(_FLUSH_SECONDS)
                polling.cancel()
                gateway.engines.close()
                gateway.engine_metrics.close()
        return 0

    async def _accept(self, server: web.Server, listener: socket.socket) -> asyncio.Server | Acceptor:
        handshake = self.settings.api.timeouts.header
        if (load := self.gateway.engines.load) is not None:  # the listener is shared
            return Acceptor(listener, lambda: self._connection(server), self.tls, handshake, load)
        return await asyncio.get_running_loop().create_server(
            lambda: self._connection(server),
            sock=listener,
            backlog=BACKLOG,  # asyncio listens again, else with 100
            ssl=self.tls,
            ssl_handshake_timeout=handshake if self.tls is not None else None,
        )

    def _connection(self, server: web.Server) -> ClientConnection:
        """Called for each connection that was accepted, before a TLS handshake."""
        self.gateway.metrics.accepted.inc(self.settings.slot)
        timeouts = self.settings.api.timeouts
        return ClientConnection(
            server,
            self.gateway,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=timeouts.keepalive,
            access_log=None,
            lingering_time=timeouts.linger,
            auto_decompress=False,  # compressed bodies are the engine's to refuse; no zip bomb is ever opened
        )

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        gateway, timeouts = self.gateway, self.settings.api.timeouts
        gateway.stopping = True
        log_event(logger, logging.WARNING, "draining", in_flight=gateway.active)
        if not await self._idle(timeouts.drain, self.hurry):
            await self._idle(timeouts.fast_drain if self.hurry.is_set() else 0.0, None)
        gateway.aborting = True
        gateway.engines.notify()  # whoever waits for one
        left = list(gateway.streams)
        for stream in left:
            stream.shut_down()
        gateway.end_calls()
        await self._idle(_FLUSH_SECONDS, None)
        log_event(logger, logging.WARNING, "drained", ended=len(left), cut=gateway.active)

    async def _idle(self, seconds: float, hurry: asyncio.Event | None) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.gateway.active and loop.time() < end and not (hurry is not None and hurry.is_set()):
            await asyncio.sleep(min(0.02, max(end - loop.time(), 0)))
        return not self.gateway.active

    # ---- signals ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop (the second one hurries), SIGHUP reloads; afterwards all three are ignored."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.leave if number != signal.SIGHUP else self.reload_aside)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def leave(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    def reload_aside(self) -> None:
        """In a thread, which may hang on a dead file server without holding up requests."""
        threading.Thread(target=self.reload, name="reload", daemon=True).start()

    def reload(self) -> None:
        """Keys and certificate again; a broken file leaves what is in force and is logged."""
        api = self.settings.api
        try:
            self.gateway.access.reload()
            log_event(logger, logging.INFO, "keys_reloaded", count=len(self.gateway.access.keys))
        except EngineError as error:
            log_event(logger, logging.ERROR, "keys_not_reloaded", f"{error.message} ({error.hint})")
        if self.tls is None or api.tls_cert is None or api.tls_key is None:
            return
        try:
            tls_context(api)  # first in a context of its own: half a change would break the one in use
            load_certificate(self.tls, api.tls_cert, api.tls_key)
            log_event(logger, logging.INFO, "certificate_reloaded")
        except EngineError as error:
            log_event(logger, logging.ERROR, "certificate_not_reloaded", f"{error.message} ({error.hint})")
        self._warn_of_certificate()

    def _warn_of_certificate(self) -> None:
        """One that clients refuse is served all the same: they may be told not to look, and no answer is no better."""
        if problem := look_at_certificate(self.settings, self.tls)[1]:
            log_event(logger, logging.ERROR, "certificate_refused_by_clients", problem)


def report(error: ApplianceError | EngineError) -> int:
    """Log why we cannot serve; the exit status."""
    log_event(logger, logging.CRITICAL, "cannot_serve", error.message, hint=error.hint)
    return int(error.exit_code)

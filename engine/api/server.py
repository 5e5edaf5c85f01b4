"""Listening and leaving: sockets, TLS, signals, and the drain of a graceful shutdown.

Order of a shutdown (SIGTERM): /readyz 503 and new requests 503 + Retry-After while the listener stays open -> requests
in flight finish within `timeouts.drain` (a second signal: `fast_drain`) -> what is left ends with a structured error ->
connections close -> return, for exit code 0.
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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from engine.api.app import build_app
from engine.api.config import ApiConfig, check_bind, is_loopback, tls_context
from engine.api.connection import Connection, check_library
from engine.api.errors import unavailable
from engine.api.service import SERVICE, EngineClient, Service, Tokenizer
from engine.errors import BusyError, ConfigError
from engine.log import log_event

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_SOCKET_MODE = 0o660
_FLUSH_SECONDS = 2.0  # for the last error events to reach their clients


async def run_server(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ApiConfig,
    *,
    host: str | None = None,
    port: int = 8000,
    unix_path: Path | None = None,
    stop: asyncio.Event | None = None,
    handle_signals: bool = True,
    on_listening: Callable[[list[Any]], None] | None = None,
    **factories: Any,
) -> int:
    """Serve until a signal, `stop` or the engine's death; returns the exit code: 0, or 1 when the engine died.

    `host` and `unix_path` may be given together; a Unix socket is trusted with /admin (its mode is 0660).
    `on_listening` gets the bound addresses (with port 0: the real port). ConfigError for a bind that is refused.
    `handle_signals` is for a process that ends when this returns: from then on it ignores them, so that a second
    SIGTERM does not turn a clean exit into a death.
    """
    check_library()
    if host is None and unix_path is None:
        raise ConfigError("nowhere to listen", hint="give a host, a Unix socket path, or both")
    if host is not None:
        check_bind(config, host)
    app = build_app(client, tokenizer, config, **factories)
    if host is not None and not is_loopback(host):
        app[SERVICE].metrics_public = False
    stop = asyncio.Event() if stop is None else stop
    hurry = asyncio.Event()
    with _signals(app[SERVICE], stop, hurry) if handle_signals else contextlib.nullcontext():
        async with listening(app, host=host, port=port, unix_path=unix_path) as addresses:
            log_event(logger, logging.INFO, "listening", f"listening on {addresses}", model=config.model)
            if on_listening is not None:
                on_listening(addresses)
            await _first_of(stop, client.on_death)
            if client.state == "dead":
                fatal = client.fatal
                reason = f": {fatal.error}" if fatal is not None else ""
                hint = fatal.hint if fatal is not None else None
                log_event(logger, logging.CRITICAL, "engine_dead", f"engine-core is gone{reason}; leaving", hint=hint)
            await drain(app[SERVICE], hurry)
    return 1 if client.state == "dead" else 0


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, *, host: str | None = None, port: int = 0, unix_path: Path | None = None
) -> AsyncIterator[list[Any]]:
    """The app on its sockets; yields the bound addresses. On leaving, listeners and connections are closed."""
    service = app[SERVICE]
    loop = asyncio.get_running_loop()
    # handler_cancellation: a client that leaves cancels its handler, which aborts its request in the engine.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_FLUSH_SECONDS)
    await runner.setup()
    manager = runner.server
    assert manager is not None

    def connection() -> Connection:
        return Connection(
            manager,
            service,
            loop=loop,
            keepalive_timeout=service.config.timeouts.keepalive,
            access_log=None,
            lingering_time=service.config.timeouts.linger,
            auto_decompress=False,  # compressed bodies are refused; no zip bomb is ever opened
        )

    servers: list[asyncio.Server] = []
    bound: tuple[int, int] | None = None  # device and inode of our Unix socket
    try:
        addresses: list[Any] = []
        if host is not None:
            context = tls_context(service.config)
            name = host.removeprefix("[").removesuffix("]")
            handshake = service.config.timeouts.header if context is not None else None
            servers.append(
                await loop.create_server(
                    connection,
                    name,
                    port,
                    ssl=context,
                    ssl_handshake_timeout=handshake,  # before it no connection of ours exists that could count
                    backlog=_BACKLOG,
                    reuse_address=True,
                )
            )
            addresses += [sock.getsockname() for sock in servers[-1].sockets]
        if unix_path is not None:
            sock = _unix_socket(unix_path)
            bound = _inode(unix_path)
            servers.append(await loop.create_unix_server(connection, sock=sock, backlog=_BACKLOG))
            addresses.append(str(unix_path))
        yield addresses
    finally:
        for server in servers:
            server.close()
        await runner.cleanup()
        if unix_path is not None and bound is not None and _inode(unix_path) == bound:  # never another process's
            unix_path.unlink(missing_ok=True)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _unix_socket(path: Path) -> socket.socket:
    """A bound socket at `path`, mode 0660 from its first moment; a stale one is replaced, anything else refused."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is no socket", hint="choose another path or remove it")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            # Only this says that nobody listens: EAGAIN is a live server whose backlog is full, EACCES somebody else's.
            if probe.connect_ex(os.fspath(path)) != errno.ECONNREFUSED:
                raise BusyError(f"another process serves {path}", hint="stop it first")
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o777 & ~_SOCKET_MODE)
    try:
        sock.bind(os.fspath(path))
    except OSError as exc:
        sock.close()
        if exc.errno is None:  # Python's own check: sun_path of unix(7) has 108 bytes with the terminating zero
            raise ConfigError(f"cannot bind {path}: {exc}", hint="a socket's path has at most 107 bytes") from exc
        raise ConfigError(
            f"cannot bind {path}: {exc.strerror}", hint="does its directory exist and may we write?"
        ) from exc
    finally:
        os.umask(old)
    return sock


async def drain(service: Service, hurry: asyncio.Event) -> None:
    """Stop admitting, let what is in flight finish, end what is left with an error."""
    timeouts = service.config.timeouts
    service.shutting_down = True
    service.drain_reason = "the server is shutting down"
    log_event(logger, logging.WARNING, "draining", in_flight=service.active)
    if not await _idle(service, timeouts.drain, hurry):
        await _idle(service, timeouts.fast_drain if hurry.is_set() else 0.0, None)
    left = list(service.runs)
    for run in left:
        run.fail(unavailable("the server shut down before this answer was complete", "shutting_down", 1))
    await _idle(service, _FLUSH_SECONDS, None)
    log_event(logger, logging.WARNING, "drained", ended=len(left))


async def _idle(service: Service, seconds: float, hurry: asyncio.Event | None) -> bool:
    """Wait until nothing is in flight; False when time is up or we should hurry."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while service.active and loop.time() < end and not (hurry is not None and hurry.is_set()):
        await asyncio.sleep(min(0.02, max(end - loop.time(), 0)))
    return not service.active


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


@contextlib.contextmanager
def _signals(service: Service, stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT stop (the second one hurries), SIGHUP reloads the keys; afterwards all three are ignored."""
    loop = asyncio.get_running_loop()

    def leave() -> None:
        (hurry if stop.is_set() else stop).set()

    handlers: Sequence[tuple[signal.Signals, Callable[[], None]]] = (
        (signal.SIGTERM, leave),
        (signal.SIGINT, leave),
        (signal.SIGHUP, lambda: _reload_aside(service)),
    )
    for number, handler in handlers:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number, _ in handlers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _reload_aside(service: Service) -> None:
    """In a thread that may hang (a dead file server) without holding up requests or our end."""
    threading.Thread(target=reload_keys, args=(service,), name="reload-keys", daemon=True).start()


def reload_keys(service: Service) -> None:
    """Read the key files again; a broken file leaves the old keys in force and is logged."""
    for name, store in (("keys", service.keys), ("admin_keys", service.admin_keys)):
        try:
            store.reload()
            log_event(logger, logging.INFO, "keys_reloaded", store=name, count=len(store))
        except ConfigError as exc:
            log_event(logger, logging.ERROR, "keys_not_reloaded", f"{exc.message} ({exc.hint})", store=name)

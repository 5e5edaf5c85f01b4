"""The client's side of a relay: aiohttp's connection with the engine endpoint's guards, and a direct way to write.

A streamed token is written to the transport in the callback that received it. aiohttp writes the head, the first piece
and the end; in between nothing else writes to this connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from engine.api.connection import Connection

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter

    from appliance.gateway.canary_run import Leave
    from appliance.gateway.service import Gateway
    from appliance.gateway.upstream import Exchange

HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "proxy-connection",
})  # fmt: skip
"""RFC 9110, 7.6.1: of one connection, not of the message."""
_INTERNAL = frozenset({"x-appliance-created", "x-appliance-error"})
_OURS = frozenset({"content-length", "date"})
_ORIGINAL_DST = 80
"""SO_ORIGINAL_DST of linux/netfilter_ipv4.h and IP6T_SO_ORIGINAL_DST of linux/netfilter_ipv6/ip6_tables.h."""


def client_headers(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers of an engine's answer that its client gets; aiohttp adds length, date and connection."""
    dropped = HOP_BY_HOP | _INTERNAL | _OURS
    return [(name.title(), value) for name, value in headers if name not in dropped]


class ClientConnection(Connection):
    """While `exchange` is set, a client that reads slowly slows down the engine's stream, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchange: Exchange | None = None
        self._full = False
        self._since = monotonic()
        self._answers = 0
        self._leave: Leave | None = None  # of the canary run that is on
        self._noted: str | None = None  # the run that our client has been counted in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        gateway = cast("Gateway", self._service)
        slot, release = gateway.settings.slot, gateway.engines.release or ""
        gateway.metrics.opened.inc(slot, release, _via(transport))
        if not self._counted:  # there were too many, and it has been told 503
            gateway.metrics.requests.inc(slot, release, "refused", "503")
            gateway.metrics.errors.inc(slot, release, "connections")
        self._publish()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._publish()

    def _publish(self) -> None:
        gateway = cast("Gateway", self._service)
        if gateway.engines.load is not None:
            gateway.engines.load.set_connections(gateway.connections)

    def note_client(self) -> None:
        """A request of it is relayed; whoever only probes is no client."""
        canary = cast("Gateway", self._service).canary
        if canary.run != self._noted:
            self._noted = canary.run
            peer = self.transport.get_extra_info("peername") if self.transport is not None else None
            if peer:
                canary.clients.add(peer[0])

    def is_last_answer(self) -> bool:
        """Asked once for each answer, before its head is written: whether this connection ends with it. An answer
        with further requests behind it is not the last one: they are here already, and would be lost."""
        self._answers += 1
        gateway = cast("Gateway", self._service)
        run = gateway.canary
        if run.run is None or self._messages:
            return False
        if run.draining:
            reason = "draining"
        else:
            if self._leave is None or self._leave.run != run.run:
                self._leave = run.leave(self._since, self._answers - 1)
            if not self._leave.due(self._answers, monotonic()):
                return False
            reason = "run"
        gateway.metrics.closed.inc(gateway.settings.slot, reason)
        return True

    def follow(self, exchange: Exchange | None) -> None:
        """From now on `exchange` is read as fast as the client reads; None: nothing is."""
        self.exchange = exchange
        if exchange is not None:
            (exchange.pause if self._full else exchange.resume)()

    @property
    def full(self) -> bool:
        """The client has not taken what was written."""
        return self._full

    def pause_writing(self) -> None:
        self._full = True
        super().pause_writing()
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        self._full = False
        super().resume_writing()
        if self.exchange is not None:
            self.exchange.resume()


class Pipe:
    """Writes pieces of a response's body that has begun."""

    def __init__(self, connection: ClientConnection, writer: AbstractStreamWriter) -> None:
        self.connection = connection
        self._chunked = bool(cast(Any, writer).chunked)

    def write(self, data: bytes) -> None:
        transport = self.connection.transport
        if transport is None or transport.is_closing():
            return  # the client left; its handler is about to be cancelled
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)


def _via(transport: asyncio.BaseTransport) -> str:
    """How a connection came: "redirect" when netfilter sent it here from another port, else "direct"; "unknown" where
    the kernel does not follow connections (no rule there uses conntrack)."""
    sock, name = transport.get_extra_info("socket"), transport.get_extra_info("sockname")
    if sock is None or not name:
        return "unknown"
    mapped = name[0].startswith("::ffff:")
    level = socket.IPPROTO_IPV6 if sock.family == socket.AF_INET6 and not mapped else socket.IPPROTO_IP
    with contextlib.suppress(OSError):
        address = sock.getsockopt(level, _ORIGINAL_DST, 28)  # sockaddr_in or sockaddr_in6: family, port, ...
        return "direct" if int.from_bytes(address[2:4], "big") == name[1] else "redirect"
    return "unknown"

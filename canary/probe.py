"""The endpoint as a client meets it: a new connection, one request, for each address that is served.

What no gateway can count is seen here: a refused connection, a reset, silence. `targets` names the addresses of a slot,
`probe_all` asks them at once. Through the public port each probe goes to the canary with the probability of its weight,
and `Probe.slot` says where it arrived; the canary's own port is asked directly (the guard lets this host in), which is
the liveness of a canary whatever its weight. Connections from this host pass OUTPUT, not PREROUTING: that strangers
reach us, too, only a stranger can tell.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from appliance.hostconfig import Gateway
from appliance.paths import SLOT_NAMES

MAX_HEAD = 16 << 10
_THREADS = 4
_ANY = {"0.0.0.0": ("127.0.0.1",), "": ("127.0.0.1",), "::": ("127.0.0.1", "::1")}
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: |\r\n)")
_SLOT = re.compile(rb"\r\nx-appliance-slot: *([a-z]+) *\r\n", re.IGNORECASE)


class Kind(StrEnum):
    OK = "ok"
    REFUSED = "refused"  # nobody listens there: what a dead canary's share of the clients sees
    RESET = "reset"  # it was there, and the connection broke
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"  # this address, or its family, is not to be reached from here: unknown, not dead
    TLS = "tls"
    STATUS = "status"  # it answers, but not 200
    GARBLED = "garbled"  # it does not speak HTTP/1


@dataclass(frozen=True, slots=True)
class Target:
    address: str
    port: int
    tls: bool = False
    path: str = "/livez"  # needs no key, and no engine; /readyz: would a request be served?

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


class Probe(msgspec.Struct, kw_only=True, frozen=True):
    """One answer, or what came instead."""

    target: str
    kind: Kind
    seconds: float  # from the start of the connect to the end of the head, or to the failure
    status: int | None = None
    slot: str | None = None  # of the gateway that answered
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.kind is Kind.OK

    @property
    def dead(self) -> bool:
        """A client would have failed; not so where this host itself has no way there."""
        return self.kind not in (Kind.OK, Kind.UNREACHABLE)


def targets(gateway: Gateway, slot: str = SLOT_NAMES[0], *, path: str = "/livez") -> list[Target]:
    """Where `slot` serves; the wildcard addresses by their loopback ones."""
    stable = slot == SLOT_NAMES[0]
    host = gateway.host if stable else gateway.canary_host
    port = gateway.port if stable else gateway.canary_port
    addresses = _ANY.get(host.strip("[]"), (host.strip("[]"),))
    return [Target(address, port, gateway.tls, path) for address in addresses]


def probe(target: Target, seconds: float = 1.0) -> Probe:
    """Never raises for what the network does; takes at most `seconds`."""
    began = time.monotonic()
    kind, status, slot, text = Kind.OK, None, None, ""
    try:
        head = _ask(target, began + seconds)
        found = _STATUS.match(head)
        if found is None:
            kind, text = Kind.GARBLED, f"{head[:60]!r}"
        else:
            status = int(found[1])
            named = _SLOT.search(head)
            slot = named[1].decode() if named is not None else None
            if status != 200:
                kind, text = Kind.STATUS, f"status {status}"
    except ConnectionRefusedError:
        kind, text = Kind.REFUSED, "connection refused"
    except (ConnectionError, EOFError) as error:
        kind, text = Kind.RESET, str(error) or "connection reset"
    except TimeoutError:
        kind, text = Kind.TIMEOUT, f"no answer within {seconds:g} s"
    except ssl.SSLError as error:
        kind, text = Kind.TLS, f"TLS: {error.reason or error}"
    except OSError as error:  # no route, no such family, no descriptors left here
        kind, text = Kind.UNREACHABLE, error.strerror or str(error)
    return Probe(
        target=str(target), kind=kind, seconds=time.monotonic() - began, status=status, slot=slot, text=text
    )  # fmt: skip


def probe_all(targets: Iterable[Target], seconds: float = 1.0) -> list[Probe]:
    """All at once (four at a time), in the order of `targets`."""
    listed = list(targets)
    if len(listed) < 2:
        return [probe(target, seconds) for target in listed]
    with ThreadPoolExecutor(min(_THREADS, len(listed)), thread_name_prefix="probe") as pool:
        return list(pool.map(lambda target: probe(target, seconds), listed))


def _ask(target: Target, deadline: float) -> bytes:
    """The head of the answer, with the line ends around it. TimeoutError, EOFError, OSError."""
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    left = _countdown(deadline)
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as plain:
        plain.settimeout(left())
        plain.connect((target.address, target.port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.settimeout(left())
        with _tls(plain) if target.tls else plain as sock:
            sock.settimeout(left())
            sock.sendall(f"GET {target.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head = b""
            while b"\r\n\r\n" not in head and len(head) < MAX_HEAD:
                sock.settimeout(left())
                piece = sock.recv(4096)
                if not piece:
                    raise EOFError("the connection was closed without an answer")
                head += piece
    return head


def _countdown(deadline: float) -> Callable[[], float]:
    def left() -> float:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds

    return left


def _tls(sock: socket.socket) -> ssl.SSLSocket:
    """The certificate is not checked: it names the host for its clients, not 127.0.0.1, and nothing secret is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock, server_hostname="localhost")

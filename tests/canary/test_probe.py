"""The probe says what a client would have met."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.hostconfig import Gateway
from canary.probe import Kind, Target, probe, probe_all, targets


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], None], family: int = socket.AF_INET) -> Iterator[int]:
    """Each connection is handed to `serve`; the port."""
    with socket.socket(family) as listener:
        listener.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        listener.listen(8)
        end = threading.Event()

        def loop() -> None:
            while not end.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError, ssl.SSLError):
                    serve(connection)

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            end.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


def says(reply: bytes) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(reply)

    return serve


def reset(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends RST (socket(7))


def hang(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.settimeout(5)
    connection.recv(1)  # until the probe gives up


OK = b"HTTP/1.1 200 OK\r\nX-Appliance-Slot: canary\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("serve", "kind", "status", "slot"),
    [
        (says(OK), Kind.OK, 200, "canary"),
        (says(OK.replace(b"X-Appliance-Slot: canary\r\n", b"")), Kind.OK, 200, None),
        (says(b"HTTP/1.1 503 Service Unavailable\r\nx-appliance-slot:stable\r\n\r\n"), Kind.STATUS, 503, "stable"),
        (says(b"HTTP/1.0 404 \r\n\r\n"), Kind.STATUS, 404, None),
        (says(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), Kind.GARBLED, None, None),
        (says(b"x" * 40_000), Kind.GARBLED, None, None),
        (says(b"HTTP/1.1 2000 OK\r\n\r\n"), Kind.GARBLED, None, None),
        (says(b""), Kind.RESET, None, None),  # closed without an answer
        (says(b"HTTP/1.1 200 OK\r\nContent-"), Kind.RESET, None, None),
        (reset, Kind.RESET, None, None),
        (hang, Kind.TIMEOUT, None, None),
    ],
)
def test_what_a_server_does_has_a_name(serve, kind, status, slot):
    with server(serve) as port:
        found = probe(Target("127.0.0.1", port), 0.3)
    assert (found.kind, found.status, found.slot) == (kind, status, slot), found.text
    assert found.ok == (kind is Kind.OK) and found.dead == (kind is not Kind.OK)
    assert found.target == f"127.0.0.1:{port}"


def test_nobody_there_is_refused():
    with socket.socket() as taken:  # bound but not listening: nobody else gets this port
        taken.bind(("127.0.0.1", 0))
        found = probe(Target("127.0.0.1", taken.getsockname()[1]), 1.0)
    assert found.kind is Kind.REFUSED and found.dead


def test_a_full_queue_is_silence():
    """The kernel drops the SYN: what a process that no longer accepts looks like."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        assert probe(Target("127.0.0.1", listener.getsockname()[1]), 0.3).kind is Kind.TIMEOUT


def test_no_way_there_is_unknown_and_not_dead():
    found = probe(Target("fe80::1%nosuchinterface", 1), 0.3)
    assert found.kind is Kind.UNREACHABLE and not found.ok and not found.dead


def test_a_drip_has_one_deadline():
    """A server that sends a byte now and then is not listened to for ever."""

    def drip(connection: socket.socket) -> None:
        connection.recv(4096)
        for _ in range(100):
            connection.sendall(b"H")
            if end.wait(0.05):
                return

    end = threading.Event()
    with server(drip) as port:
        found = probe(Target("127.0.0.1", port), 0.4)
        end.set()
    assert found.kind is Kind.TIMEOUT


def test_both_families_at_once_in_the_order_asked():
    with server(says(OK)) as four, server(hang, socket.AF_INET6) as six:
        asked = [Target("::1", six), Target("127.0.0.1", four), Target("127.0.0.1", four)]
        found = probe_all(asked, 0.3)
    assert [one.kind for one in found] == [Kind.TIMEOUT, Kind.OK, Kind.OK]
    assert found[0].target == f"[::1]:{six}"
    assert probe_all([]) == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed, for another name."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=llm.example", "-keyout", "-", "-out", "-"],
        capture_output=True, check=True,
    )  # fmt: skip
    path.write_bytes(made.stdout)
    return path


def test_tls_is_spoken_where_the_endpoint_does(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(4096)
            secure.sendall(OK)

    with server(serve) as port:
        assert probe(Target("127.0.0.1", port, tls=True), 2.0).ok
        assert not probe(Target("127.0.0.1", port), 2.0).ok
    with server(says(OK)) as port:
        assert probe(Target("127.0.0.1", port, tls=True), 2.0).kind is Kind.TLS


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("127.0.0.1", ["127.0.0.1:8001"]), ("0.0.0.0", ["127.0.0.1:8001"]), ("::1", ["[::1]:8001"]),
        ("::", ["127.0.0.1:8001", "[::1]:8001"]), ("192.0.2.7", ["192.0.2.7:8001"]),
    ],
)  # fmt: skip
def test_targets_are_where_the_slot_serves(host, wanted):
    gateway = Gateway(canary_host=host, tls=True)
    found = targets(gateway, "canary")
    assert [str(target) for target in found] == wanted
    assert all(target.tls and target.path == "/livez" for target in found)
    assert [str(target) for target in targets(Gateway(port=9000), path="/readyz")] == ["127.0.0.1:9000"]

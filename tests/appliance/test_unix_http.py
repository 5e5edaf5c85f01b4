"""Questions to engines and gateways by tools of the host, which hold locks meanwhile: every server is left in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance import engine_calls
from appliance.admin_http import AdminError, get_json
from appliance.engine_calls import EngineCalls, EngineUnavailable


def silent() -> Iterator[bytes]:
    while True:
        yield b""


def dripping_head() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nX-Padding: "
    while True:
        yield b"x"


def dripping_body() -> Iterator[bytes]:
    yield b'HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{"a":"'
    while True:
        yield b"x"


def always_soon() -> Iterator[bytes]:
    while True:
        yield b"HTTP/1.1 100 Continue\r\n\r\n"


def endless_chunks() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"1\r\nx\r\n"


@pytest.fixture(params=[silent, dripping_head, dripping_body, always_soon, endless_chunks])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    script: Callable[[], Iterator[bytes]] = request.param
    path, done = tmp_path / "x.sock", threading.Event()

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            try:
                for part in script():
                    sock.sendall(part)
                    if done.wait(0.02):
                        return
            except OSError:
                return

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield path
        done.set()
        thread.join(10)


def test_an_admin_socket_that_never_ends_its_answer(server: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AdminError):
        get_json(server, "/state", timeout=0.5)
    assert time.monotonic() - began < 10


def test_an_engine_that_never_ends_its_answer(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "CONTROL_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match="timed out"):
        EngineCalls(server).checksum()
    assert time.monotonic() - began < 10

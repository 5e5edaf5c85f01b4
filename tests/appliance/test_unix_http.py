"""Questions to engines and gateways by tools of the host, which hold locks meanwhile: every server is left in time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


KEYS = ["engine", "device", "backend", "name", "max_model_len", "result", "sha256", "positions", "finite", "expected",
        "actual", "ok", "choices", "logprobs", "token_logprobs", "top_logprobs"]  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "cpu", "\ud800", 10**4000])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)
LOGPROBS = st.fixed_dictionaries({"token_logprobs": VALUES, "top_logprobs": VALUES})
CHOICES = st.fixed_dictionaries({"choices": st.lists(st.fixed_dictionaries({"logprobs": LOGPROBS}), max_size=1)})


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4) | CHOICES)
def test_any_answer_of_an_engine_is_understood_or_unavailable(answer: dict[str, Any]) -> None:
    class Calls(EngineCalls):
        def _ask(self, *_: Any) -> dict[str, Any]:
            return answer

    calls = Calls(Path("x"))
    questions: list[Callable[[], Any]] = [
        calls.device, calls.context, calls.checksum, lambda: calls.golden([1]),
        lambda: calls.forced_logprobs("m", [1, 2], 1),
    ]  # fmt: skip
    for question in questions:
        with contextlib.suppress(EngineUnavailable):
            question()

"""The control socket from outside: real connections to a launcher's server, and the client that commands use."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.control import ControlClient, ControlError, SocketClient
from appliance.launcher import control_server
from appliance.launcher.control_server import ControlServer, parse_request
from appliance.launcher.loop import Loop
from appliance.paths import Paths

Handle = Callable[[dict[str, Any], Any], None]


class Running:
    """A server whose loop turns in a thread."""

    def __init__(self, paths: Paths, handle: Handle, *, admins: frozenset[int], public_uid: int) -> None:
        self.loop, self.path = Loop(), paths.control_socket(0)
        self.server = ControlServer(
            self.loop, self.path, handle, admins=admins, public_uid=public_uid, group=os.getgid()
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.loop.run, kwargs={"until": self._ended.is_set, "timeout": 60})
        self._beat()
        self._thread.start()

    def _beat(self) -> None:
        self.loop.later(0.02, self._beat)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.server.close()
        self.loop.close()

    def raw(self, data: bytes, *, end: bool = False) -> bytes:
        """What comes back for these bytes until the server closes."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(10)
            sock.connect(str(self.path))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data)
            if end:
                sock.shutdown(socket.SHUT_WR)
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := sock.recv(65536):
                    found += chunk
            return found


def echo(request: dict[str, Any], client: Any) -> None:
    client.reply({"ok": True, "request": request})


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths.under(tmp_path)
    paths.gpu_run(0).mkdir(parents=True)
    return paths


@pytest.fixture
def serve(paths: Paths) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(handle: Handle = echo, *, admins: frozenset[int] | None = None, public_uid: int = -1) -> Running:
        ours = frozenset({os.getuid()}) if admins is None else admins
        running.append(Running(paths, handle, admins=ours, public_uid=public_uid))
        return running[-1]

    yield start
    for server in running:
        server.close()


def test_a_question_and_its_answer(paths: Paths, serve: Callable[..., Running]) -> None:
    serve()
    reply = ControlClient(paths, 0).call("hold", timeout=7, owner="operator", reason="fan é \n \u2028")
    assert reply["request"] == {"op": "hold", "timeout": 7, "owner": "operator", "reason": "fan é \n \u2028"}


def test_uids_that_may_not(paths: Paths, serve: Callable[..., Running]) -> None:
    serve(admins=frozenset(), public_uid=-1)
    for op in ("status", "hold"):
        with pytest.raises(ControlError, match="may not") as caught:
            ControlClient(paths, 0).call(op)
        assert caught.value.exit_code == 4


def test_the_appliance_user_may_see_and_not_change(paths: Paths, serve: Callable[..., Running]) -> None:
    serve(admins=frozenset(), public_uid=os.getuid())
    assert ControlClient(paths, 0).call("status")["ok"]
    for op in ("hold", "run", "stop", "nonsense"):
        with pytest.raises(ControlError) as caught:
            ControlClient(paths, 0).call(op)
        assert caught.value.exit_code == 4


def test_the_socket_is_for_its_owner_and_group_only(paths: Paths, serve: Callable[..., Running]) -> None:
    serve()
    assert paths.control_socket(0).stat().st_mode & 0o777 == 0o660


def test_a_socket_left_by_a_dead_launcher_is_replaced(paths: Paths, serve: Callable[..., Running]) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(paths.control_socket(0)))
    serve()
    assert ControlClient(paths, 0).call("status")["ok"]


@pytest.mark.parametrize(
    "line",
    [b"\n", b"null\n", b"[]\n", b"{}\n", b'{"op": 1}\n', b"{\n", b"\xff\xfe\n", b'{"op": "x"\n', b"[" * 60_000 + b"\n"],
)  # fmt: skip
def test_malformed_requests_are_answered(serve: Callable[..., Running], line: bytes) -> None:
    reply = json.loads(serve().raw(line))
    assert reply["ok"] is False and reply["exit_code"] == 2 and "JSON" in reply["error"]


def test_an_oversized_request_is_refused_while_it_comes(serve: Callable[..., Running]) -> None:
    server = serve()
    reply = json.loads(server.raw(b'{"op": "' + b"x" * 5_000_000))
    assert reply["exit_code"] == 2 and "longer than" in reply["error"]
    assert json.loads(server.raw(b'{"op": "status"}\n'))["ok"]


def test_the_largest_request_is_taken(serve: Callable[..., Running]) -> None:
    line = b'{"op": "status", "x": "' + b"x" * (64 * 1024 - 25) + b'"}'
    assert len(line) == 64 * 1024
    assert json.loads(serve().raw(line + b"\n"))["ok"]


def test_a_request_in_pieces(serve: Callable[..., Running]) -> None:
    server = serve()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(server.path))
        sock.settimeout(10)
        for byte in b'{"op": "status"}\n':
            sock.sendall(bytes([byte]))
        assert json.loads(sock.recv(65536))["ok"]


def test_a_slow_client_is_sent_away_and_holds_up_nobody(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "REQUEST_SECONDS", 0.5)
    server = serve()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(server.path))
        slow.sendall(b'{"op": ')
        assert json.loads(server.raw(b'{"op": "status"}\n'))["ok"]
        slow.settimeout(10)
        assert "did not arrive" in json.loads(slow.recv(65536))["error"]
        assert slow.recv(1) == b""


def test_a_client_that_does_not_take_its_answer(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "REQUEST_SECONDS", 0.5)
    server = serve(lambda request, client: client.reply({"ok": True, "much": "x" * 3_000_000}))
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(server.path))
        deaf.sendall(b'{"op": "status"}\n')
        time.sleep(1.2)
        assert len(server.server.clients) == 0


def test_many_clients_at_once(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    socks = [socket.socket(socket.AF_UNIX) for _ in range(control_server.MAX_CLIENTS)]
    try:
        for sock in socks:
            sock.connect(str(server.path))
        deadline = time.monotonic() + 5
        while len(server.server.clients) < len(socks) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert json.loads(server.raw(b""))["exit_code"] == 5  # busy
        socks.pop().close()
        time.sleep(0.2)
        assert json.loads(server.raw(b'{"op": "status"}\n'))["ok"]
    finally:
        for sock in socks:
            sock.close()


def test_a_client_that_leaves_while_it_waits_is_forgotten(serve: Callable[..., Running]) -> None:
    left = threading.Event()

    def handle(request: dict[str, Any], client: Any) -> None:
        client.on_close = left.set

    server = serve(handle)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(server.path))
        sock.sendall(b'{"op": "run", "wait": true}\n')
        time.sleep(0.2)
        assert not left.is_set()
    assert left.wait(5)
    assert not server.server.clients


# -- the client


def test_no_launcher(paths: Paths) -> None:
    with pytest.raises(ControlError, match="not running") as caught:
        ControlClient(paths, 0).call("status")
    assert caught.value.exit_code == 1 and "`appliance start 0`" in str(caught.value.hint)


def test_a_launcher_that_does_not_answer(
    paths: Paths, serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.control._REPLY_GRACE", 0.3)
    serve(lambda request, client: None)
    with pytest.raises(ControlError, match="did not answer run") as caught:
        ControlClient(paths, 0).call("run", timeout=0.2)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("answer", [b"", b"{", b"[]\n", b"{}\n", b'{"ok": 1}\n', b'{"ok": true', b"\xff\n"])
def test_a_launcher_that_talks_nonsense(paths: Paths, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(paths.control_socket(0)))
        listener.listen()

        def once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        turn = pool.submit(once)
        with pytest.raises(ControlError):
            ControlClient(paths, 0).call("status", timeout=5)
        turn.result()


def test_an_answer_that_comes_before_the_request_is_read(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher with too many clients refuses at once and closes: its reason counts, not the broken pipe."""
    closed, connect = threading.Event(), SocketClient._connect

    def connect_and_be_slow(client: SocketClient, sock: socket.socket, deadline: float) -> None:
        connect(client, sock, deadline)
        assert closed.wait(5)

    monkeypatch.setattr(SocketClient, "_connect", connect_and_be_slow)
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(paths.control_socket(0)))
        listener.listen()

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b'{"ok": false, "error": "busy", "exit_code": 5}\n')
            closed.set()

        turn = pool.submit(refuse)
        with pytest.raises(ControlError, match="GPU 0: busy") as caught:
            ControlClient(paths, 0).call("status", timeout=5)
        turn.result()
    assert caught.value.exit_code == 5


def test_errors_keep_their_words_hint_and_exit_code(paths: Paths, serve: Callable[..., Running]) -> None:
    serve(lambda _, client: client.reply({"ok": False, "error": "held", "hint": "undrain", "exit_code": 4}))
    with pytest.raises(ControlError, match="GPU 0: held") as caught:
        ControlClient(paths, 0).call("run")
    assert (caught.value.hint, caught.value.exit_code) == ("undrain", 4)


# -- the parser

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the table of Unicode is made once
@given(st.binary(max_size=300) | _JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_request_with_an_op_or_an_error_in_words(data: bytes) -> None:
    found = parse_request(data)
    if isinstance(found, dict):
        assert (isinstance(found["op"], str) and json.loads(data) == found) or "NaN" in data.decode()
    else:
        assert found.startswith("the request is n")


_CROWD = """
import os, socket, sys, time
os.setgroups([]); os.setresgid(*[int(sys.argv[1])] * 3); os.setresuid(64700, 64700, 64700)
kept = []
for _ in range(int(sys.argv[2])):
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].connect("ctl")
print("crowded", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_the_appliance_user_cannot_keep_root_out(
    paths: Paths, serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "REQUEST_SECONDS", 30.0)  # none of them leaves meanwhile
    running = serve(public_uid=64700)
    count = control_server.MAX_CLIENTS + control_server.MAX_PUBLIC_CLIENTS
    argv = [sys.executable, "-c", _CROWD, str(os.getgid()), str(count)]
    with subprocess.Popen(argv, cwd=running.path.parent, stdout=subprocess.PIPE) as crowd:
        assert crowd.stdout is not None and crowd.stdout.readline()
        try:
            assert ControlClient(paths, 0).call("hold", timeout=5)["ok"]
            assert len(running.server.clients) <= control_server.MAX_PUBLIC_CLIENTS + 1
        finally:
            crowd.kill()


def test_a_queue_that_is_full_is_waited_for(paths: Paths) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(str(paths.control_socket(0)))
        listener.listen(1)
        for _ in range(2):
            idle = stack.enter_context(socket.socket(socket.AF_UNIX))
            idle.connect(str(paths.control_socket(0)))
            idle.sendall(b"\n")

        def serve_all() -> None:
            time.sleep(0.3)
            for _ in range(3):
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.recv(65536)
                    sock.sendall(b'{"ok": true}\n')

        thread = threading.Thread(target=serve_all)
        thread.start()
        assert ControlClient(paths, 0).call("status", timeout=5) == {"ok": True}
        thread.join()
        listener.close()
        paths.control_socket(0).unlink()
        with pytest.raises(ControlError, match="not running"):
            ControlClient(paths, 0).call("status", timeout=0.1)

"""The pieces that the service is made of: asking launchers until they have done it, errands, HTTP, the engine probe."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.launcher.loop import Loop
from appliance.paths import Paths
from appliance.statefile import write_state
from appliance.unix_http import UnixConnection
from healthcheck import http_server
from healthcheck.engine_errors import read_errors
from healthcheck.engine_probe import EngineProbe, cause_of
from healthcheck.engines import EngineView, Launchers, LauncherView
from healthcheck.errands import Errands
from healthcheck.http_server import HttpServer
from healthcheck.lane import Lane
from healthcheck.types import Signal, Status
from healthcheck.verification import judge


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short name: a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hc") as directory:
        yield Path(directory)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


class Control:
    """A launcher's control socket; `answer` gets the requests, returns a reply or None to hang up."""

    def __init__(self, path: Path, answer: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        self.seen: list[dict[str, Any]] = []
        self.gone: list[dict[str, Any]] = []  # the other side left before the answer
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        with sock:
            request = json.loads(sock.makefile("rb").readline())
            self.seen.append(request)
            reply = self._answer(request)
            if reply == {"never": True}:
                sock.recv(1)  # until it leaves
                self.gone.append(request)
            elif reply is not None:
                sock.sendall(json.dumps(reply).encode() + b"\n")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


# -- lanes -------------------------------------------------------------------------------------------------------------


def test_a_request_is_repeated_until_the_launcher_is_there_and_does_it(short: Path, loop: Loop) -> None:
    lane, replies, troubles = Lane(loop, short / "ctl"), [], []  # type: ignore[var-annotated]
    lane.ask("place", {"op": "hold"}, 5, replies.append, trouble=troubles.append)
    assert loop.run(until=lambda: len(troubles) == 1, timeout=5)
    answers = iter([{"ok": False, "error": "the disk is full", "exit_code": 1}, None, {"ok": True}])
    control = Control(short / "ctl", lambda request: next(answers))
    assert loop.run(until=lambda: bool(replies), timeout=20)
    assert replies == [{"ok": True}] and lane.idle
    assert troubles == ["the launcher does not answer", "the disk is full", "the launcher does not answer"]
    control.close()


def test_a_newer_request_of_a_kind_replaces_one_that_is_under_way(short: Path, loop: Loop) -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"never": True} if request["level"] == "drain" else {"ok": True}

    control = Control(short / "ctl", answer)
    lane, drained, stopped = Lane(loop, short / "ctl"), [], []  # type: ignore[var-annotated]
    lane.ask("place", {"op": "hold", "level": "drain"}, 60, drained.append)
    assert loop.run(until=lambda: len(control.seen) == 1, timeout=5)
    lane.ask("place", {"op": "hold", "level": "stop"}, 60, stopped.append)
    assert loop.run(until=lambda: bool(stopped) and bool(control.gone), timeout=5)
    assert drained == []
    control.close()


def test_a_share_is_there_before_the_unhold_that_came_after_it(short: Path, loop: Loop) -> None:
    refused = iter([{"ok": False, "error": "busy", "exit_code": 5}])
    control = Control(short / "ctl", lambda request: next(refused, {"ok": True}))
    lane, done = Lane(loop, short / "ctl"), []  # type: ignore[var-annotated]
    lane.ask("share", {"op": "share"}, 5, lambda _: done.append("share"))
    lane.ask("place", {"op": "unhold"}, 5, lambda _: done.append("unhold"))
    assert loop.run(until=lambda: len(done) == 2, timeout=5)
    assert [request["op"] for request in control.seen] == ["share", "share", "unhold"]
    control.close()


def test_a_refusal_ends_what_does_not_insist(short: Path, loop: Loop) -> None:
    control = Control(short / "ctl", lambda request: {"ok": False, "error": "held", "exit_code": 4})
    lane, replies = Lane(loop, short / "ctl"), []  # type: ignore[var-annotated]
    lane.ask("place", {"op": "restart"}, 5, replies.append, insist=False)
    assert loop.run(until=lambda: bool(replies), timeout=5)
    assert replies[0]["error"] == "held"
    control.close()


# -- errands -----------------------------------------------------------------------------------------------------------


def test_an_errand_that_fails_or_hangs_is_an_answer(short: Path, loop: Loop) -> None:
    """Nobody listens; somebody listens and never answers: killed at its deadline while the loop goes on."""
    errands, answers, ticks = Errands(loop), {}, []  # type: ignore[var-annotated]
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(short / "silent"))
    silent.listen()
    for name in ("nobody", "silent"):
        request = {"op": "warmup", "socket": str(short / name), "model": "m", "prompt": [1]}
        errands.run(name, request | {"timeout": 60.0}, 2.0, lambda answer, name=name: answers.update({name: answer}))

    def tick() -> None:
        ticks.append(loop.time())
        loop.later(0.05, tick)

    tick()
    assert loop.run(until=lambda: len(answers) == 2, timeout=20)
    assert not answers["nobody"]["ok"] and "no answer" in answers["nobody"]["error"]
    assert not answers["silent"]["ok"]
    assert len(ticks) > 20, "the loop went on meanwhile"
    silent.close()


def test_what_is_forgotten_does_not_call_back(short: Path, loop: Loop) -> None:
    errands, answers = Errands(loop), []  # type: ignore[var-annotated]
    request = {"op": "warmup", "socket": str(short / "x"), "model": "m", "prompt": [1], "timeout": 1.0}
    errands.run("a", request, 5, answers.append)
    errands.run("a", request, 5, lambda answer: answers.append("second"))
    errands.run("b", request, 5, answers.append)
    errands.forget("b")
    assert loop.run(until=lambda: bool(answers), timeout=20)
    loop.run(timeout=1)
    assert answers == ["second"]


# -- HTTP --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(short: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.5)
    loop = Loop()
    routes = {"/state": lambda: ("application/json", b"{}"), "/big": lambda: ("text/plain", b"x" * 3_000_000)}
    server = HttpServer(loop, short / "http", routes, group=-1)
    stop = threading.Event()
    thread = threading.Thread(target=lambda: loop.run(until=stop.is_set))

    def tick() -> None:
        loop.later(0.02, tick)

    tick()
    thread.start()
    yield short / "http"
    stop.set()
    thread.join()
    server.close()
    loop.close()


def test_http_answers_whole_and_refuses_what_it_does_not_know(served: Path) -> None:
    def ask(method: str, target: str) -> tuple[int, bytes]:
        connection: HTTPConnection = UnixConnection(served, 10)
        connection.request(method, target)
        response = connection.getresponse()
        return response.status, response.read()

    assert ask("GET", "/state") == (200, b"{}")
    assert ask("GET", "/state?x=1") == (200, b"{}")
    assert ask("HEAD", "/big") == (200, b"")
    assert ask("GET", "/big") == (200, b"x" * 3_000_000)
    assert ask("GET", "/" + urllib.parse.quote("ü"))[0] == 404
    assert ask("POST", "/state")[0] == 405


@pytest.mark.parametrize(
    "data", [b"\0" * 100 + b"\r\n\r\n", b"GET /\r\n\r\n", b"x" * 20_000, b"GET /state HTTP/1.1\r\n"]
)
def test_nonsense_and_silence_cost_one_descriptor(served: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(served))
        sock.sendall(data)
        try:
            answer = sock.recv(1 << 16)
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")


# -- the engine probe --------------------------------------------------------------------------------------------------


class EngineWorld:
    """A launcher's state file and an engine that answers /admin/state as it is told."""

    def __init__(self, root: Path, loop: Loop, **options: Any) -> None:
        self.paths, self.loop = Paths.under(root), loop
        self.entry = {
            "release": "r1", "model": "m", "state": "ready", "problem": None, "pid": 7, "restarts": 0,
            "last_exit": None, "socket": str(root / "engine"),
        }  # fmt: skip
        self.slots, self.others = {"stable": "r1"}, []
        self.says: dict[str, Any] | None = {"status": "ready", "progress": {"steps": 1, "queued": 0}}
        self.launchers = Launchers(self.paths)
        self.signals: list[Signal] = []
        self.probe = EngineProbe(
            loop, Errands(loop), str(root), 0, "GPU-0",
            on_signal=self.signals.append, **{"stall_timeout": 0.3, "golden_interval": 3600.0} | options,
        )  # fmt: skip
        self.paths.launcher_state(0).parent.mkdir(parents=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(root / "engine"))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            with sock:
                sock.recv(1 << 16)
                if self.says is not None:
                    body = json.dumps(self.says).encode()
                    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    def report(self, **changes: Any) -> None:
        self.entry |= changes
        state = {"gpu": 0, "uuid": "GPU-0", "slots": self.slots, "holds": {}, "engines": [self.entry, *self.others]}
        write_state(self.paths.launcher_state(0), state, schema=1, durable=False)
        self.launchers.look([0])
        self.probe.look(self.launchers.views.get(0))

    def beats(self, seconds: float) -> list[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.probe.beat()
            self.loop.run(timeout=0.05)
        return [signal.key for signal in self.signals]

    def statuses(self) -> dict[str, Status]:
        return {check.name: check.status for check in self.probe.checks()}

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def engines(short: Path, loop: Loop) -> Iterator[EngineWorld]:
    world = EngineWorld(short, loop)
    yield world
    world.close()


def test_steps_that_stand_still_while_work_is_queued_are_one_signal(engines: EngineWorld) -> None:
    engines.report()
    assert engines.beats(0.5) == []
    assert engines.statuses()["engine r1"] is Status.OK
    engines.says = {"status": "ready", "progress": {"steps": 1, "queued": 3}}
    assert engines.beats(1.0) == ["engine:stalled"]
    assert engines.statuses()["engine r1"] is Status.FAILED
    engines.says = {"status": "ready", "progress": {"steps": 2, "queued": 3}}
    engines.beats(0.2)
    assert engines.statuses()["engine r1"] is Status.OK


@pytest.mark.parametrize("canary", ["r1", None])
def test_an_engine_on_trial_accuses_its_release_not_the_gpu(engines: EngineWorld, canary: str | None) -> None:
    """A canary, and one whose golden answers are being recorded (no slot names it); both beside stable's engine."""
    engines.slots = {"stable": "r0", "canary": canary} if canary else {"stable": "r0"}
    engines.others = [engines.entry | {"release": "r0", "pid": 8}]
    engines.report(restarts=2)
    assert engines.beats(0.2) == [] and engines.statuses()["engine r0"] is Status.OK
    engines.report(state="backoff", pid=None, restarts=3, last_exit="killed by SIGSEGV")
    engines.report(state="ready", pid=9)
    error = {"number": 1, "kind": "nonfinite", "where": {"op": "embed"}, "error": "NaN", "age_seconds": 1.0}
    engines.says = {"status": "ready", "progress": {"steps": 1, "queued": 3}, "errors": {"recent": [error]}}
    engines.others = []  # it would answer the same
    engines.probe.compare = lambda release: True  # type: ignore[method-assign]
    engines.report()
    engines.beats(1.0)
    assert [signal.key for signal in engines.signals] == ["trial:error", "trial:nonfinite", "trial:stalled"]
    engines.report(state="failed", pid=None, last_exit="exit status 1")
    assert engines.signals[-1].key == "trial:error"


def test_stable_is_compared_at_once_when_an_engine_on_trial_is_wrong(engines: EngineWorld) -> None:
    engines.slots = {"stable": "r0", "canary": "r1"}
    engines.others = [engines.entry | {"release": "r0", "pid": 8}]
    compared: list[str] = []
    engines.probe.compare = compared.append  # type: ignore[assignment, method-assign]
    engines.report(restarts=2)
    engines.beats(0.2)
    assert compared == []
    engines.report(restarts=3, pid=9, last_exit="killed by SIGSEGV")
    engines.beats(0.2)
    assert "r0" in compared


def engine(release: str, state: str = "ready", since: float = 10.0) -> EngineView:
    return EngineView(release, "m", Path("/s"), state, True, None, 7, since, 0, "exit status 1")


def launcher(*engines: EngineView, wanted: tuple[str, ...], stable: str | None = "v1") -> LauncherView:
    return LauncherView(0, "GPU-0", engines, frozenset(wanted), stable, {}, 1.0)


@pytest.mark.parametrize(
    ("view", "settled", "starting", "failed"),
    [
        (launcher(engine("v1"), wanted=("v1",)), True, True, None),
        (launcher(engine("v1", since=1.0), wanted=("v1",)), False, False, None),
        (launcher(engine("v1", "loading"), wanted=("v1",)), False, True, None),
        (launcher(engine("v1", "failed"), wanted=("v1",)), False, False, "v1"),
        (launcher(wanted=("v1",)), False, False, None),
        (launcher(wanted=(), stable=None), True, False, None),
        # a canary beside it: does not hold up, does not fail the GPU
        (launcher(engine("v1"), engine("v2", "failed"), wanted=("v1", "v2")), True, True, None),
        (launcher(engine("v1"), engine("v2", "loading"), wanted=("v1", "v2")), True, True, None),
        (launcher(engine("v1", "loading"), engine("v2"), wanted=("v1", "v2")), False, True, None),
        (launcher(engine("v2"), wanted=("v1", "v2")), False, False, None),
        # exclusive placement: the canary has this GPU alone
        (launcher(engine("v2"), wanted=("v2",)), True, True, None),
        (launcher(engine("v2", "starting"), wanted=("v2",)), False, True, None),
        (launcher(engine("v2", "failed"), wanted=("v2",)), True, True, None),
        (launcher(wanted=("v2",)), False, False, None),
    ],
)
def test_whose_engine_vouches_for_a_gpu(
    view: LauncherView, settled: bool, starting: bool, failed: str | None
) -> None:  # fmt: skip
    """Since second 5."""
    found = view.failed(5.0)
    assert (view.settled(5.0), view.starting(5.0), found and found.release) == (settled, starting, failed)


SAME, DIFFERENT = {"verdict": "same"}, {"verdict": "different", "logits_differ": True, "details": ["prompt 3"]}
WEIGHTS, NOTHING = {"verdict": "different", "weights_differ": True}, {"error": "timed out"}


@pytest.mark.parametrize(
    ("answers", "ok", "key"),
    [
        ({"v1": SAME}, True, None),
        ({"v1": DIFFERENT}, False, "golden:mismatch"),
        ({"v1": NOTHING}, None, None),
        ({"v1": SAME, "v2": DIFFERENT}, True, None),
        ({"v1": SAME, "v2": NOTHING}, True, None),
        ({"v1": NOTHING, "v2": SAME}, None, None),
        ({"v1": DIFFERENT, "v2": SAME}, False, "golden:mismatch"),
        ({"v1": SAME, "v2": WEIGHTS}, False, "checksum:mismatch"),
        ({"v2": DIFFERENT}, True, None),
    ],
)
def test_answers_of_a_release_on_trial_do_not_decide_about_the_gpu(
    answers: dict[str, dict[str, Any]], ok: bool | None, key: str | None
) -> None:  # fmt: skip
    found = judge(answers, launcher(wanted=tuple(answers)))
    assert (found.ok, found.key) == (ok, key)
    assert "v2" not in answers or key or ok is None or "v2, on trial" in found.detail


def test_no_answer_is_unknown_and_then_said_once(engines: EngineWorld) -> None:
    engines.report()
    engines.says = None
    assert engines.beats(1.0) == ["engine:unreachable"]
    assert engines.statuses()["engine r1"] is Status.UNKNOWN


def test_an_engine_that_died_is_a_signal_one_that_was_stopped_is_not(engines: EngineWorld) -> None:
    engines.report(restarts=2)
    engines.report(state="stopping")
    engines.report(state="gone")
    engines.report(state="ready", pid=8)
    assert engines.signals == []
    engines.report(state="backoff", pid=None, restarts=3, last_exit="killed by SIGSEGV")
    engines.report(state="ready", pid=9)
    engines.report(state="failed", pid=None, restarts=3, last_exit="exit status 1")
    assert [(signal.key, signal.detail) for signal in engines.signals] == [
        ("engine:error", "r1: killed by SIGSEGV"), ("engine:error", "r1 gave up: exit status 1"),
    ]  # fmt: skip
    assert engines.statuses()["engine r1"] is Status.FAILED


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("no step for 61 s while 3 requests were queued; killed by SIGKILL", "engine:stalled"),
        ("no answer for 61 s; killed by SIGKILL", "engine:unreachable"),
        ("killed by SIGKILL; the kernel killed a process at MemoryMax", None),
        ("exit status 4 (refused: configuration, model or sizes)", None),
        ("no scope: systemd did not answer within 20 s; killed by SIGKILL", None),
        ("exit status 1: cudaMalloc failed, is MemoryMax too small?", "engine:error"),
        ("exit status 1", "engine:error"),
    ],
)
def test_what_an_end_says_of_the_gpu(words: str, key: str | None) -> None:
    """The words are launcher/restart.py:exit_text's and launcher/health.py:StallWatch's."""
    assert cause_of(words) == key


def test_no_launcher_is_unknown(engines: EngineWorld) -> None:
    engines.report()
    engines.paths.launcher_state(0).unlink()
    engines.launchers.look([0])
    engines.probe.look(engines.launchers.views.get(0))
    assert engines.statuses() == {"engine": Status.UNKNOWN} and engines.signals == []


# -- what the engine says of its GPU -----------------------------------------------------------------------------------


def told(number: int, kind: str = "nonfinite", *, age: float = 1.0, **where: Any) -> dict[str, Any]:
    return {"number": number, "kind": kind, "error": "NaN", "where": where, "age_seconds": age}


def test_errors_of_the_engine_are_signals_with_kernel_layer_head_and_position(engines: EngineWorld) -> None:
    engines.report()
    assert engines.beats(0.2) == []
    place = {"op": "attention", "layer": 3, "head": 5, "position": 17}
    assert engines.says is not None
    engines.says["errors"] = {"total": 1, "recent": [told(1, **place)]}
    assert engines.beats(0.5) == ["engine:nonfinite"], "once, not at every beat"
    assert engines.signals[0].detail == "r1: nonfinite in attention, layer 3, head 5, position 17: NaN"
    assert engines.statuses()["engine r1"] is Status.DEGRADED
    recent = [told(n, **place) for n in range(30, 40)] + [told(40, "page_range", op="attention", layer=0)]
    engines.says["errors"] = {"total": 40, "recent": recent}
    assert engines.beats(0.5)[1:] == ["engine:nonfinite", "engine:index"]
    assert engines.signals[1].detail.endswith("(and 37 more)")


def test_after_an_error_the_answers_are_compared_at_once(engines: EngineWorld) -> None:
    engines.report()
    engines.beats(0.1)
    assert not engines.probe.comparing
    assert engines.says is not None
    engines.says["errors"] = {"total": 1, "recent": [told(1, op="down", layer=1)]}
    deadline = time.monotonic() + 20
    while not engines.probe.comparing:  # not for long: there are no answers here to compare with
        assert time.monotonic() < deadline
        engines.beats(0.01)


def test_an_old_error_is_not_shown_for_ever(engines: EngineWorld) -> None:
    engines.report()
    assert engines.says is not None
    engines.says["errors"] = {"total": 1, "recent": [told(1, age=4000.0, op="down")]}
    engines.beats(0.2)
    assert engines.statuses()["engine r1"] is Status.OK


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["number", "kind", "error", "where", "age_seconds"]), _JSON), _JSON)
def test_whatever_an_engine_says_is_read(entry: dict[str, Any], other: Any) -> None:
    """Another version, or an engine that is out of its mind."""
    for errors in (other, {"total": other, "recent": other}, {"recent": [entry, other]}):
        found = read_errors({"errors": errors}, 3)
        assert found.total >= 3 and all(key.startswith("engine:") for key in found.found)
        assert all(text.isprintable() for text in found.found.values())

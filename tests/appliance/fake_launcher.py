"""Launchers that speak the control protocol without systemd: one process, a control socket and a state file per GPU.

Their engines are either stubs (answers scripted, up in a moment) or the real engine on the CPU behind a relay, which
can pretend to be a GPU. Started with `with FakeFleet(paths, gpus=2) as fleet`; steered with `fleet.script(...)`.

    python fake_launcher.py ROOT GPUS KIND      (KIND: stub, real)
"""

from __future__ import annotations

import ctypes
import hashlib
import http.client
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any

from appliance.gpus import bind_slots
from appliance.paths import Paths
from appliance.slots import pointer
from engine.spawn import python_env, python_module

START_SECONDS = 20.0


# -- in the test -------------------------------------------------------------------------------------------------------


class FakeFleet:
    """The process of the launchers, as a context. `config` is written to appliance.toml."""

    def __init__(self, paths: Paths, gpus: int = 1, *, kind: str = "stub", config: str = "", backend: str = "cpu"):
        self.paths, self.gpus, self.kind = paths, gpus, kind
        for directory in (paths.etc, paths.state, paths.run):
            directory.mkdir(parents=True, exist_ok=True)
        paths.config.write_text(f'schema = 1\n[gpus]\nbackend = "{backend}"\ncpu_slots = {gpus}\n{config}')
        bind_slots(paths.gpus, [f"GPU-{n:08d}" if backend == "cuda" else f"CPU-{n}" for n in range(gpus)])

    def __enter__(self) -> FakeFleet:
        root = self.paths.etc.parents[1]
        ready = _ready(self.paths)
        ready.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(root), str(self.gpus), self.kind],
            env=python_env(),
            preexec_fn=_die_with_parent,
        )
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        return self

    def __exit__(self, _kind: type | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(20)

    def ask(self, gpu: int, op: str, **args: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(str(self.paths.control_socket(gpu)))
            sock.sendall(json.dumps({"op": op} | args).encode() + b"\n")
            return json.loads(sock.makefile().readline())  # type: ignore[no-any-return]

    def script(self, gpu: int, **values: Any) -> None:
        """Of engines, by release: dies={release: text}, hangs=[release] (they stay loading), late=[release] (systemd
        makes no scope in time, once), salt={release: text} (other logits), weights={release: text} (another checksum),
        flipped=[release] (the arena is not what was loaded), nan=[release], broken=[release] (500 to clients),
        slow={release: seconds}, garbled=[release] (nonsense with status 200). Of all: device=name (claims to be this
        GPU), shift=float (added to a log probability). Of the launcher: refuse={op: text}, deaf=True (closes without
        an answer), log=[] (clears the log of ops)."""
        assert self.ask(gpu, "script", **values)["ok"]

    def log(self, gpu: int) -> list[str]:
        """The ops it was asked, but for status."""
        return list(self.ask(gpu, "log")["log"])

    def running(self, gpu: int) -> dict[str, str]:
        """release -> state."""
        state = self.ask(gpu, "status")["state"]
        return {engine["release"]: engine["state"] for engine in state["engines"]}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# -- the process -------------------------------------------------------------------------------------------------------


class Launcher:
    def __init__(self, paths: Paths, gpu: int, kind: str) -> None:
        self.paths, self.gpu, self.kind = paths, gpu, kind
        self.lock = threading.RLock()
        self.engines: dict[str, Engine] = {}
        self.leases: set[str] = set()
        self.only: str | None = None  # after "replace", until the next sync
        self.holds: dict[str, Any] = {}
        self.log: list[str] = []
        self.values: dict[str, Any] = {}
        paths.engine_socket(gpu, "x").parent.mkdir(parents=True, exist_ok=True)
        self.sync()

    def sync(self) -> None:
        self.only = None
        self.leases -= self.pointers()
        self.reconcile()

    def pointers(self) -> set[str]:
        return {name for slot in ("stable", "canary") if (name := pointer(self.paths, slot))}

    def reconcile(self) -> None:
        wanted = {self.only} if self.only else self.pointers() | self.leases
        for name in list(self.engines):
            if name not in wanted:
                self.stop(name)
        for name in wanted:
            if name not in self.engines:
                self.start(name)
        self.write()

    def start(self, name: str) -> None:
        engine = self.engines.get(name)
        if engine is None or engine.state == "failed":
            self.engines[name] = (StubEngine if self.kind == "stub" else RealEngine)(self, name)
        self.write()

    def stop(self, name: str) -> None:
        engine = self.engines.pop(name, None)
        if engine is not None:
            engine.close()
        self.write()

    def state(self) -> dict[str, Any]:
        engines = [
            {
                "release": name,
                "state": engine.state,
                "restarts": engine.restarts,
                "last_exit": engine.last_exit,
                "progress": 0.5,
                "socket": str(engine.path),
                "admitted": engine.state == "ready" and not self.holds,
                "pid": os.getpid(),
            }
            for name, engine in self.engines.items()
        ]
        return {"gpu": self.gpu, "holds": self.holds, "admitted": not self.holds, "engines": engines}

    def write(self) -> None:
        file = self.paths.launcher_state(self.gpu)
        temporary = file.with_name(f".{threading.get_ident()}.tmp")
        with self.lock:  # what is older must not come last
            temporary.write_text(json.dumps({"schema": 1} | self.state()))
            temporary.replace(file)

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        with self.lock:
            op, release = request["op"], request.get("release")
            if op not in ("status", "script", "log"):
                self.log.append(f"{op} {release}" if release else op)
                if self.values.get("deaf"):
                    return None
                if op in self.values.get("refuse", {}):
                    return {"ok": False, "error": self.values["refuse"][op], "hint": None, "exit_code": 1}
            if op == "script":
                values = {key: value for key, value in request.items() if key != "op"}
                self.log = values.pop("log", self.log)
                self.values |= values
            elif op == "log":
                return {"ok": True, "log": self.log}
            elif op == "run" and release:
                self.leases.add(release)
                self.start(release)
            elif op == "replace" and release:
                self.leases.add(release)
                self.only = release
                self.reconcile()
                self.start(release)
            elif op == "stop" and release:
                self.leases.discard(release)
                self.only = None if self.only == release else self.only
                self.reconcile()
            elif op == "restart" and release:
                self.stop(release)
                self.start(release)
            elif op == "sync":
                self.sync()
            elif op == "hold":
                self.holds[request["owner"]] = {"level": request["level"], "reason": request["reason"], "since": 0}
                self.write()
            elif op == "unhold":
                self.holds.pop(request["owner"], None)
                self.write()
            return {"ok": True, "state": self.state()}


class Engine:
    last_exit: str | None = None
    restarts = 0

    def __init__(self, launcher: Launcher, name: str) -> None:
        self.launcher, self.name, self.state = launcher, name, "loading"
        self.path = launcher.paths.engine_socket(launcher.gpu, name)
        self.path.unlink(missing_ok=True)
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # what a gateway wants of an engine
            wbufsize = -1  # head and body in one piece

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(self.rfile.read(int(self.headers["Content-Length"])))

            def _answer(self, body: bytes | None) -> None:
                status, value = engine.ask(self.command, self.path, body)
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

            def get_request(self) -> tuple[Any, Any]:
                return super().get_request()[0], ("engine", 0)

        self.server = Server(str(self.path), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        if self.listed("late"):  # as the launcher does it: away, a while, and once more
            self.last_exit, self.state = "no scope: systemd did not answer within 20 s", "backoff"
            self.launcher.write()
            time.sleep(0.5)
            self.restarts, self.state = 1, "loading"
            self.launcher.write()
            time.sleep(0.5)
        text = self.launcher.values.get("dies", {}).get(self.name)
        if text is None and self.name not in self.launcher.values.get("hangs", []):
            try:
                self.load()
            except RuntimeError as error:
                text = str(error)
        if text is not None:
            self.last_exit, self.state = text, "failed"
        elif self.name not in self.launcher.values.get("hangs", []):
            self.state = "ready"
        self.launcher.write()
        self.stay()

    def load(self) -> None:
        """Returns when it is ready."""

    def stay(self) -> None:
        """Returns when it has ended."""

    def ask(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
        raise NotImplementedError

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.path.unlink(missing_ok=True)

    def listed(self, key: str) -> bool:
        return self.name in self.launcher.values.get(key, [])

    def given(self, key: str) -> str:
        return str(self.launcher.values.get(key, {}).get(self.name, ""))


class StubEngine(Engine):
    def ask(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
        if self.listed("garbled"):
            return 200, {"op": "?", "engine": {"backend": "cpu"}}
        if path in ("/livez", "/readyz"):
            return 200, {"status": "ok"}
        if path == "/v1/completions":
            time.sleep(float(self.given("slow") or 0))
            if self.listed("broken"):
                return 500, {"error": {"message": "broken", "type": "server_error"}}
            return 200, {"object": "text_completion", "choices": [{"index": 0, "text": self.name}]}
        if path == "/admin/state":
            device = self.launcher.values.get("device")
            backend = "cuda" if device else "cpu"
            engine = {"backend": backend, "max_model_len": 2048}
            return 200, {"status": "ready", "engine": engine, "device": {"backend": backend, "name": device}}
        if path == "/admin/checksum":
            expected, flipped = "w" + self.given("weights"), self.listed("flipped")
            actual = "x" if flipped else expected
            return 200, {"op": "checksum", "result": {"expected": expected, "actual": actual, "ok": not flipped}}
        if path == "/admin/golden":
            ids = json.loads(body or b"")["args"]["prompt_ids"]
            digest = hashlib.sha256(f"{self.given('salt')} {ids}".encode()).hexdigest()
            result = {"sha256": digest, "positions": len(ids), "finite": not self.listed("nan")}
            return 200, {"op": "golden", "result": result}
        return 404, {"error": {"message": f"{method} {path}"}}


class RealEngine(Engine):
    """The relay is what the host sees; behind it the real engine, on the CPU."""

    def load(self) -> None:
        self.inner = self.path.with_suffix(".real")
        release = self.launcher.paths.release(self.name)
        about = json.loads((release / "release.json").read_text())
        self.process = subprocess.Popen(
            [*python_module("engine"), "--model-dir", str(release / "model"), "--model-name", about["model_name"],
             "--backend", "cpu", "--uds", str(self.inner), *about["options"]["arguments"]],
            env=python_env(), preexec_fn=_die_with_parent, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while self.process.poll() is None:
            try:
                if self._relay("GET", "/readyz", None)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"the engine ended with {self.process.returncode}")

    def ask(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
        status, value = self._relay(method, path, body)
        device, shift = self.launcher.values.get("device"), self.launcher.values.get("shift", 0)
        if path == "/admin/state" and device:
            value["engine"]["backend"] = "cuda"
            value["device"] = {"backend": "cuda", "name": device}
        if path == "/v1/completions" and shift:
            logprobs = value["choices"][0]["logprobs"]
            logprobs["token_logprobs"][-1] += shift
        if path == "/admin/golden" and self.listed("nan"):
            value["result"]["finite"] = False
        return status, value

    def stay(self) -> None:
        self.process.wait()  # a child with a death signal must not outlive the thread that made it (prctl(2))

    def _relay(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("engine", timeout=120)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.inner))
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        super().close()


class ControlHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        line = self.rfile.readline()
        if line:
            answer = self.server.launcher.answer(json.loads(line))  # type: ignore[attr-defined]
            if answer is not None:
                self.wfile.write(json.dumps(answer).encode() + b"\n")


def _ready(paths: Paths) -> Path:
    """Is there once all of them listen."""
    return paths.run / "fleet-ready"


def main(root: Path, gpus: int, kind: str) -> None:
    paths = Paths.under(root)
    for gpu in range(gpus):
        launcher = Launcher(paths, gpu, kind)
        paths.control_socket(gpu).unlink(missing_ok=True)
        server = socketserver.ThreadingUnixStreamServer(str(paths.control_socket(gpu)), ControlHandler)
        server.daemon_threads = True
        server.launcher = launcher  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        launcher.write()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _ready(paths).touch()
    threading.Event().wait()  # until SIGTERM, or until the test run has gone (_die_with_parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

"""A launcher in this process, on a tree of its own: the loop runs in the test's thread, systemd is replaced by
FakeScopes, engines are fake_engine.py. No root needed; the real systemd is in test_box_*.py."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from appliance.events import read_events
from appliance.hostconfig import parse_config
from appliance.launcher import operations
from appliance.launcher.last_words import VARIABLE
from appliance.launcher.launcher import Launcher, User
from appliance.launcher.loop import Loop
from appliance.launcher.scope import Findings, ScopePlan
from appliance.launcher.spec import EngineSpec
from appliance.notify import Notifier
from appliance.paths import Paths
from tests.release_files import release_json

FAKE = Path(__file__).with_name("fake_engine.py")
CONFIG = """
[gpus]
backend = "cpu"
[engine]
placement = "{placement}"
drain_timeout = 2
start_timeout = {start_timeout}
stall_timeout = {stall_timeout}
[restart]
first_delay = 0.05
max_delay = 0.2
limit = 3
"""
READY = {
    "status": "ready", "engine": {"backend": "cpu", "steps": 1}, "loading": None, "draining": None,
    "requests": {"running": 0, "waiting": 0, "in_flight_http": 0},
}  # fmt: skip
# As the trampoline: waits for the word, then becomes the engine. It drops nothing: that needs root (test_box_scope.py).
TRAMPOLINE = (
    "import os, sys; os.read(3, 3) == b'go\\n' or sys.exit(126); os.close(3); "
    "os.execve(sys.argv[1], sys.argv[1:], dict(os.environ))"
)


class FakeScopes:
    """systemd as the launcher sees it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.plans: list[ScopePlan] = []
        self.pids: dict[str, int] = {}
        self.start_error: str | None = None
        self.findings = Findings()
        self.cleaned = 0
        self.hang = False

    def start(self, plan: ScopePlan, pid: int, done: Callable[[dict[str, Any]], None]) -> None:
        self.plans.append(plan)
        self.pids[plan.release] = pid
        if self.hang:
            return
        answer = {"ok": False, "error": self.start_error} if self.start_error else {"ok": True, "unit": {}}
        self._loop.later(0, lambda: done(answer))

    def stop(self, gpu: int, release: str, done: Callable[[dict[str, Any]], None]) -> None:
        self._loop.later(0, lambda: done({"ok": True}))

    def clean(self, gpu: int, *, kill: bool, seconds: float, done: Callable[[dict[str, Any]], None]) -> None:
        self.cleaned += 1
        self._loop.later(0, lambda: done({"ok": True, "stopped": []}))


class Client:
    """Takes a reply, as control_server.Client does."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = None
        self.on_close: Callable[[], None] = lambda: None

    def reply(self, answer: dict[str, Any]) -> None:
        if self.answer is None:
            self.answer = answer
            self.on_close()


class World:
    def __init__(
        self, root: Path, *, placement: str = "shared", start_timeout: float = 20, stall_timeout: float = 20
    ) -> None:
        self.paths = Paths.under(root)
        for directory in (self.paths.releases, self.paths.state / "slots", self.paths.gpu_run(0)):
            directory.mkdir(parents=True)
        self._start_timeout = start_timeout  # shorter than appliance.toml allows
        text = CONFIG.format(placement=placement, start_timeout=max(5, start_timeout), stall_timeout=stall_timeout)
        self.paths.config.parent.mkdir(parents=True)
        self.paths.config.write_text(text)
        self.loop = Loop()
        self.scopes = FakeScopes(self.loop)
        self.notifications = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.notifications.bind(str(root / "notify"))
        self.environ = {"NOTIFY_SOCKET": str(root / "notify")}
        self.launcher: Launcher

    def start(self) -> World:
        config = parse_config(self.paths.config.read_bytes(), where="test")
        engine = msgspec.structs.replace(config.engine, start_timeout=self._start_timeout)
        config = msgspec.structs.replace(config, engine=engine)
        ids = User(os.getuid(), os.getgid(), frozenset({os.getuid()}))
        self.launcher = Launcher(
            self.paths, 0, "CPU-0", config, ids, self.loop, self.scopes, Notifier(self.environ)
        )  # fmt: skip
        self.launcher.around.spawn = _spawn
        self.launcher.around.compare_scope = lambda *_: self.scopes.findings
        self.launcher.start()
        return self

    def add_release(self, name: str, **state: Any) -> Path:
        """Returns the directory that tells its engine how to behave."""
        behave = self.paths.release(name) / "behave"
        behave.mkdir(parents=True)
        self.says(name, **state)
        python = self.paths.release(name) / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FAKE} "$@"\n')
        python.chmod(0o755)
        options = {"arguments": ["--behave", str(behave)]}
        release = release_json(name, python=str(python), model_bytes=1000, options=options)
        (self.paths.release(name) / "release.json").write_text(json.dumps(release))
        return behave

    def says(self, name: str, **state: Any) -> None:
        """What /admin/state of that engine answers from now on: ready, but for `state`."""
        path = self.paths.release(name) / "behave/state.json"
        path.with_suffix(".new").write_text(json.dumps(READY | state))
        path.with_suffix(".new").rename(path)

    def use(self, name: str, slot: str = "stable") -> None:
        pointer = self.paths.slot_pointer(slot)
        pointer.unlink(missing_ok=True)
        pointer.symlink_to(f"../releases/{name}")

    def ask(self, op: str, **args: Any) -> Client:
        client = Client()
        operations.handle(self.launcher, {"op": op} | args, client)  # type: ignore[arg-type]
        return client

    def answer(self, op: str, seconds: float = 10, **args: Any) -> dict[str, Any]:
        client = self.ask(op, **args)
        self.until(lambda: client.answer is not None, seconds)
        assert client.answer is not None
        return client.answer

    def until(self, what: Callable[[], Any], seconds: float = 10) -> None:
        assert self.loop.run(until=lambda: bool(what()), timeout=seconds), self.state()

    def run(self, seconds: float) -> None:
        self.loop.run(timeout=seconds)

    def state(self) -> dict[str, Any]:
        """What others read."""
        state: dict[str, Any] = json.loads(self.paths.launcher_state(0).read_text())
        return state

    def engine(self, name: str) -> dict[str, Any]:
        return next((entry for entry in self.state()["engines"] if entry["release"] == name), {})

    def reach(self, name: str, state: str, seconds: float = 10) -> dict[str, Any]:
        self.until(lambda: self.paths.launcher_state(0).exists() and self.engine(name).get("state") == state, seconds)
        return self.engine(name)

    def starts(self, name: str) -> list[dict[str, Any]]:
        path = self.paths.release(name) / "behave/starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def notified(self) -> list[dict[str, str]]:
        found = []
        while True:
            try:
                text = self.notifications.recv(65536).decode()
            except BlockingIOError:
                return found
            found.append(dict(line.split("=", 1) for line in text.splitlines()))

    def history(self, name: str) -> list[str]:
        """States of an engine in order, from the event log."""
        events = read_events(self.paths.events)
        return [event["state"] for event in events if event["event"] == "engine" and event["release"] == name]

    def close(self) -> None:
        """Kills what is left."""
        for engine in self.launcher.engines.values() if hasattr(self, "launcher") else ():
            if engine.pid is not None:
                os.kill(engine.pid, signal.SIGKILL)
                os.waitpid(engine.pid, 0)
        if hasattr(self, "launcher"):
            self.launcher.close()
        self.loop.close()
        self.notifications.close()


def _spawn(spec: EngineSpec, uid: int, gid: int, words: int) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs, contextlib.ExitStack() as copies:
        sources = []  # above the targets, whatever numbers they have: else one overwrites the other
        for fd in (words, theirs.fileno()):
            sources.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100))
            copies.callback(os.close, sources[-1])
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-S", "-E", "-c", TRAMPOLINE, *spec.argv],
            spec.env | {VARIABLE: "99"},
            file_actions=[(os.POSIX_SPAWN_DUP2, sources[0], 99), (os.POSIX_SPAWN_DUP2, sources[1], 3)],
        )
    return pid, ours

"""A launcher as a service of a real systemd: the box with the shipped units, this checkout, and releases."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.host import appliance_box
from tests.host.appliance_box import PYTHON, UID
from tests.host.box import Box

__all__ = ["PYTHON", "UID", "World", "boot"]

# A crash must not cost the tests systemd's five seconds, nor its patience with restarts.
QUICK = "[Unit]\nStartLimitIntervalSec=0\n[Service]\nRestartSec=0.2\n"
RESTART = "stall_timeout = 3\n[restart]\nfirst_delay = 0.2\nlimit = 4\nwindow = 60\n"


class World:
    """The box with an appliance in it. Paths are the host's own: nothing is moved."""

    def __init__(self, box: Box, tmp: Path) -> None:
        self.box, self._tmp = box, tmp

    def install(self, *, slots: int = 1) -> None:
        config = appliance_box.CONFIG.format(slots=slots, engine=RESTART)
        self.box.write("/etc/systemd/system/appliance-gpu@.service.d/quick.conf", QUICK)
        appliance_box.install(self.box, slots=slots, config=config)
        self.box.run(["useradd", "--uid", str(UID + 1), "--no-create-home", "visitor"])

    def add_release(self, name: str, *, python: str | None = None) -> None:
        """A tiny real model; `python`: another program in the engine's place."""
        changes = {"python": python, "engine_version": "0.0.0-checkout"} if python else {}
        appliance_box.add_release(self.box, self._tmp, name, **changes)

    def use(self, name: str, slot: str = "stable") -> None:
        appliance_box.use(self.box, name, slot)

    def systemctl(self, verb: str, gpu: int = 0) -> None:
        self.box.run(["systemctl", verb, f"appliance-gpu@{gpu}"], timeout=120)

    def ask(self, op: str, gpu: int = 0, user: str | None = None, **args: Any) -> dict[str, Any]:
        """Through ControlClient in the box; the reply, or {"error", "exit_code"}."""
        script = (
            "import json, sys; from appliance.control import *; from appliance.paths import Paths\n"
            "try: print(json.dumps(ControlClient(Paths(), int(sys.argv[1])).call(**json.loads(sys.argv[2]))))\n"
            "except ControlError as e: print(json.dumps({'error': e.message, 'exit_code': int(e.exit_code)}))"
        )
        done = self.python(script, str(gpu), json.dumps({"op": op, "timeout": 60} | args), user=user)
        reply: dict[str, Any] = json.loads(done)
        return reply

    def python(self, script: str, *args: str, user: str | None = None) -> str:
        return self.box.run([PYTHON, "-P", "-c", script, *args], user=user, timeout=120).stdout

    def state(self, gpu: int = 0) -> dict[str, Any]:
        """state.json; without a launcher there is none, which reads as one that has no engine and no pid."""
        shown = self.box.run(["cat", f"/run/appliance/gpu{gpu}/state.json"], check=False)
        state: dict[str, Any] = json.loads(shown.stdout or '{"pid": null, "engines": [], "holds": {}}')
        return state

    def engine(self, release: str, gpu: int = 0) -> dict[str, Any]:
        """Its entry in state.json; empty if there is none."""
        return next((entry for entry in self.state(gpu)["engines"] if entry["release"] == release), {})

    def wait(self, what: Callable[[], Any], seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := what()):
            assert time.monotonic() < deadline, f"not in {seconds} s; {self.state()}"
            time.sleep(0.1)
        return value

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.box.read("/var/lib/appliance/events.jsonl").splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]


def boot(new_box: Callable[..., Box], tmp_path: Path) -> World:
    return World(new_box(**appliance_box.boot_options()), tmp_path)

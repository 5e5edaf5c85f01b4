"""A launcher as a service of a real systemd: the namespace box with this checkout, a user, releases and a unit."""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.host.box import CHECKOUT, Box
from tests.tiny import make_tiny_model

CODE, SITE = "/opt/checkout", "/opt/site-packages"
UID = 64700
UNIT = f"""
[Unit]
Description=LLM appliance: GPU slot %i
StartLimitIntervalSec=0

[Service]
Type=notify
Environment=PYTHONPATH={CODE}:{SITE} PYTHONDONTWRITEBYTECODE=1
ExecStart=/usr/bin/python3 -P -m appliance.launcher --gpu %i
ExecReload=/bin/kill -HUP $MAINPID
ExecStopPost=/usr/bin/python3 -P -m appliance.launcher --gpu %i --cleanup
Restart=on-failure
RestartSec=0.2
RestartPreventExitStatus=2 4
WatchdogSec=30
TimeoutStartSec=60
TimeoutStopSec=90
LimitMEMLOCK=infinity
"""
CONFIG = """
schema = 1
[gpus]
backend = "cpu"
cpu_slots = {slots}
[engine]
max_model_len = 512
drain_timeout = 5
stall_timeout = 3
arguments = ["--threads", "1", "--kv-tokens", "4096"]
{engine}
[restart]
first_delay = 0.2
limit = 4
window = 60
"""


class World:
    """The box with an appliance in it. Paths are the host's own: nothing is moved."""

    def __init__(self, box: Box, tmp: Path) -> None:
        self.box, self._tmp = box, tmp

    def install(self, *, slots: int = 1, engine: str = "", config: str = "") -> None:
        self.box.run(["groupadd", "--gid", str(UID), "appliance"])
        self.box.run(["useradd", "--uid", str(UID), "--gid", str(UID), "--no-create-home", "appliance"])
        self.box.run(["useradd", "--uid", str(UID + 1), "--no-create-home", "visitor"])
        self.box.run(["mkdir", "-p", "/var/lib/appliance/slots", "/var/lib/appliance/releases", "/run/appliance"])
        self.box.write("/etc/appliance/appliance.toml", config or CONFIG.format(slots=slots, engine=engine))
        gpus = [{"slot": n, "uuid": f"CPU-{n}", "state": "HEALTHY"} for n in range(slots)]
        self.box.write("/var/lib/appliance/gpus.json", json.dumps({"schema": 1, "gpus": gpus}))
        self.box.write("/etc/systemd/system/appliance-gpu@.service", UNIT)
        self.box.run(["systemctl", "daemon-reload"])

    def add_release(self, name: str, *, python: str = "/usr/bin/python3", arguments: list[str] | None = None) -> None:
        """A tiny real model; `python`: another program in its place."""
        model = make_tiny_model(self._tmp / name / "model", seed=len(name))
        self.box.copy(model.parent, f"/var/lib/appliance/releases/{name}")
        self.box.run(["chmod", "-R", "a+rX", "/var/lib/appliance/releases"])
        self.box.write(
            f"/var/lib/appliance/releases/{name}/release.json", json.dumps(release_json(name, python, arguments))
        )

    def use(self, name: str, slot: str = "stable") -> None:
        self.box.run(["ln", "-sfn", f"../releases/{name}", f"/var/lib/appliance/slots/{slot}"])

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
        env = {"PYTHONPATH": f"{CODE}:{SITE}", "PYTHONDONTWRITEBYTECODE": "1"}
        return self.box.run(["/usr/bin/python3", "-P", "-c", script, *args], env=env, user=user, timeout=120).stdout

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


def release_json(name: str, python: str, arguments: list[str] | None = None) -> dict[str, Any]:
    return {
        "schema": 1, "name": name, "created": 0, "model_name": "tiny", "engine_version": "0.0.0-checkout",
        "python": python, "options": {"arguments": arguments or []}, "model_bytes": 1_000_000, "note": "",
    }  # fmt: skip


def boot(new_box: Callable[..., Box], tmp_path: Path) -> World:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the box has Debian 12's Python 3.11, our compiled parts here are for another version")
    site = sysconfig.get_path("purelib")
    return World(new_box(bind=[(CHECKOUT, CODE), (site, SITE)], network=False), tmp_path)

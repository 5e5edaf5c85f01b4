"""In the box, under a real systemd, with real engines: deaths of every kind, holds over restarts, who may ask."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.appliance.launcher.box_world import PYTHON, UID, World, boot
from tests.host.box import Box

NewBox = Callable[..., Box]
UNIT = "appliance-gpu@0.service"


@pytest.fixture
def world(new_box: NewBox, tmp_path: Path) -> World:
    world = boot(new_box, tmp_path)
    world.install()
    return world


def scopes(world: World) -> list[str]:
    shown = world.box.run(["systemctl", "list-units", "--plain", "--no-legend", "--all", "appliance-gpu*.scope"]).stdout
    return [line.split()[0] for line in shown.splitlines()]


def completion(world: World, socket: str) -> str:
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True})
    script = (
        "import http.client, json, socket, sys\n"
        "c = http.client.HTTPConnection('x'); c.sock = socket.socket(socket.AF_UNIX); c.sock.connect(sys.argv[1])\n"
        "c.request('POST', '/v1/completions', sys.argv[2], {'content-type': 'application/json'})\n"
        "r = c.getresponse(); print(r.status, json.loads(r.read())['choices'][0]['text'].encode().hex())"
    )
    return world.python(script, socket, body, user="appliance").strip()


def test_engine_and_launcher_die_and_come_back(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.systemctl("start")
    first = world.engine("r1")
    answer = completion(world, first["socket"])
    assert answer.startswith("200 ")

    world.box.run(["kill", "-KILL", str(first["pid"])])
    second = world.wait(lambda: (e := world.engine("r1")).get("admitted") and e["pid"] != first["pid"] and e)
    assert second["restarts"] == 1 and "SIGKILL" in second["last_exit"]
    assert completion(world, second["socket"]) == answer  # the same bits

    core = world.box.run(["pgrep", "-P", str(second["pid"])]).stdout.split()[0]
    world.box.run(["kill", "-KILL", core])
    third = world.wait(lambda: (e := world.engine("r1")).get("admitted") and e["pid"] != second["pid"] and e)
    assert third["restarts"] == 2

    launcher = world.state()["pid"]
    world.box.run(["kill", "-KILL", str(launcher)])
    world.wait(lambda: world.state()["pid"] not in (None, launcher))
    fourth = world.wait(lambda: (e := world.engine("r1")).get("admitted") and e)
    assert fourth["pid"] != third["pid"]
    assert not world.box.exists(f"/proc/{third['pid']}")
    assert scopes(world) == ["appliance-gpu0-r1.scope"]

    world.systemctl("stop")
    assert scopes(world) == []
    assert not world.box.exists("/run/appliance/gpu0/state.json")
    assert world.box.show(UNIT, "Result", "ActiveState") == {"Result": "success", "ActiveState": "inactive"}


EVIL = """#!/usr/bin/python3 -I
import json, os, socket, sys
print("first words", file=sys.stderr, flush=True)
socket.socket(fileno=os.dup(2)).shutdown(socket.SHUT_RDWR)
body = json.dumps({"status": "ready", "engine": {"backend": "cpu", "steps": 1}}).encode()
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--uds") + 1])
listener.listen()
while True:
    sock, _ = listener.accept()
    sock.recv(4096)
    sock.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
    sock.close()
"""


def test_an_engine_cannot_end_the_logging_of_its_launcher(world: World) -> None:
    """shutdown(2) of standard error would reach everybody who shares that socket."""
    world.box.write("/opt/evil", EVIL, mode=0o755)
    world.add_release("r1", python="/opt/evil")
    world.use("r1")
    world.systemctl("start")
    assert world.engine("r1")["admitted"]
    assert world.ask("hold", owner="operator", reason="heard", level="stop", wait=True)["ok"]
    world.wait(lambda: "reason=heard" in world.box.journal(UNIT))
    assert "first words" in world.box.journal("appliance-gpu0-r1.scope")
    world.systemctl("stop")
    assert world.box.show(UNIT, "Result") == {"Result": "success"}


def test_a_hold_survives_every_restart(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.systemctl("start")
    assert world.engine("r1")["admitted"]
    hold = {"owner": "watchdog", "reason": "XID 79", "level": "stop"}
    assert world.ask("hold", **hold, wait=True) == {"ok": True}
    assert world.state()["engines"] == [] and scopes(world) == []

    world.systemctl("restart")
    shown = world.box.show(UNIT, "ActiveState", "StatusText")
    assert shown == {"ActiveState": "active", "StatusText": "held by watchdog: XID 79"}
    launcher = world.state()["pid"]
    world.box.run(["kill", "-KILL", str(launcher)])
    world.wait(lambda: world.state()["pid"] not in (None, launcher))
    world.box.wait_for(UNIT)
    assert "watchdog" in world.state()["holds"] and world.state()["engines"] == []
    refused = world.ask("restart")
    assert refused["exit_code"] == 4 and "XID 79" in refused["error"]

    assert world.ask("unhold", owner="watchdog", wait=True) == {"ok": True}
    assert world.engine("r1")["admitted"]


def test_who_may_ask(world: World) -> None:
    world.systemctl("start")
    shown = world.box.show(UNIT, "ActiveState", "StatusText")
    assert shown["ActiveState"] == "active" and "no release" in shown["StatusText"]
    assert world.ask("status", user="appliance")["ok"]
    refused = world.ask("hold", user="appliance", owner="operator", reason="x")
    assert refused["exit_code"] == 4 and "may not" in refused["error"]
    assert world.ask("status", user="visitor")["exit_code"] == 4  # the mode of the socket
    world.box.run(["chmod", "666", "/run/appliance/gpu0/ctl"])
    refused = world.ask("status", user="visitor")  # the kernel's word for who it is
    assert refused["exit_code"] == 4 and f"uid {UID + 1} may not" in refused["error"]
    assert world.state()["holds"] == {}
    assert json.loads(world.box.run(["cat", "/run/appliance/gpu0/state.json"], user="visitor").stdout)["gpu"] == 0

    second = world.box.run([PYTHON, "-P", "-m", "appliance.launcher", "--gpu", "0", "--cleanup"], check=False)
    assert second.returncode == 5 and "another launcher" in second.stderr


def test_a_new_release_beside_the_old_and_systemd_reload(world: World) -> None:
    world.add_release("old")
    world.add_release("newer")
    world.use("old")
    world.systemctl("start")
    assert world.ask("run", release="newer", wait=True) == {"ok": True}
    assert world.engine("old")["admitted"] and world.engine("newer")["admitted"]
    assert scopes(world) == ["appliance-gpu0-newer.scope", "appliance-gpu0-old.scope"]
    world.use("newer")
    world.systemctl("reload")  # SIGHUP: sync
    world.wait(lambda: world.engine("old") == {})
    assert world.engine("newer")["admitted"] and scopes(world) == ["appliance-gpu0-newer.scope"]


def test_what_cannot_start_is_refused_once_and_not_repeated(world: World) -> None:
    world.box.write("/etc/appliance/appliance.toml", "[gpus]\nbackend = 'cpu'\n[engine]\nplacement = 'x'\n")
    assert world.box.run(["systemctl", "start", UNIT], check=False).returncode != 0
    time.sleep(1)
    shown = world.box.show(UNIT, "ExecMainStatus", "NRestarts", "ActiveState")
    assert shown == {"ExecMainStatus": "4", "NRestarts": "0", "ActiveState": "failed"}
    assert "engine.placement" in world.box.journal(UNIT)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("APPLIANCE_FULL") != "1", reason="waits for a deadline of 20 s: APPLIANCE_FULL=1")
def test_a_bus_that_hangs(world: World) -> None:
    """The start of an engine is given up after its deadline and tried again; all else goes on meanwhile."""
    world.add_release("r1")
    world.use("r1")
    world.systemctl("start")
    assert world.ask("hold", owner="operator", reason="x", level="stop", wait=True) == {"ok": True}
    bus = world.box.show("dbus.service", "MainPID")["MainPID"]
    world.box.run(["kill", "-STOP", bus])
    assert world.ask("unhold", owner="operator") == {"ok": True}
    world.wait(lambda: "did not answer" in str(world.engine("r1").get("last_exit")) and world.ask("status")["ok"], 40)
    assert world.box.run(["systemctl", "is-active", UNIT]).stdout.strip() == "active"
    world.box.run(["kill", "-CONT", bus])
    world.wait(lambda: world.engine("r1").get("admitted"), 60)

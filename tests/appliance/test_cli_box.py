"""The operator's commands in the box: a real systemd, launcher, engine and gateway."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.appliance.launcher.box_world import PYTHON, World, boot
from tests.host import appliance_box

pytestmark = [pytest.mark.box, pytest.mark.slow]


class Operator:
    """Root at a shell of the host."""

    def __init__(self, world: World) -> None:
        self.world = world

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [PYTHON, "-P", "-m", "appliance", *words]
        done: subprocess.CompletedProcess[str] = self.world.box.run(argv, check=False, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def json(self, *words: str) -> tuple[int, Any]:
        done = self.run(*words, "--json")
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def operator(new_box: Callable[..., Any], tmp_path: Path) -> Operator:
    world = boot(new_box, tmp_path)
    world.install()
    world.box.run(["systemctl", "enable", *appliance_box.units()])
    return Operator(world)


def has_memory_controller(world: World) -> bool:
    return "memory" in world.box.read("/sys/fs/cgroup/cgroup.controllers").split()


def test_a_day_of_an_operator(operator: Operator) -> None:
    world = operator.world
    world.add_release("r1")
    world.use("r1")
    code, status = operator.json("status")
    assert code == 1 and any("launcher is not running" in problem for problem in status["problems"])

    assert operator.run("start", "0").returncode == 0
    world.box.run(["systemctl", "start", "appliance-gateway@stable", "appliance-gateway@canary"])
    code, status = world.wait(lambda: (found := operator.json("status"))[0] == 0 and found)
    assert status["ok"] and status["slots"] == {"stable": "r1", "canary": None}
    (engine,) = status["gpus"][0]["engines"]
    assert engine["state"] == "ready" and engine["in_flight"] == 0
    if has_memory_controller(world):  # what we read in the cgroup is what systemd says of the scope
        shown = world.box.show(engine["scope"], "MemoryMax", "MemoryCurrent")
        assert engine["memory"]["max_bytes"] == int(shown["MemoryMax"]) and engine["memory"]["oom_kills"] == 0
        assert 0.5 < engine["memory"]["bytes"] / int(shown["MemoryCurrent"]) < 2
    else:
        assert engine["memory"] is None and any("memory" in limit for limit in engine["unknown_limits"])
    assert "gpu 0  serving  CPU-0" in operator.run("status").stdout

    done = operator.run("drain", "0", "--reason", "replace fan", "--wait", "--timeout", "60")
    assert (done.returncode, done.stdout) == (0, "gpu 0: drained\n")
    code, status = operator.json("status")
    assert code == 1 and "gpu 0 is held by operator: replace fan" in status["problems"]
    assert "replace fan" in operator.run("list", "--drained").stdout
    assert operator.run("restart", "0").returncode == 0  # a hold outlives it
    assert operator.json("status")[1]["gpus"][0]["state"] == "held"
    assert operator.run("undrain", "0", "--wait").stdout == "gpu 0: back in service\n"
    world.wait(lambda: operator.json("status")[0] == 0)

    assert operator.run("drain", "--all", "--reason", "kernel", "--wait", "--settle", "0.5").returncode == 0
    code, status = operator.json("status")
    assert code == 1 and status["problems"] == ["the host is drained: kernel"]
    assert operator.run("undrain", "--all").returncode == 0
    world.wait(lambda: operator.json("status")[0] == 0)

    assert "serving" in operator.run("list").stdout and operator.run("gpus", "list").returncode == 0
    assert operator.run("config", "check").returncode == 0
    logs = operator.run("logs", "--gpu", "0", "-n", "50").stdout
    assert "launcher_started" in logs and "gateway" not in logs.lower()
    assert operator.run("stop", "0").returncode == 0
    assert operator.json("status")[1]["gpus"][0]["state"] == "down"


def test_doctor_and_bug_report_on_a_real_systemd(operator: Operator) -> None:
    world = operator.world
    world.systemctl("start")  # no release: ready all the same
    code, report = operator.json("doctor")
    found = {(check["check"], check["status"]): check["text"] for check in report["checks"]}
    assert not any("the check itself broke" in text for text in found.values()), found
    assert ("cgroup", "ok" if has_memory_controller(world) else "failed") in found
    assert ("memlock", "ok") in found and ("config", "ok") in found
    assert ("user", "ok") in found and ("ports", "ok") in found and ("python", "ok") in found
    assert found["slots", "failed"] == "slot stable has no release: nothing is served" and code == 1
    assert ("units", "ok") in found

    world.box.run(["systemctl", "start", "appliance-gateway@stable"])
    assert ("ports", "ok") in {(check["check"], check["status"]) for check in operator.json("doctor")[1]["checks"]}
    world.box.run(["systemctl", "stop", "appliance-gateway@stable"])
    squatter = "import socket, time; s = socket.create_server(('127.0.0.1', 8000)); time.sleep(100)"
    world.box.run(["systemd-run", "--unit", "squatter", "/usr/bin/python3", "-c", squatter])
    taken = world.wait(
        lambda: [c["text"] for c in operator.json("doctor")[1]["checks"] if "8000 is taken" in c["text"]]
    )
    assert "taken by python3 (PID " in taken[0]

    code, summary = operator.json("bug-report", "--output", "/tmp/report.tar.gz")
    parts = {part["name"]: part for part in summary["parts"]}
    assert code == 0 and not parts["units.txt"]["error"] and not parts["journal.txt"]["error"]
    assert parts["nvidia-smi.txt"]["error"] == "nvidia-smi is not installed"
    listed = world.box.run(["tar", "tzf", "/tmp/report.tar.gz"]).stdout
    assert "appliance-bug-report/doctor.json" in listed

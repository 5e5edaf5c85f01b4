"""In the box, under a real systemd: nothing of an engine runs outside its scope, and what it may and may not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.appliance.launcher.box_world import UID, World, boot
from tests.host.box import Box

NewBox = Callable[..., Box]

# In the place of the engine's Python: notes what it finds as its first act, then becomes the engine.
PROBE = """#!/usr/bin/python3 -I
import json, os, sys
def opened(path):
    try:
        os.close(os.open(path, os.O_RDWR))
        return "opened"
    except OSError as error:
        return error.strerror
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
found = {
    "cgroup": open("/proc/self/cgroup").read(), "status": {k: v.split() for k, v in status.items()},
    "nvidia7": opened("/dev/nvidia7"), "null": opened("/dev/null"), "env": dict(os.environ), "cwd": os.getcwd(),
    "fds": {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(
        f"/proc/self/fd/{fd}")}, "umask": os.umask(0o77),
}
with open("/var/cache/appliance/nv/new-%d" % os.getpid(), "w") as file:
    json.dump(found, file)
os.rename(file.name, "/var/cache/appliance/nv/found")
python = "/usr/lib/appliance/current/venv/bin/python"
os.environ.pop("PYTHONPATH")
os.execv(python, [python] + sys.argv[1:])
"""


FOUND = "/var/cache/appliance/nv/found"


@pytest.fixture
def world(new_box: NewBox, tmp_path: Path) -> World:
    world = boot(new_box, tmp_path)
    world.install()
    return world


def test_the_first_thing_an_engine_sees_is_its_scope_and_no_privilege(world: World) -> None:
    world.box.write("/opt/probe", PROBE, mode=0o755)
    world.box.run(["mknod", "-m", "666", "/dev/nvidia7", "c", "195", "7"])
    world.add_release("r1", python="/opt/probe")
    world.use("r1")
    world.systemctl("start")

    found = json.loads(world.box.read(FOUND))
    scope = "/appliance.slice/appliance-gpu0.slice/appliance-gpu0-r1.scope"
    assert found["cgroup"].splitlines()[-1] == f"0::{scope}"
    status = found["status"]
    assert status["Uid"] == [str(UID)] * 4 and status["Gid"] == [str(UID)] * 4 and status["Groups"] == []
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name][0], 16) == 0, name
    assert status["NoNewPrivs"] == ["1"]
    # The node is 0666 and no driver is behind it: outside it is ENXIO, inside the filter is asked first.
    outside = world.box.run(["sh", "-c", ": < /dev/nvidia7"], check=False).stderr
    assert "No such device" in outside
    assert found["nvidia7"] == "Operation not permitted"
    assert found["null"] == "opened"
    assert "NOTIFY_SOCKET" not in found["env"] and "INVOCATION_ID" not in found["env"]
    assert found["env"]["PATH"] and found["cwd"] == "/" and found["umask"] == 0o077
    # Standard streams, and the memory that takes its last sentence. The directory that was listed is closed again.
    others = [target for fd, target in found["fds"].items() if fd not in ("0", "1", "2")]
    assert others == ["/memfd:last-words (deleted)"], found["fds"]

    entry = world.engine("r1")
    assert entry["state"] == "ready" and entry["admitted"]
    assert world.box.run(["cat", f"/proc/{entry['pid']}/cgroup"]).stdout.splitlines()[-1] == f"0::{scope}"
    shown = world.box.show("appliance-gpu0-r1.scope", "DevicePolicy", "Slice", "MemoryMax", "TasksMax", "CollectMode")
    assert shown == {
        "DevicePolicy": "closed", "Slice": "appliance-gpu0.slice", "MemoryMax": str(entry["memory_max"]),
        "TasksMax": "1024", "CollectMode": "inactive-or-failed",
    }  # fmt: skip
    # The launcher itself is in its service, not in the scope.
    launcher = world.state()["pid"]
    assert "appliance-gpu@0.service" in world.box.read(f"/proc/{launcher}/cgroup")

    # daemon-reload applies the device rules of all units again (nvidia-container-toolkit#48): nothing may change.
    world.box.run(["systemctl", "daemon-reload"])
    join = f"echo $$ > /sys/fs/cgroup{scope}/cgroup.procs && : < /dev/nvidia7"
    assert "not permitted" in world.box.run(["sh", "-c", join], check=False).stderr
    assert world.engine("r1")["pid"] == entry["pid"] and world.engine("r1")["state"] == "ready"
    if not world.box.controllers >= {"memory", "cpu", "pids"}:
        assert world.engine("r1")["unknown_limits"]  # said, where limits cannot bite
        assert "controller" in world.state()["status"]


def test_rules_that_are_not_as_asked_stop_it_before_it_ran(world: World) -> None:
    world.box.write("/opt/probe", PROBE, mode=0o755)
    world.add_release("r1", python="/opt/probe")
    world.use("r1")
    # A drop-in of the admin for all scopes of this GPU.
    world.box.write("/etc/systemd/system/appliance-gpu0-.scope.d/open.conf", "[Scope]\nDevicePolicy=auto\n")
    world.box.run(["systemctl", "daemon-reload"])
    world.systemctl("start")
    entry = world.engine("r1")
    assert entry["state"] == "failed" and "DevicePolicy" in entry["last_exit"]
    assert not world.box.exists(FOUND)
    assert "r1 failed" in world.box.show("appliance-gpu@0.service", "StatusText")["StatusText"]


def test_names_left_over_by_others(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    # One that lives: of a launcher that was killed together with its clean-up.
    scope = "appliance-gpu0-old.scope"
    sleeper = world.box.popen(
        ["systemd-run", "--scope", f"--unit={scope}", "--slice=appliance-gpu0.slice", "sleep", "1000"]
    )
    world.box.wait_for(scope)
    # One of another slot, which is nobody's business here.
    other = world.box.popen(["systemd-run", "--scope", "--unit=appliance-gpu1-old.scope", "sleep", "1000"])
    world.box.wait_for("appliance-gpu1-old.scope")
    world.systemctl("start")
    assert world.engine("r1")["state"] == "ready"
    assert world.box.show(scope, "ActiveState")["ActiveState"] == "inactive"
    assert world.box.show("appliance-gpu1-old.scope", "ActiveState")["ActiveState"] == "active"
    assert [event["scopes"] for event in world.events("leftovers_stopped")] == [[scope]]

    # One that failed and whose name is still taken, while the launcher runs.
    assert world.ask("hold", owner="operator", reason="x", level="stop", wait=True) == {"ok": True}
    command = ["systemd-run", "--scope", "--unit=appliance-gpu0-r1.scope", "-p", "RuntimeMaxSec=100ms", "sleep", "1000"]
    world.box.run(command, check=False)
    world.box.wait_for("appliance-gpu0-r1.scope", "failed")
    assert world.ask("unhold", owner="operator", wait=True) == {"ok": True}
    assert world.engine("r1")["admitted"]
    for process in (sleeper, other):
        process.kill()
        process.wait()

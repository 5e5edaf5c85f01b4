"""appliance-gpu-reset@ and the sandbox of appliance-watchdog as they are shipped, in a booted systemd."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.healthcheck import fault_box
from tests.host import appliance_box
from tests.host.box import Box
from tests.host.plugin import HOST_SECONDS

pytestmark = [pytest.mark.box, pytest.mark.timeout(HOST_SECONDS)]
UNIT = "appliance-gpu-reset@CPU\\x2d0.service"


@pytest.fixture(scope="module")
def installed(box_root: Path) -> Iterator[Box]:
    with Box(box_root, **appliance_box.boot_options()) as box:
        appliance_box.install(box)
        box.write("/var/lib/appliance/holds/gpu0.json", hold("stop"))
        yield box


@pytest.fixture
def box(installed: Box) -> Box:
    fault_box.install(installed, ["CPU-0"])
    installed.run(["systemctl", "reset-failed"], check=False)
    return installed


def hold(level: str) -> str:
    return json.dumps({"schema": 1, "holds": {"watchdog": {"level": level, "reason": "Xid 48", "since": 1.0}}})


def until(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"not in {seconds} s"
        time.sleep(0.1)
    return value


def start(box: Box, unit: str = UNIT) -> int:
    return box.run(["systemctl", "start", unit], check=False, timeout=120).returncode


def test_a_reset(box: Box) -> None:
    escaped = box.run(["systemd-escape", "--template=appliance-gpu-reset@.service", "CPU-0"]).stdout.strip()
    assert escaped == UNIT
    assert start(box) == 0, box.run(["journalctl", "-u", UNIT, "--no-pager"]).stdout
    assert fault_box.result(box, "CPU-0")["ok"]
    assert fault_box.state(box)["gpus"][0]["resets"] == 1 and fault_box.all_is_back(box)
    assert box.show(UNIT, "Result")["Result"] == "success"


def test_a_name_that_was_not_escaped_works_too(box: Box) -> None:
    """%I turns each - into a /, as for a path; an operator will type it like this."""
    assert start(box, "appliance-gpu-reset@CPU-0.service") == 0
    assert fault_box.state(box)["gpus"][0]["resets"] == 1


def test_killed_in_the_middle_it_is_put_back_by_systemd(box: Box) -> None:
    fault_box.change(box, reset="hang")
    box.run(["systemctl", "start", "--no-block", UNIT])
    until(lambda: any("--gpu-reset" in call for call in fault_box.state(box)["calls"]))
    assert not fault_box.all_is_back(box)
    box.run(["systemctl", "kill", "--kill-who=main", "--signal=KILL", UNIT])
    until(lambda: box.show(UNIT, "ActiveState")["ActiveState"] == "failed")
    assert fault_box.all_is_back(box)
    found = fault_box.result(box, "CPU-0")
    assert not found["ok"] and "interrupted in phase reset" in found["detail"]
    until(lambda: '"unit-failed"' in box.read("/var/lib/appliance/events.jsonl"))
    fault_box.change(box, reset="ok")
    assert start(box) == 0, "a unit that failed can be started again"
    assert fault_box.result(box, "CPU-0")["ok"]


def test_a_slot_that_is_not_held(box: Box) -> None:
    box.write("/var/lib/appliance/holds/gpu0.json", hold("drain"))
    box.run(["mkdir", "-p", "/run/appliance/gpu0"])
    box.write("/run/appliance/gpu0/state.json", "{}")
    try:
        assert start(box) != 0
        assert "neither held nor stopped" in fault_box.result(box, "CPU-0")["detail"]
        assert box.show(UNIT, "ExecMainStatus")["ExecMainStatus"] == "4"
    finally:
        box.run(["rm", "-r", "/run/appliance/gpu0"])
        box.write("/var/lib/appliance/holds/gpu0.json", hold("stop"))


LOOK = """
import json, os, socket, sys
found = {"caps": next(l.split()[1] for l in open("/proc/self/status") if l.startswith("CapBnd"))}
def attempt(name, work):
    try:
        found[name] = work()
    except OSError as error:
        found[name] = error.strerror
pid = sys.argv[1]
attempt("fd", lambda: os.readlink("/proc/%s/fd/0" % pid))
attempt("maps", lambda: len(open("/proc/%s/maps" % pid).read()) > 0)
def connect():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("/run/appliance/gateway/try.sock")
    return True
attempt("socket", connect)
attempt("run", lambda: open("/run/appliance/try", "w").close())
attempt("etc", lambda: open("/etc/try", "w").close())
attempt("kmsg", lambda: os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)))
import ctypes
found["ctypes"] = ctypes.CDLL(None).getpid() == os.getpid()
json.dump(found, open("/var/lib/appliance/look.json", "w"))
"""
OWNER = """
import os, socket, time
sock = socket.socket(socket.AF_UNIX)
sock.bind("/run/appliance/gateway/try.sock")
os.chmod("/run/appliance/gateway/try.sock", 0o660)
sock.listen()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def other_user(installed: Box) -> Iterator[str]:
    """A process of the user `appliance` with a file open and a socket as an engine's."""
    installed.write("/var/lib/appliance/owner.py", OWNER)
    unit = ["--unit=other", "--uid=appliance", "--gid=appliance"]
    installed.run(["systemd-run", *unit, "/usr/bin/python3", "/var/lib/appliance/owner.py"])
    until(lambda: installed.exists("/run/appliance/gateway/try.sock"))
    yield installed.show("other.service", "MainPID")["MainPID"]
    installed.run(["systemctl", "stop", "other.service"])


def look_from(box: Box, unit: str, instance: str, pid: str) -> dict[str, Any]:
    """What a process in the sandbox of that unit may do."""
    box.write("/var/lib/appliance/look.py", LOOK)
    drop_in = f"/etc/systemd/system/{unit}.d/look.conf"
    command = f"{appliance_box.PYTHON} -P /var/lib/appliance/look.py {pid}"
    lines = ["[Service]", "Type=oneshot", "WatchdogSec=0", "Restart=no", "ExecStartPre=", "ExecStopPost=", "ExecStart="]
    box.write(drop_in, "\n".join([*lines, f"ExecStart={command}", ""]))
    box.run(["systemctl", "daemon-reload"])
    try:
        done = box.run(["systemctl", "start", instance], check=False, timeout=60)
        assert done.returncode == 0, box.run(["journalctl", "-u", instance, "--no-pager"]).stdout
        found: dict[str, Any] = json.loads(box.read("/var/lib/appliance/look.json"))
        return found
    finally:
        box.run(["rm", "-r", f"/etc/systemd/system/{unit}.d", "/var/lib/appliance/look.json"], check=False)
        box.run(["systemctl", "daemon-reload"])


def test_the_sandbox_of_a_reset_sees_who_holds_a_gpu(installed: Box, other_user: str) -> None:
    found = look_from(installed, "appliance-gpu-reset@.service", UNIT, other_user)
    assert found["fd"] == "/dev/null" and found["maps"] is True and found["ctypes"] is True
    assert found["etc"] == "Read-only file system"


def test_the_sandbox_of_the_watchdog(installed: Box, other_user: str) -> None:
    """The engines' sockets, its own in /run/appliance; nothing of other processes, nothing in /etc."""
    found = look_from(installed, "appliance-watchdog.service", "appliance-watchdog.service", other_user)
    assert found["socket"] is True and found["run"] is None and found["ctypes"] is True
    assert found["fd"] != "/dev/null" and found["etc"] == "Read-only file system"
    if installed.exists("/dev/kmsg"):
        assert found["kmsg"] is None

"""The units as they are shipped, in a booted systemd: the target, the sandboxes, failures, reloads. Backend cpu."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host import appliance_box
from tests.host.box import Box
from tests.host.plugin import HOST_SECONDS

UNITS = appliance_box.units()
CONFIG = appliance_box.CONFIG.format(slots=1, engine="")
ASK = """
import json, sys, urllib.error, urllib.request
body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}).encode()
headers = {"content-type": "application/json"} | ({"authorization": "Bearer " + sys.argv[1]} if sys.argv[1:] else {})
try:
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, headers)
    answer = urllib.request.urlopen(request, timeout=60)
    print(answer.status, json.load(answer)["usage"]["completion_tokens"])
except urllib.error.HTTPError as error:
    print(error.code, error.read()[:200])
"""
KEY = "sk-" + "0123456789abcdef" * 2

pytestmark = [pytest.mark.box, pytest.mark.timeout(HOST_SECONDS)]


@pytest.fixture(scope="module")
def installed(box_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """What the install does, by hand; one release, the slot pointer; nothing enabled."""
    with Box(box_root, **appliance_box.boot_options()) as box:
        appliance_box.install(box)
        appliance_box.add_release(box, tmp_path_factory.mktemp("release"), "v1")
        appliance_box.use(box, "v1")
        yield box


@pytest.fixture
def appliance(installed: Box) -> Iterator[Box]:
    """Started with `systemctl start appliance.target`, ready."""
    installed.run(["systemctl", "enable", *UNITS])
    installed.run(["systemctl", "start", "appliance.target"], timeout=120)
    yield installed
    appliance_box.stop(installed)
    installed.run(["systemctl", "reset-failed"], check=False)


def ask(box: Box, key: str = "") -> str:
    return box.run(["/usr/bin/python3", "-c", ASK, *([key] if key else [])], timeout=120).stdout.strip()


def engine_pid(box: Box) -> int:
    (engine,) = json.loads(box.read("/run/appliance/gpu0/state.json"))["engines"]
    return int(engine["pid"])


def status_of(box: Box, pid: int) -> dict[str, str]:
    lines = box.read(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def events(box: Box, name: str) -> list[dict[str, Any]]:
    text = box.run(["cat", "/var/lib/appliance/events.jsonl"], check=False).stdout
    return [event for event in map(json.loads, text.splitlines()) if event["event"] == name]


def until(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"not in {seconds} s"
        time.sleep(0.1)
    return value


def test_the_target_starts_all_and_the_endpoint_answers(appliance: Box) -> None:
    for unit in UNITS:
        assert appliance.show(unit, "ActiveState")["ActiveState"] == "active", unit
    assert until(lambda: (answer := ask(appliance)) == "200 4" and answer)
    listed = appliance.run(["systemctl", "list-dependencies", "--plain", "--all", "appliance.target"]).stdout.split()
    assert {*UNITS[1:], "appliance-gpu-nodes.service"} <= set(listed)
    group = appliance.read(f"/proc/{engine_pid(appliance)}/cgroup").splitlines()[-1]
    assert "/appliance.slice/appliance-gpu0.slice/appliance-gpu0-v1.scope" in group
    assert appliance.show("appliance-gpu-nodes.service", "Result")["Result"] == "success"


def test_an_engine_has_the_sandbox_of_the_launchers_unit(appliance: Box) -> None:
    pid = engine_pid(appliance)
    status = status_of(appliance, pid)
    assert status["Uid"].split() == ["870"] * 4 and status["Gid"].split() == ["870"] * 4
    assert status["Groups"] == "" and status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2", "the system call filter"
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}

    def inside(*command: str) -> str:
        return appliance.run(["nsenter", "-t", str(pid), "-m", "-n", *command], check=False).stdout.strip()

    assert (
        os.path.basename(inside("readlink", "/proc/self/ns/net"))
        != appliance.run(["readlink", "/proc/1/ns/net"]).stdout.strip()
    ), "no network"
    options = {
        line.split()[4]: line.split()[5].split(",") for line in inside("cat", "/proc/self/mountinfo").splitlines()
    }
    assert "ro" in options["/"] and "rw" in options["/var/cache/appliance"]
    assert "Max core file size        0 " in appliance.read(f"/proc/{pid}/limits")


def test_stop_leaves_nothing_running(appliance: Box) -> None:
    pid = engine_pid(appliance)
    appliance_box.stop(appliance)
    assert not appliance.exists(f"/proc/{pid}")
    assert not appliance.exists("/run/appliance/gpu0")
    left = appliance.run(["systemctl", "list-units", "--plain", "--no-legend", "appliance-*.scope"]).stdout
    assert left == ""
    assert appliance.show("appliance-gateway@stable.service", "Result")["Result"] == "success"
    assert appliance.exists("/run/appliance/gateway"), "the other gateway may still use it"
    assert appliance.run(["systemctl", "--failed", "--plain", "--no-legend"]).stdout == ""


def test_one_gateway_stops_without_harm_to_the_other(appliance: Box) -> None:
    appliance.run(["systemctl", "stop", "appliance-gateway@canary"], timeout=120)
    assert appliance.exists("/run/appliance/gateway/stable.sock")
    assert until(lambda: ask(appliance) == "200 4")


def test_a_killed_launcher_leaves_no_engine_and_comes_back(appliance: Box) -> None:
    engine, launcher = engine_pid(appliance), appliance.show("appliance-gpu@0.service", "MainPID")["MainPID"]
    appliance.run(["kill", "-KILL", launcher])
    until(lambda: not appliance.exists(f"/proc/{engine}"))
    until(lambda: appliance.show("appliance-gpu@0.service", "MainPID")["MainPID"] not in ("0", launcher))
    appliance.wait_for("appliance-gpu@0.service", "active", timeout=60)
    assert appliance.show("appliance-gpu@0.service", "NRestarts")["NRestarts"] != "0"
    assert until(lambda: ask(appliance) == "200 4")


def test_daemon_reload_harms_no_engine(appliance: Box) -> None:
    before = engine_pid(appliance)
    appliance.run(["systemctl", "daemon-reload"])
    assert until(lambda: ask(appliance) == "200 4")
    assert engine_pid(appliance) == before


def test_reload_takes_new_keys_without_a_restart(appliance: Box) -> None:
    assert until(lambda: ask(appliance) == "200 4"), "no keys on loopback: open"
    before = appliance.show("appliance-gateway@stable.service", "MainPID")
    try:
        hashed = hashlib.sha256(KEY.encode()).hexdigest()
        appliance.write("/etc/appliance/credentials/api-keys", f"{hashed} alice\n", mode=0o600)
        appliance.run(["systemctl", "reload", "appliance-gateway@stable"])
        assert until(lambda: ask(appliance).startswith("401"))
        assert ask(appliance, KEY) == "200 4"
        assert appliance.show("appliance-gateway@stable.service", "MainPID") == before
    finally:
        appliance.run(["rm", "-f", "/etc/appliance/credentials/api-keys"])


@pytest.mark.parametrize("make", [["mkdir"], ["ln", "-s", "/not/mounted"]], ids=["directory", "dangling link"])
def test_keys_that_cannot_be_loaded_never_open_the_endpoint(appliance: Box, make: list[str]) -> None:
    """systemd takes the stand-in for what it cannot load, so the unit is started, and must not be."""
    unit, keys = "appliance-gateway@stable.service", "/etc/appliance/credentials/api-keys"
    before = appliance.show(unit, "MainPID")
    appliance.run([*make, keys])
    try:
        assert appliance.run(["systemctl", "reload", unit], check=False).returncode != 0
        assert appliance.show(unit, "MainPID") == before, "what was in force stays"
        assert appliance.run(["systemctl", "restart", unit], check=False, timeout=120).returncode != 0
        assert appliance.show(unit, "MainPID") == {"MainPID": "0"}
        assert f"{keys} cannot be loaded" in appliance.journal(unit)
        appliance.run(["rm", "-rf", keys])
        hashed = hashlib.sha256(KEY.encode()).hexdigest()
        appliance.write(keys, f"{hashed} alice\n", mode=0o600)
        assert until(lambda: appliance.show(unit, "ActiveState") == {"ActiveState": "active"}), "it is tried again"
        assert until(lambda: ask(appliance).startswith("401")) and ask(appliance, KEY) == "200 4"
    finally:
        appliance.run(["rm", "-rf", keys])


def test_what_a_restart_does_not_mend_is_not_tried_again(appliance: Box) -> None:
    appliance.write("/etc/appliance/appliance.toml", CONFIG.replace("cpu", "tpu"))
    try:
        appliance.run(["systemctl", "restart", "appliance-gpu@0"], check=False, timeout=120)
        shown = appliance.show("appliance-gpu@0.service", "ActiveState", "NRestarts", "ExecMainStatus")
        assert shown == {"ActiveState": "failed", "NRestarts": "0", "ExecMainStatus": "4"}
        (event,) = until(
            lambda: [e for e in events(appliance, "unit-failed") if e["unit"] == "appliance-gpu@0.service"]
        )
        assert event["exit_status"] == "4" and "appliance config check" in event["cause"]
    finally:
        appliance.write("/etc/appliance/appliance.toml", CONFIG)


def test_no_driver_is_said_and_recorded(appliance: Box) -> None:
    """Where no driver is loaded, the nodes' unit fails with the fix, and nothing falls back to the CPU."""
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    appliance.write("/etc/appliance/appliance.toml", CONFIG.replace('"cpu"', '"cuda"'))
    try:
        appliance.run(["systemctl", "start", "appliance-gpu-nodes"], check=False, timeout=120)
        assert appliance.show("appliance-gpu-nodes.service", "ActiveState")["ActiveState"] == "failed"
        assert "the NVIDIA driver is not loaded" in appliance.journal("appliance-gpu-nodes.service")
        until(lambda: [e for e in events(appliance, "unit-failed") if e["unit"] == "appliance-gpu-nodes.service"])
    finally:
        appliance.write("/etc/appliance/appliance.toml", CONFIG)


FAKE_MODPROBE = """#!/bin/sh
# nvidia-modprobe's own rules: -u makes the nodes of nvidia-uvm only; a node with a wrong number is replaced.
node() { rm -f "$1"; mknod -m 666 "$1" c "$2" "$3"; }
case "$*" in
    "-u -c 0") node /dev/nvidia-uvm 511 0 ;;
    "-c 255 -c 0") node /dev/nvidiactl 195 255; node /dev/nvidia0 195 0 ;;
    *) exit 1 ;;
esac
"""
FAKE_PROC = """
mkdir -p /opt/driver/nvidia/gpus/0000:1b:00.0
printf 'ModifyDeviceFiles: 1\n' > /opt/driver/nvidia/params
printf 'GPU UUID: GPU-11111111-2222\nDevice Minor: 0\n' > /opt/driver/nvidia/gpus/0000:1b:00.0/information
printf 'Character devices:\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n\nBlock devices:\n' > /opt/devices
"""


def test_nodes_are_made_in_the_sandbox_and_launchers_look_again(appliance: Box) -> None:
    """As after a reload of the driver: nvidia-uvm has another major than the node that is left."""
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    if appliance.run(["mknod", "/dev/nvidia-uvm", "c", "508", "0"], check=False).returncode:
        pytest.skip("this machine lets nobody make device nodes")
    appliance.write("/usr/bin/nvidia-modprobe", FAKE_MODPROBE, mode=0o755)
    # The unit gets a fresh /proc from systemd, so the stand-in is mounted by the unit.
    drop_in = "/etc/systemd/system/appliance-gpu-nodes.service.d/test.conf"
    appliance.write(drop_in, "[Service]\nBindReadOnlyPaths=/opt/driver:/proc/driver /opt/devices:/proc/devices\n")
    appliance.run(["sh", "-euc", FAKE_PROC])
    appliance.write("/etc/appliance/appliance.toml", CONFIG.replace('"cpu"', '"cuda"'))
    try:
        appliance.run(["systemctl", "daemon-reload"])
        before = engine_pid(appliance)
        appliance.run(["systemctl", "start", "appliance-gpu-nodes"], timeout=120)
        nodes = appliance.run(
            ["stat", "-c", "%n %t:%T %a %F", "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"]
        ).stdout
        assert nodes.splitlines() == [
            "/dev/nvidia0 c3:0 666 character special file",
            "/dev/nvidiactl c3:ff 666 character special file",
            "/dev/nvidia-uvm 1ff:0 666 character special file",
        ]
        until(lambda: "Reloading appliance-gpu@0.service" in appliance.journal("appliance-gpu@0.service"))
        again = appliance.run(["systemctl", "start", "appliance-gpu-nodes"], timeout=120)
        assert again.returncode == 0
        assert appliance.journal("appliance-gpu@0.service").count("Reloading appliance-gpu@0.service") == 1
        assert engine_pid(appliance) == before, "what runs is left alone"
    finally:
        appliance.run(
            ["rm", "-rf", drop_in, "/usr/bin/nvidia-modprobe", "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"]
        )
        appliance.run(["systemctl", "daemon-reload"])
        appliance.write("/etc/appliance/appliance.toml", CONFIG)


def test_what_the_engines_user_owns(installed: Box) -> None:
    owned = installed.run(
        ["find", "/etc/appliance", "/var/lib/appliance", "/var/cache/appliance", "-user", "appliance", "-maxdepth", "1"]
    ).stdout.split()
    assert owned == ["/var/cache/appliance/nv"]

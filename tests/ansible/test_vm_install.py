"""The issue's way from a bare machine and back to it, in the qemu machine: its own kernel, every cgroup controller.

install -> a completion through :8000 -> the second run changes nothing -> engine killed in mid-stream -> a memory hog
in a scope -> a launcher restarted under load -> daemon-reload under load -> upgrade and rollback -> reboot and power
cut -> uninstall. CPU backend and a tiny model: qemu emulates here, everything is some twenty times slower than real.
Each test goes on where the one before it stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.ansible import hosts
from tests.ansible.conftest import build_bundle
from tests.ansible.hosts import Controller, Play
from tests.ansible.traffic import Endpoint, Traffic
from tests.host.vm import Machine
from tests.host.vm_image import Image
from tests.tiny import make_tiny_model

WANTED = bool(os.environ.get("CI")) or os.environ.get("APPLIANCE_FULL") == "1"
pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.xdist_group("vm"),
    pytest.mark.skipif(not WANTED, reason="twenty minutes; in CI (CI=true) or with APPLIANCE_FULL=1"),
]
KEY = "sk-of-the-test-machine-0123456789"
PLAY_SECONDS = 1500
MEMORY_MAX = 700 << 20
PROMPTS = {f"request {number}": 24 + 8 * number for number in range(4)}
SCOPE = "/sys/fs/cgroup/appliance.slice/appliance-gpu{0}.slice/appliance-gpu{0}-{1}.scope"


@dataclass
class Host:
    vm: Machine
    controller: Controller
    bundles: dict[str, Path]
    endpoint: Endpoint
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    packages_before: str = ""

    def play(self, playbook: str, *options: str, **variables: Any) -> Play:
        started = time.monotonic()
        play = self.controller.play(playbook, *options, timeout=PLAY_SECONDS, **variables)
        print(f"{playbook} {' '.join(options)}: {time.monotonic() - started:.0f} s, {play.changed} changed")
        return play

    def traffic(self) -> Traffic:
        return Traffic(self.endpoint, self.texts)

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.vm.run("appliance status --json", check=False).stdout)
        return value

    def engine(self, gpu: int) -> dict[str, Any]:
        (engine,) = self.status()["gpus"][gpu]["engines"]
        return dict(engine)

    def wait_ok(self, timeout: float = 400.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while not (state := self.status())["ok"]:
            assert time.monotonic() < deadline, state["problems"]
            time.sleep(2)
        return state

    def listing(self) -> dict[str, str]:
        return hosts.listing(self.vm.run(f"find / -xdev -printf '{hosts.LISTING}'", timeout=600).stdout)

    def packages(self) -> str:
        return self.vm.run("dpkg-query -W -f '${Package} ${db:Status-Abbrev}\\n'").stdout

    def units(self) -> str:
        return self.vm.run("systemctl list-units --all --plain --no-legend 'appliance*'", check=False).stdout


@pytest.fixture(scope="module")
def host(ansible_bin: Path, bundle: Path, vm_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    directory = tmp_path_factory.mktemp("controller")
    new = build_bundle(tmp_path_factory.mktemp("new") / "dist", "--version", "9.0.0+test")
    model = make_tiny_model(directory / "tiny")
    with Machine(vm_image, memory=3072) as vm:
        machine = json.loads(vm.write_inventory(directory / "machine.json", user="admin").read_text())
        inventory = hosts.inventory(directory / "inventory.json", machine["gpu_hosts"]["hosts"])
        engine = {"memory_max": f"{MEMORY_MAX >> 20}M", "drain_timeout": 120, "arguments": ["--kv-tokens", "8192"]}
        variables = {
            "appliance_bundle": str(bundle),
            "appliance_config": {
                "gpus": {"backend": "cpu", "cpu_slots": 2}, "engine": engine,
                "gateway": {"host": "0.0.0.0", "wait_timeout": 240},
            },
            "appliance_api_keys": [{"label": "tests", "key": KEY}],
            "appliance_model": {"name": "tiny", "src": str(model)},
            "appliance_release": {"name": "v1"},
            "appliance_ready_timeout": 400,
        }  # fmt: skip
        controller = Controller(ansible_bin, directory, inventory, variables)
        yield Host(vm, controller, {"old": bundle, "new": new}, Endpoint(vm.port(8000), KEY))


def good(play: Play) -> Play:
    assert play.status == 0 and play.failed == 0, play.output[-6000:]
    return play


def test_install_on_a_bare_machine_answers_on_port_8000(host: Host) -> None:
    assert host.vm.run("python3 -c 'import gi'", check=False).returncode != 0, "the bundle has something to bring"
    host.before, host.packages_before = host.listing(), host.packages()
    good(host.play("install"))
    for prompt, tokens in PROMPTS.items():
        host.texts[prompt] = tokens, host.endpoint.complete(prompt, tokens)
    assert host.endpoint.complete("request 0", PROMPTS["request 0"], stream=True) == host.texts["request 0"][1]
    assert host.status()["ok"]


def test_the_second_run_changes_nothing(host: Host) -> None:
    assert good(host.play("install")).changed == 0
    assert good(host.play("install", "--check")).changed == 0


def test_limits_are_the_kernels(host: Host) -> None:
    for gpu in (0, 1):
        scope = SCOPE.format(gpu, "v1")
        assert host.vm.run(f"cat {scope}/memory.max").stdout.strip() == str(MEMORY_MAX)
        assert host.vm.run(f"cat {scope}/pids.max").stdout.strip() == "1024"
        uid = host.vm.run(f"stat -c %u /proc/{host.engine(gpu)['pid']}").stdout.strip()
        assert uid == host.vm.run("id -u appliance").stdout.strip() != "0"


def test_an_engine_killed_in_mid_stream_costs_no_answer(host: Host) -> None:
    before = host.engine(0)
    with host.traffic() as traffic:
        traffic.wait(4)
        host.vm.run(f"kill -KILL {before['pid']}")
        traffic.wait(8)
    host.wait_ok()
    after = host.engine(0)
    assert after["restarts"] == before["restarts"] + 1 and after["pid"] != before["pid"]
    assert host.engine(1)["restarts"] == 0
    print(f"{traffic.done} requests, the longest {traffic.longest:.1f} s")


def test_a_memory_hog_in_a_scope_dies_alone(host: Host) -> None:
    others = host.engine(1)["pid"], host.vm.run("systemctl show -P MainPID appliance-gateway@stable").stdout
    scope = SCOPE.format(0, "v1")
    slice_events = f"grep -w oom_kill {scope.rpartition('/')[0]}/memory.events"  # the scope ends, and its count with it
    before = int(host.vm.run(slice_events).stdout.split()[1])
    hog = f"sh -c 'echo $$ > {scope}/cgroup.procs; exec python3 -c \"x = bytearray(2 << 30)\"'"
    with host.traffic() as traffic:
        traffic.wait(2)
        done = host.vm.run(hog, check=False, timeout=300)
        assert done.returncode == 137, done
        traffic.wait(4)
    assert int(host.vm.run(slice_events).stdout.split()[1]) > before
    host.wait_ok()
    assert "MemoryMax" in host.engine(0)["last_exit"]
    assert (host.engine(1)["pid"], host.vm.run("systemctl show -P MainPID appliance-gateway@stable").stdout) == others


def test_a_launcher_restarted_under_load_loses_no_request(host: Host) -> None:
    with host.traffic() as traffic:
        traffic.wait(2)
        host.vm.run("systemctl restart appliance-gpu@0", timeout=400)
        traffic.wait(6)
    host.wait_ok()


def test_daemon_reload_under_load_is_harmless(host: Host) -> None:
    pids = [host.engine(gpu)["pid"] for gpu in (0, 1)]
    with host.traffic() as traffic:
        for _ in range(3):
            host.vm.run("systemctl daemon-reload", timeout=300)
            traffic.wait(2)
    assert [host.engine(gpu)["pid"] for gpu in (0, 1)] == pids
    assert host.vm.run(f"cat {SCOPE.format(0, 'v1')}/memory.max").stdout.strip() == str(MEMORY_MAX)


def test_upgrade_to_a_second_release_and_back_under_load(host: Host) -> None:
    host.controller.variables.update(appliance_bundle=str(host.bundles["new"]), appliance_release={"name": "v2"})
    good(host.play("upgrade"))
    state = host.wait_ok()
    assert state["slots"]["stable"] == "v2" and state["version"] == "9.0.0+test" and state["host"]["drain"] is None
    with host.traffic() as traffic:
        traffic.wait(2)
        host.vm.run("appliance release use v1", timeout=900)
        traffic.wait(4)
    state = host.wait_ok()
    assert state["slots"]["stable"] == "v1"
    assert {engine["engine_version"] for gpu in state["gpus"] for engine in gpu["engines"]} != {"9.0.0+test"}


def test_after_a_reboot_and_a_power_cut_all_is_back(host: Host) -> None:
    for cut in (False, True):
        if cut:
            host.vm.kill()
            host.vm.boot()
        else:
            host.vm.reboot()
        state = host.wait_ok()
        assert state["slots"]["stable"] == "v1"
        for prompt, (tokens, text) in host.texts.items():
            assert host.endpoint.complete(prompt, tokens, stream=True) == text


def test_uninstall_leaves_nothing(host: Host) -> None:
    good(host.play("uninstall"))
    assert host.units() == ""
    left = hosts.boiled_down(host.before, host.listing())
    assert not [line for line in left if not line.startswith(("+ /etc/appliance", "+ /srv/appliance"))], left
    assert host.packages() == host.packages_before
    assert host.vm.run("getent passwd appliance", check=False).returncode != 0
    good(host.play("uninstall", appliance_purge=True))
    assert not hosts.boiled_down(host.before, host.listing())

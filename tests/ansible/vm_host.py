"""The qemu machine as a host of the appliance: playbooks from this machine, the endpoint through a forwarded port."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ansible import hosts
from tests.ansible.hosts import Controller, Play
from tests.ansible.traffic import Endpoint, Traffic
from tests.host.vm import Machine
from tests.host.vm_image import Image

KEY = "sk-of-the-test-machine-0123456789"
PLAY_SECONDS = 1500
MEMORY_MAX = 700 << 20


@dataclass
class Host:
    vm: Machine
    controller: Controller
    endpoint: Endpoint
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    packages_before: str = ""

    def play(self, playbook: str, *options: str, **variables: Any) -> Play:
        started = time.monotonic()
        play = self.controller.play(playbook, *options, timeout=PLAY_SECONDS, **variables)
        print(f"{playbook} {' '.join(options)}: {time.monotonic() - started:.0f} s, {play.changed} changed")
        return play

    def traffic(self, clients: int = 4) -> Traffic:
        endpoints = [Endpoint(self.vm.port(8000, number), KEY) for number in range(clients)]
        return Traffic(endpoints, self.texts)

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

    def way(self, gpu: int) -> list[str]:
        """The states that the watchdog had this GPU go through."""
        events = json.loads(self.vm.run("healthcheck history --json").stdout)["events"]
        return [e["after"] for e in events if e["event"] == "watchdog_transition" and e["gpu"] == gpu]

    def listing(self) -> dict[str, str]:
        return hosts.listing(self.vm.run(f"find / -xdev -printf '{hosts.LISTING}'", timeout=600).stdout)

    def packages(self) -> str:
        return self.vm.run("dpkg-query -W -f '${Package} ${db:Status-Abbrev}\\n'").stdout

    def units(self) -> str:
        return self.vm.run("systemctl list-units --all --plain --no-legend 'appliance*'", check=False).stdout


@contextmanager
def bare_host(ansible_bin: Path, image: Image, directory: Path, bundle: Path, model: Path) -> Iterator[Host]:
    """Nothing is installed yet. `directory`: of the controller."""
    with Machine(image, memory=3072) as vm:
        machine = json.loads(vm.write_inventory(directory / "machine.json", user="admin").read_text())
        inventory = hosts.inventory(directory / "inventory.json", machine["gpu_hosts"]["hosts"])
        engine = {"memory_max": f"{MEMORY_MAX >> 20}M", "drain_timeout": 120, "arguments": ["--kv-tokens", "8192"]}
        variables = {
            "appliance_bundle": str(bundle),
            "appliance_config": {
                "gpus": {"backend": "cpu", "cpu_slots": 2}, "engine": engine,
                "gateway": {"host": "0.0.0.0", "canary_host": "0.0.0.0", "wait_timeout": 240},
            },
            "appliance_api_keys": [{"label": "tests", "key": KEY}],
            "appliance_model": {"name": "tiny", "src": str(model)},
            "appliance_release": {"name": "v1"},
            "appliance_ready_timeout": 400,
        }  # fmt: skip
        controller = Controller(ansible_bin, directory, inventory, variables)
        yield Host(vm, controller, Endpoint(vm.port(8000), KEY))


def good(play: Play) -> Play:
    assert play.status == 0 and play.failed == 0, play.output[-6000:]
    return play

"""Everything real but the engines and systemd, in a network namespace: gateways, netfilter, samples, judge, controller,
command. Clients open new connections to :8000 all the time; a good release is promoted, an erroring one and a slow one
are rolled back by what the gateways counted, and no client sees anything but the errors of the bad engine itself."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.admin_http import AdminError, get_json
from appliance.paths import Paths
from appliance.slots import pointer
from canary.netfilter.apply import Netfilter
from canary.seams import Parts
from canary.wiring import real_parts
from engine.spawn import python_env, python_module
from tests.canary.netns import Namespace, require_netns
from tests.canary.processes import ControllerProcess
from tests.canary.test_life import wait_for
from tests.canary.world import World

pytestmark = pytest.mark.netns
POLICY = {
    "steps": [20, 50], "step_seconds": 2.0, "interval": 0.3, "warmup_seconds": 0, "settle_seconds": 0.5, "cooldown": 0,
    "progress_deadline": 60.0, "error_rate": 0.1, "min_requests": 30, "min_connections": 20, "ttft_not_worse": False,
    "limits": [{"metric": "request", "seconds": 0.5, "share": 0.1}],
}  # fmt: skip
CONFIG = "[gateway]\nmetrics_buckets_seconds = [0.5]\n"
LOAD = """
import http.client, json, sys, threading, time
counts, lock, stop = {}, threading.Lock(), threading.Event()
def client():
    while not stop.is_set():
        try:
            connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=20)
            connection.request("POST", "/v1/completions", '{"prompt": "x"}', {"Content-Type": "application/json"})
            answer = connection.getresponse()
            body = answer.read()
            key = json.loads(body)["choices"][0]["text"] if answer.status == 200 else f"status {answer.status}"
            connection.close()
        except Exception as error:
            key = f"{type(error).__name__}: {error}"
        with lock:
            counts[key] = counts.get(key, 0) + 1
        time.sleep(0.01)
threads = [threading.Thread(target=client) for _ in range(6)]
[t.start() for t in threads]; sys.stdin.read(); stop.set(); [t.join() for t in threads]
print(json.dumps(counts))
"""


class Whole:
    def __init__(self, root: Path, namespace: Namespace) -> None:
        self.namespace = namespace
        self.world = World(root, gpus=2, config=CONFIG)
        for gateway in self.world.gateways.values():
            gateway.close()
        self.world.gateways.clear()
        env = python_env() | {"APPLIANCE_ROOT": str(root)}
        self.log = (root / "gateways.log").open("wb")
        self.processes = [
            subprocess.Popen(
                namespace.argv([*python_module("appliance.gateway"), "--slot", slot]), env=env, stderr=self.log
            )
            for slot in ("stable", "canary")
        ]

        deadline = time.monotonic() + 30
        while not self._serves():
            assert time.monotonic() < deadline, (root / "gateways.log").read_text()[-2000:]
            time.sleep(0.05)

    def _serves(self) -> bool:
        try:
            states = [get_json(self.world.paths.gateway_socket(slot), "/state") for slot in ("stable", "canary")]
        except AdminError:
            return False
        return states[0]["serving"] == "v1"

    def rules(self) -> Netfilter:
        lock = self.world.paths.run / "netfilter"
        return Netfilter(self.namespace.runner, lock=lock, proc=self.namespace.proc)

    def parts(self, paths: Paths) -> Parts:
        """In the controller's process, which goes into the namespace: exactly what a host's controller gets."""
        with open(self.namespace.proc / "ns/net") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        return real_parts(paths)

    def load(self) -> subprocess.Popen[str]:
        """Clients until stdin ends; then it prints how often each answer came."""
        argv = self.namespace.argv([sys.executable, "-c", LOAD])
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(20)
        self.world.close()


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    require_netns()
    namespace = Namespace()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
        made = Whole(Path(root), namespace)
        made.rules().up()
        yield made
        made.close()
        namespace.close()


@pytest.mark.parametrize("release", ["good", "erroring", "slow"])
def test_a_run_is_judged_by_what_gateways_counted(whole: Whole, release: str) -> None:
    world = whole.world
    world.reset()
    for gpu in range(world.gpus):
        slow = {"v2": "0.7"} if release == "slow" else {}
        world.fleet.script(gpu, broken=["v2"] if release == "erroring" else [], slow=slow)
    load = whole.load()
    with ControllerProcess(world.paths, parts=whole.parts) as controller:
        document: dict[str, Any] = controller.call("start", release="v2", policy=POLICY)
        assert document["run"]["phase"] == "starting"
        run = controller.run_to_end()
    assert run is not None
    counts = json.loads(load.communicate(timeout=60)[0])
    print(release, run["phase"], run["reason"], counts)
    odd = {key: count for key, count in counts.items() if key not in ("v1", "v2", "status 500")}
    assert not odd, odd  # no connection was reset or refused by us
    if release == "good":
        assert run["phase"] == "settled" and pointer(world.paths, "stable") == "v2" and "status 500" not in counts
        assert [result["outcome"] for result in run["results"]] == ["pass", "pass"]
    else:
        assert run["phase"] == "failed" and pointer(world.paths, "stable") == "v1"
        assert ("errors" if release == "erroring" else "request >= 500 ms") in run["reason"]
    assert whole.rules().read().weight == 0


def test_a_gateway_that_is_killed_trips_within_two_seconds(whole: Whole) -> None:
    """Without statistics; then only stable gets connections."""
    world = whole.world
    world.reset()
    for gpu in range(world.gpus):
        world.fleet.script(gpu, broken=[], slow={})
    with ControllerProcess(world.paths, parts=whole.parts) as controller:
        controller.call("start", release="v2", policy=POLICY | {"step_seconds": 60.0})
        rules = whole.rules()
        wait_for(world, lambda run: run.stage == "observe" and rules.read().weight == 20)
        whole.processes[1].kill()
        began = time.monotonic()
        wait_for(world, lambda run: run.phase != "step")
        took = time.monotonic() - began
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "failed" and "not alive" in run["reason"]
    print(f"killed gateway: seen after {took:.2f} s")

"""A host with a watchdog: real launchers and real engines on the CPU (or stand-ins of both), a release with golden
answers, and the watchdog as a process of its own. Only systemd is replaced: tests/healthcheck/systemctl resets.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from appliance.cli import main
from appliance.control import ControlClient, WatchdogClient
from appliance.events import read_events
from appliance.gpus import bind_slots
from appliance.models import ModelStore
from appliance.paths import Paths
from engine.spawn import python_env
from healthcheck.script_edit import healthy_script, write_script
from tests.tiny import make_tiny_model

FULL = bool(os.environ.get("APPLIANCE_FULL"))
HERE = Path(__file__).parent
LAUNCHER = HERE.parent / "appliance/launcher_process.py"
LIGHT = ("--argument=--kv-tokens=4096", "--argument=--threads=1")
CONFIG = """
schema = 1
[gpus]
backend = "cpu"
cpu_slots = {gpus}
[engine]
drain_timeout = 2
arguments = ["--allow-fault-injection"]
"""
# Times of the state machine, short: what they are is the policy's own test.
POLICY = """
schema = 1
[decide]
partner_wait = 0.2
peers_timeout = 20.0
recheck_timeout = 5.0
[attempts]
retry_delay = 0.2
[limits]
probe_deadline = 1.5
[timeouts]
drain = 5.0
stop = 20.0
reset = 20.0
start = 60.0
warmup = 60.0
verify = 60.0
probation = 0.6
mute_after_reset = 0.5
reissue = 3.0
"""


def systemctl_stand_in(root: Path) -> Path:
    """The directory that has it, for PATH: appliance/command.py hands on that and little else."""
    (root / "bin").mkdir()
    stand_in = root / "bin/systemctl"
    where = f"APPLIANCE_ROOT={root} PYTHONPATH={HERE.parents[1]}"
    stand_in.write_text(f'#!/bin/sh\n{where} exec {sys.executable} {HERE}/systemctl "$@"\n')
    stand_in.chmod(0o755)
    return root / "bin"


class World:
    def __init__(self, root: Path, gpus: int) -> None:
        self.root, self.paths, self.gpus = root, Paths.under(root), gpus
        self.children: list[subprocess.Popen[bytes]] = []
        self.script = root / "nvml.json"
        self.watchdog: subprocess.Popen[bytes] | None = None
        self.arguments = ["--user", "nobody", "--test", "--interval", "2", "--heartbeat", "0.5"]
        for directory in (self.paths.etc, self.paths.state / "slots", self.paths.run):
            directory.mkdir(parents=True)
        self.paths.config.write_text(CONFIG.format(gpus=gpus))
        self.paths.healthcheck_config.write_text(POLICY)
        systemctl_stand_in(root)
        bind_slots(self.paths.gpus, [f"CPU-{number}" for number in range(gpus)])

    # -- launchers and releases
    def launch(self) -> None:
        for gpu in range(self.gpus):
            self.children.append(
                subprocess.Popen(
                    [sys.executable, str(LAUNCHER), str(self.root), str(gpu)], env=python_env(),
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )
            )  # fmt: skip
        self.until(lambda: all(self.paths.launcher_state(gpu).exists() for gpu in range(self.gpus)))

    def release(self, name: str = "v1", *, golden: str = "auto") -> None:
        """A release of the tiny model that all GPUs serve."""
        store = ModelStore(self.paths.models)
        if not any(self.paths.models.glob("tiny")):
            store.add(make_tiny_model(self.root / "source"), "tiny")
        assert main(["release", "add", name, "--model", "tiny", "--golden", golden, "-q", *LIGHT]) == 0
        assert main(["release", "use", name, "--wait", "-q"]) == 0

    def launcher(self, gpu: int) -> dict[str, Any]:
        return json.loads(self.paths.launcher_state(gpu).read_text())  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def with_nvml(self) -> Iterator[None]:
        """Meanwhile a script plays NVML, with healthy GPUs."""
        write_script(self.script, healthy_script([f"CPU-{number}" for number in range(self.gpus)]))
        before = list(self.arguments)
        self.arguments += ["--scripted-nvml", str(self.script), "--interval", "0.5", "--kmsg", str(self.root / "none")]
        yield
        self.arguments = before
        self.script.unlink()

    # -- the watchdog
    def start(self, *arguments: str) -> None:
        env = python_env() | {"APPLIANCE_ROOT": str(self.root), "PATH": f"{self.root}/bin:{os.environ['PATH']}"}
        log = (self.root / "watchdog.log").open("ab")
        self.watchdog = subprocess.Popen(
            [sys.executable, "-P", "-m", "healthcheck", *self.arguments, *arguments], env=env, stdout=log, stderr=log
        )
        log.close()
        self.until(self._answers)

    def _answers(self) -> bool:
        assert self.watchdog is not None and self.watchdog.poll() is None, self.log()
        try:
            self.document()
        except Exception:
            return False
        return True

    def kill(self) -> None:
        """As SIGKILL at any moment; its children (errands) go on."""
        assert self.watchdog is not None
        self.watchdog.kill()
        self.watchdog.wait()

    def stop(self) -> int:
        assert self.watchdog is not None
        self.watchdog.send_signal(signal.SIGTERM)
        return self.watchdog.wait(20)

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        return WatchdogClient(self.paths).call(op, timeout=30, **args)

    def document(self) -> dict[str, Any]:
        return self.ask("status")["state"]  # type: ignore[no-any-return]

    def gpu(self, gpu: int = 0) -> dict[str, Any]:
        return self.document()["gpus"][gpu]  # type: ignore[no-any-return]

    def inject(self, key: str, gpu: int = 0, detail: str = "test") -> None:
        self.ask("inject", gpu=gpu, key=key, detail=detail)

    def resets_say(self, **says: Any) -> None:
        (self.root / "reset.json").write_text(json.dumps(says))

    def resets(self) -> list[str]:
        file = self.root / "resets.log"
        return [line.split()[1] for line in file.read_text().splitlines()] if file.exists() else []

    # -- what happened
    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        found = [event for event in read_events(self.paths.events) if event["event"] == name]
        return [event for event in found if fields.items() <= event.items()]

    def way(self, gpu: int = 0) -> list[str]:
        """The states it went through."""
        return [str(event["after"]) for event in self.events("watchdog_transition", gpu=gpu)]

    def log(self) -> str:
        file = self.root / "watchdog.log"
        return file.read_text(errors="replace")[-6000:] if file.exists() else ""

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def reach(self, state: str, gpu: int = 0, seconds: float = 60.0) -> dict[str, Any]:
        self.until(lambda: self.gpu(gpu)["state"] == state, seconds)
        return self.gpu(gpu)

    def hold(self, gpu: int = 0) -> dict[str, Any] | None:
        holds = ControlClient(self.paths, gpu).call("status")["state"]["holds"]
        return holds.get("watchdog")  # type: ignore[no-any-return]

    def close(self) -> None:
        if self.watchdog is not None and self.watchdog.poll() is None:
            self.watchdog.kill()
            self.watchdog.wait()
        for child in self.children:
            child.terminate()
        for child in self.children:
            child.wait(60)


@contextlib.contextmanager
def world(gpus: int = 2) -> Iterator[World]:
    """In memory where there is such a place; $APPLIANCE_ROOT is set meanwhile."""
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    before = os.environ.get("APPLIANCE_ROOT")
    with tempfile.TemporaryDirectory(prefix="wd", dir=shm) as directory:
        os.environ["APPLIANCE_ROOT"] = directory
        one = World(Path(directory), gpus)
        try:
            yield one
        finally:
            one.close()
            if before is None:
                del os.environ["APPLIANCE_ROOT"]
            else:
                os.environ["APPLIANCE_ROOT"] = before


def fresh(one: World) -> Iterator[World]:
    """For the next test: a ledger that is all HEALTHY, no events, resets that work; afterwards no watchdog."""
    ledger = json.loads(one.paths.gpus.read_text())
    ledger.pop("watchdog", None)
    ledger["gpus"] = [{"slot": gpu["slot"], "uuid": gpu["uuid"]} for gpu in ledger["gpus"]]
    one.paths.gpus.write_text(json.dumps(ledger))
    for file in (one.paths.events, one.paths.watchdog_memory, one.root / "resets.log", one.root / "watchdog.log"):
        file.unlink(missing_ok=True)
    one.resets_say()
    for gpu in range(one.gpus):  # else the watchdog finds them held and asks why
        ControlClient(one.paths, gpu).call("unhold", owner="watchdog", wait=False)
    yield one
    if one.watchdog is not None and one.watchdog.poll() is None:
        one.kill()
    one.watchdog = None

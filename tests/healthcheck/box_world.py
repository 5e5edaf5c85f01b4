"""The whole host in the box: shipped units of launchers, gateways, watchdog and reset, two CPU engines with golden
answers; a script plays NVML and our stand-in plays nvidia-smi, whose reset also clears the script's fault.

Files and sockets of the box are used from out here through /proc/PID/root: a look costs no process in the box.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from appliance.control import ControlClient, ControlError, WatchdogClient
from appliance.engine_calls import EngineCalls
from appliance.events import read_events
from appliance.paths import Paths
from appliance.unix_http import UnixConnection
from healthcheck.script_edit import healthy_script, write_script
from tests.healthcheck import fault_box
from tests.host import appliance_box
from tests.host.appliance_box import PYTHON
from tests.host.box import Box
from tests.tiny import make_tiny_model

URL = "http://127.0.0.1:8000"
GPUS = 2
UUIDS = [f"CPU-{slot}" for slot in range(GPUS)]
WATCHDOG = "appliance-watchdog.service"
UNITS = (WATCHDOG, "appliance-gateway@stable.service", *(f"appliance-gpu@{slot}.service" for slot in range(GPUS)))
SCRIPT = "/var/lib/appliance/nvml.json"
BOOT_ID = "/var/lib/appliance/boot_id"  # what the watchdog takes for the kernel's: a box cannot have its own
REPAIR = ["SUSPECT", "STOPPING", "RESETTING", "WARMUP", "VERIFY", "PROBATION", "HEALTHY"]
CONFIG = """
schema = 1
[gpus]
backend = "cpu"
cpu_slots = 2
[engine]
max_model_len = 512
drain_timeout = 5
arguments = ["--threads", "1", "--kv-tokens", "16384", "--allow-fault-injection"]
"""
# Times of the state machine, short: what they are is the policy's own test.
POLICY = """
schema = 1
[decide]
partner_wait = 0.5
peers_timeout = 20.0
recheck_timeout = 5.0
[attempts]
retry_delay = 0.2
[deferred]
quiet = 0.5
[limits]
probe_interval = 0.5
heartbeat_interval = 0.5
golden_interval = 3.0
probe_deadline = 1.5
[timeouts]
probation = 0.6
mute_after_reset = 0.5
reissue = 3.0
"""
BOOT = f"[Service]\nBindReadOnlyPaths={BOOT_ID}:/proc/sys/kernel/random/boot_id\n"
DROP_IN = f"""
[Unit]
StartLimitIntervalSec=0
[Service]
RestartSec=0.1
WatchdogSec=3
ExecStart=
ExecStart={PYTHON} -P -m healthcheck --scripted-nvml {SCRIPT}
"""
PCI = "00b5:{:02x}:00.0"  # of the scripted GPUs: a domain that nobody else's test has in this machine's kernel log
_METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
_REPLAYS = "appliance_gateway_replays_total{"
QUICK = "[Unit]\nStartLimitIntervalSec=0\n[Service]\nRestartSec=0.2\n"
# What a reset changes of what NVML says (all of it: script_edit.reset_gpu).
CURED = {
    "uncorrected_volatile": 0, "corrected_volatile": 0, "remap_pending": False, "recovery_action": 0,
}  # fmt: skip


def merge_toml(base: str, changes: str) -> str:
    """Two levels of TOML, numbers only: what POLICY is made of."""
    table = tomllib.loads(base)
    for name, section in tomllib.loads(changes).items():
        table.setdefault(name, {}).update(section)
    lines = [f"{name} = {value}" for name, value in table.items() if not isinstance(value, dict)]
    for name, section in table.items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {value}" for key, value in section.items())]
    return "\n".join([*lines, ""])


def _try(condition: Callable[[], Any]) -> Any:
    """False also while the watchdog is not there to be asked: it was killed, and is about to come back."""
    try:
        return condition()
    except ControlError:
        return False


def _samples(text: str) -> dict[str, float]:
    """Of Prometheus text: name and labels -> value."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


class Load:
    """fault_load.py in the box. Use: with one.load(32) as load: ...; load.result has what its clients saw."""

    def __init__(self, box: Box, clients: int) -> None:
        self.result: dict[str, Any] = {}
        argv = [PYTHON, "-P", "-m", "tests.healthcheck.fault_load", URL, str(clients)]
        self._process = box.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Load:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self._process.stdout is not None and self._process.stdin is not None
        if kind is not None:
            self._process.kill()
        self._process.stdin.close()
        said = self._process.stdout.read()
        self._process.stdout.close()
        code = self._process.wait(120)
        if kind is None:
            assert code == 0
            self.result = json.loads(said)

    def nothing_lost(self) -> dict[str, Any]:
        assert self.result["lost"] == [] and self.result["wrong"] == []
        return self.result


class World:
    def __init__(self, box: Box, tmp: Path) -> None:
        self.box, self._tmp = box, tmp
        self.paths = Paths.under(Path(f"/proc/{box.pid}/root"))

    # -- making it
    def install(self) -> None:
        box = self.box
        for unit in ("appliance-gpu@", "appliance-gateway@"):
            box.write(f"/etc/systemd/system/{unit}.service.d/quick.conf", QUICK)
        box.write(f"/etc/systemd/system/{WATCHDOG}.d/test.conf", DROP_IN)
        for unit in (WATCHDOG, "appliance-gpu-reset@.service"):
            box.write(f"/etc/systemd/system/{unit}.d/boot.conf", BOOT)
        appliance_box.install(box, slots=GPUS, config=CONFIG)
        box.write("/etc/appliance/healthcheck.toml", POLICY)
        box.write(BOOT_ID, f"{uuid.uuid4()}\n")
        fault_box.install(box, UUIDS, on_reset=[])
        self.script()
        box.run(["systemctl", "enable", "appliance.target", *UNITS])  # what `appliance start` starts
        for gpu in range(GPUS):
            box.run(["systemctl", "start", f"appliance-gpu@{gpu}"], timeout=60)
        self._release()
        box.run(["systemctl", "start", "appliance-gateway@stable"], timeout=60)

    def _release(self) -> None:
        box = self.box
        box.copy(make_tiny_model(self._tmp / "model"), "/root/model")
        self.cli("appliance", "model", "add", "/root/model", "--name", "tiny")
        self.cli("appliance", "release", "add", "v1", "--model", "tiny", "-q")
        self.cli("appliance", "release", "use", "v1", "--wait", "-q")
        self.until(lambda: all(self.serves(gpu) for gpu in range(GPUS)))

    def cli(self, module: str, *words: str, user: str | None = None) -> str:
        return self.box.run([PYTHON, "-P", "-m", module, *words], timeout=120, user=user).stdout

    def script(self) -> None:
        """NVML shows healthy GPUs again."""
        script = healthy_script(UUIDS)
        for slot, name in enumerate(UUIDS):
            script["gpus"][name]["pci"] = PCI.format(slot)
        write_script(self.nvml, script)

    @property
    def nvml(self) -> Path:
        return self.paths.etc.parents[1] / SCRIPT.lstrip("/")

    # -- the watchdog
    def fresh(self, policy: str = "") -> None:
        """For a test: a ledger that is all HEALTHY, no events, resets that cure what a reset cures; a new watchdog.
        `policy`: lines that replace some of POLICY."""
        box = self.box
        box.run(["systemctl", "stop", WATCHDOG])
        self.paths.healthcheck_config.write_text(merge_toml(POLICY, policy))
        for gpu in range(GPUS):
            ControlClient(self.paths, gpu).call("unhold", owner="watchdog", wait=True, timeout=60)
            ControlClient(self.paths, gpu).call("share", owner="watchdog", share=1.0)
        ledger = [{"slot": slot, "uuid": name, "since": time.time()} for slot, name in enumerate(UUIDS)]
        self.paths.gpus.write_text(json.dumps({"schema": 1, "gpus": ledger}))
        for file in (self.paths.events, self.paths.watchdog_memory, *(self.paths.state / "resets").glob("*.json")):
            file.unlink(missing_ok=True)
        self.script()
        cure = {"gpus": {name: {"fields": CURED} for name in UUIDS}}
        fault_box.install(box, UUIDS, on_reset=[{"file": SCRIPT, "merge": cure}])
        box.run(["systemctl", "reset-failed"], check=False)
        self.until(lambda: all(self.serves(gpu) for gpu in range(GPUS)))
        box.run(["systemctl", "start", WATCHDOG], timeout=60)
        self.until(lambda: "v1" in str(self.gpu(0)["checks"]) and "v1" in str(self.gpu(1)["checks"]))

    def reboot(self) -> None:
        """As far as a box can: all of the appliance is stopped, /run/appliance is gone, the boot id is another one, and
        everything starts at once. NVML shows healthy GPUs then."""
        self.box.run(["systemctl", "stop", *UNITS], timeout=120)
        self.box.run(["rm", "-rf", "/run/appliance"])
        self.box.run(["systemd-tmpfiles", "--create", "appliance.conf"])
        self.box.write(BOOT_ID, f"{uuid.uuid4()}\n")
        self.script()
        self.box.run(["systemctl", "start", *UNITS], timeout=120)

    def document(self) -> dict[str, Any]:
        return WatchdogClient(self.paths).call("status", timeout=30)["state"]  # type: ignore[no-any-return]

    def gpu(self, gpu: int = 0) -> dict[str, Any]:
        """ControlError while the watchdog is being started."""
        return self.document()["gpus"][gpu]  # type: ignore[no-any-return]

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        return WatchdogClient(self.paths).call(op, timeout=30, **args)

    def pid(self) -> int:
        """Of the watchdog, as the box counts; 0 while there is none."""
        return int(self.box.show(WATCHDOG, "MainPID")["MainPID"])

    def kill(self) -> bool:
        """SIGKILL for the service's main process, without the detour through a command in the box: at once. False: it
        does not run (it was killed, and is about to be started again)."""
        group = self.box.cgroup / "appliance.slice" / WATCHDOG / "cgroup.procs"
        with suppress(FileNotFoundError, ProcessLookupError):
            for pid in group.read_text().split():  # as this machine counts them
                if "-m\0healthcheck\0" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(int(pid), signal.SIGKILL)
                    return True
        return False

    def metrics(self) -> dict[str, float]:
        """The watchdog's own, by name and labels."""
        connection = UnixConnection(self.paths.watchdog_socket, 10.0)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return _samples(text)

    def ledger(self, gpu: int = 0) -> dict[str, Any]:
        return json.loads(self.paths.gpus.read_text())["gpus"][gpu]  # type: ignore[no-any-return]

    # -- launchers, engines, gateway
    def launcher(self, gpu: int) -> dict[str, Any]:
        return json.loads(self.paths.launcher_state(gpu).read_text())  # type: ignore[no-any-return]

    def serves(self, gpu: int) -> bool:
        if not self.paths.launcher_state(gpu).exists():
            return False
        state = self.launcher(gpu)
        return not state["holds"] and bool(state["engines"]) and all(entry["admitted"] for entry in state["engines"])

    def engine_pid(self, gpu: int) -> int | None:
        engines = self.launcher(gpu)["engines"]
        return engines[0]["pid"] if engines else None

    def engine(self, gpu: int) -> EngineCalls:
        return EngineCalls(self.paths.engine_socket(gpu, "v1"))

    def flip(self, gpu: int, offset: int, bit: int) -> None:
        self.engine(gpu)._control("flip", {"offset": offset, "bit": bit}, {})

    def gateway_metrics(self) -> dict[str, float]:
        """The gateway's, and what it hands on of the engines and the watchdog."""
        return _samples(self.box.run(["python3", "-c", _METRICS]).stdout)

    def replays(self) -> float:
        """Streams that the gateway went on with elsewhere, so far."""
        return sum(value for name, value in self.gateway_metrics().items() if name.startswith(_REPLAYS))

    def load(self, clients: int) -> Load:
        return Load(self.box, clients)

    def scopes(self) -> list[str]:
        shown = self.box.run(["systemctl", "list-units", "--plain", "--no-legend", "--all", "appliance-gpu*.scope"])
        return [line.split()[0] for line in shown.stdout.splitlines()]

    def resets(self) -> list[int]:
        """How often the stand-in reset each GPU."""
        return [gpu.get("resets", 0) for gpu in fault_box.state(self.box)["gpus"]]

    # -- what happened
    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        found = [event for event in read_events(self.paths.events) if event["event"] == name]
        return [event for event in found if fields.items() <= event.items()]

    def way(self, gpu: int = 0) -> list[str]:
        return [str(event["after"]) for event in self.events("watchdog_transition", gpu=gpu)]

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not _try(condition):
            assert time.monotonic() < deadline, self.box.journal(WATCHDOG, lines=60)
            time.sleep(0.02)

    def healthy(self, gpu: int = 0, seconds: float = 90.0) -> None:
        """The end of a repair: HEALTHY again, serving in full."""
        self.until(lambda: self.way(gpu)[-1:] == ["HEALTHY"], seconds)
        self.until(lambda: self.serves(gpu) and self.launcher(gpu)["share"] == 1.0)


@contextmanager
def world(box_root: Path, tmp: Path) -> Iterator[World]:
    with Box(box_root, **appliance_box.boot_options()) as box:
        one = World(box, tmp)
        one.install()
        yield one

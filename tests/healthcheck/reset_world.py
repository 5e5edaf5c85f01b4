"""A host for the reset: a GPU in a fake /proc/driver/nvidia, a stand-in for nvidia-smi, services that are a JSON file.

Everything is on disk, so that it survives a process that is killed in the middle.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.command import Result
from appliance.command import run as run_command
from appliance.gpus import SCHEMA as GPUS_SCHEMA
from appliance.paths import Paths
from appliance.statefile import write_state
from healthcheck.reset_host import ResetHost
from healthcheck.reset_plan import Limits

STAND_IN = Path(__file__).with_name("nvidia_smi")
UUID = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
PCI = "0000:1b:00.0"
DCGM = "nvidia-dcgm.service"
# What the driver shows in /proc (driver 580; also in tests/appliance/test_gpus.py).
INFORMATION = f"""\
Model: \t\t NVIDIA H200
IRQ:   \t\t 345
GPU UUID: \t {UUID}
Video BIOS: \t 96.00.bc.00.01
Bus Type: \t PCIe
Bus Location: \t {PCI}
Device Minor: \t 0
GPU Firmware: \t 580.95.05
"""


class World:
    """`in_process`: the stand-in is called as a function (fast); else it is a program, as on a host."""

    def __init__(self, root: Path, *, uuid: str = UUID, in_process: bool = True) -> None:
        self.root, self.uuid, self.in_process = root, uuid, in_process
        self.paths = Paths.under(root)
        for path in (self.paths.state / "holds", self.paths.gpu_run(0), root / "dev", root / "bin"):
            path.mkdir(parents=True, exist_ok=True)
        self.smi = root / "bin/nvidia-smi"
        shutil.copy(STAND_IN, self.smi)
        self.smi_state = self.smi.with_name("nvidia-smi.json")
        self.units = root / "units.json"
        self.client = root / "dcgm-has-the-gpu"
        self.clock = 0.0
        self.before_call: Callable[[list[str]], None] = lambda argv: None
        self.after_call: Callable[[list[str]], None] = lambda argv: None
        information = root / f"driver/gpus/{PCI}/information"
        information.parent.mkdir(parents=True, exist_ok=True)
        information.write_text(INFORMATION)
        (root / "dev/nvidia0").symlink_to("/dev/full")  # a device that any process can hold
        entry = {"slot": 0, "uuid": uuid, "state": "RESETTING", "reason": "test", "since": 1.0, "needs": None}
        write_state(self.paths.gpus, {"gpus": [entry | {"attempts": []}]}, schema=GPUS_SCHEMA)
        self.hold("stop")
        self.set_units({DCGM: "active", "nvidia-persistenced.service": "active"})
        gpu = {"uuid": uuid, "pci": "00000000:1B:00.0", "persistence": True, "recovery_action": "Reset"}
        self.set_smi({"gpus": [gpu], "clients": [str(self.client)], "calls": []})

    # -- what the test looks at and changes

    def hold(self, level: str | None) -> None:
        holds = {} if level is None else {"watchdog": {"level": level, "reason": "Xid 48", "since": 1.0}}
        write_state(self.paths.holds(0), {"holds": holds}, schema=1)
        self.paths.launcher_state(0).write_text("{}")

    def set_units(self, units: dict[str, str]) -> None:
        self.units.write_text(json.dumps(units))
        self.client.unlink(missing_ok=True)
        if units.get(DCGM) == "active":
            self.client.touch()

    def states(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self.units.read_text())
        return found

    def set_smi(self, state: dict[str, Any]) -> None:
        self.smi_state.write_text(json.dumps(state))

    def change_smi(self, **changes: Any) -> None:
        self.set_smi(self.smi_now() | changes)

    def change_gpu(self, **changes: Any) -> None:
        state = self.smi_now()
        state["gpus"][0] |= changes
        self.set_smi(state)

    def smi_now(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.smi_state.read_text())
        return found

    def calls(self, word: str) -> int:
        return sum(word in call for call in self.smi_now()["calls"])

    @property
    def gpu(self) -> dict[str, Any]:
        found: dict[str, Any] = self.smi_now()["gpus"][0]
        return found

    def host(self, **changes: Any) -> ResetHost:
        options: dict[str, Any] = {
            "run": self.run, "nvidia_smi": str(self.smi), "nvidia": self.root / "driver", "dev": self.root / "dev",
            "cgroups": self.root / "cgroup", "limits": Limits(free=0.4, reset=5.0),
        }  # fmt: skip
        return ResetHost(self.paths, **options | changes)

    # -- commands

    def run(self, argv: list[str], *, timeout: float, limit: int = 1 << 20) -> Result:
        self.before_call(argv)
        if argv[0] == "systemctl":
            result = self._systemctl(argv)
        elif argv[0] == str(self.smi) and self.in_process:
            result = call_stand_in(self.smi, argv)
        else:
            result = run_command(argv, timeout=timeout, limit=limit)
        self.after_call(argv)
        return result

    def _systemctl(self, argv: list[str]) -> Result:
        units, verb, name = self.states(), argv[1], argv[-1]
        if verb == "show":
            return Result(tuple(argv), 0, (units.get(name, "inactive") + "\n").encode(), b"")
        if units.get(name) == "broken":
            return Result(tuple(argv), 1, b"", f"Job for {name} failed.".encode())
        self.set_units(units | {name: {"start": "active", "stop": "inactive"}[verb]})
        return Result(tuple(argv), 0, b"", b"")


def call_stand_in(path: Path, argv: list[str]) -> Result:
    loader = importlib.machinery.SourceFileLoader("nvidia_smi_stand_in", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = module.main(argv[1:])
    return Result(tuple(argv), code, said.getvalue().encode(), b"")


def in_a_child(work: Callable[[], Any]) -> int:
    """Exit status of a forked process that does it: 0 done, 137 killed, 1 an exception."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

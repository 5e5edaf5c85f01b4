"""A faulty GPU in the qemu machine: a script plays NVML and our stand-in plays nvidia-smi, whose reset cures what a
reset cures; kernel, systemd, launchers, engines, gateway, watchdog and reset unit are as shipped and installed."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from healthcheck.script_edit import healthy_script
from tests.ansible.vm_host import Host
from tests.healthcheck import fault_box
from tests.host.vm import Machine

UUIDS = ("CPU-0", "CPU-1")
WATCHDOG = "appliance-watchdog.service"
REPAIR = ["STOPPING", "RESETTING", "WARMUP", "VERIFY", "PROBATION", "HEALTHY"]
_PYTHON = "/usr/lib/appliance/current/venv/bin/python"
_SCRIPT = "/var/lib/appliance/nvml.json"
_DROP_IN = f"/etc/systemd/system/{WATCHDOG}.d/test.conf"
_POLICY = "/etc/appliance/healthcheck.toml"
# Waits become seconds, and deadlines longer: software emulation under load takes a minute to compare golden answers.
_QUICK = "schema = 1\n[limits]\nprobe_interval = 3.0\n[timeouts]\nprobation = 3.0\nwarmup = 300.0\nverify = 300.0\n"
_CURED = {"uncorrected_volatile": 0, "recovery_action": 0}
_UNCORRECTABLE = """
from pathlib import Path
from healthcheck.script_edit import add_event, set_fields
script, uuid = Path({script!r}), {uuid!r}
set_fields(script, uuid, uncorrected_volatile=1, uncorrected_aggregate=1, recovery_action=1)
add_event(script, uuid, "double_bit")
add_event(script, uuid, "xid", xid=48)
"""


class Inside:
    """The machine, with a box's way of running commands."""

    def __init__(self, vm: Machine) -> None:
        self._vm = vm
        self.write, self.read = vm.write, vm.read

    def run(self, argv: Sequence[str]) -> Any:
        return self._vm.run(shlex.join(argv))

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        shown = self._vm.run(f"systemctl show {unit} --property={','.join(properties)}").stdout
        return dict(line.split("=", 1) for line in shown.splitlines())


@contextmanager
def scripted(host: Host) -> Iterator[Faults]:
    """The watchdog sees GPUs that a script plays; afterwards it is as it was installed."""
    faults = Faults(host)
    faults.install()
    try:
        yield faults
    finally:
        faults.remove()


class Faults:
    def __init__(self, host: Host) -> None:
        self._host, self._vm, self._inside = host, host.vm, Inside(host.vm)

    def install(self) -> None:
        vm = self._vm
        vm.write(_DROP_IN, f"[Service]\nExecStart=\nExecStart={_PYTHON} -P -m healthcheck --scripted-nvml {_SCRIPT}\n")
        vm.write(_POLICY, _QUICK)
        vm.write(_SCRIPT, json.dumps(healthy_script(UUIDS)))
        cure = {"gpus": {uuid: {"fields": _CURED} for uuid in UUIDS}}
        fault_box.install(self._inside, UUIDS, on_reset=[{"file": _SCRIPT, "merge": cure}])
        vm.run(f"systemctl restart {WATCHDOG}", timeout=300)
        vm.wait_until(
            lambda: all(self._well(gpu) for gpu in (0, 1)), "both GPUs are well, and golden answers known", 300
        )

    def remove(self) -> None:
        vm = self._vm
        vm.run(f"systemctl stop {WATCHDOG} {fault_box.DCGM}", timeout=300)
        vm.run(f"rm -rf {_DROP_IN.rpartition('/')[0]} {_POLICY} {_SCRIPT} {fault_box.SMI} {fault_box.SMI}.json "
               f"/etc/default/appliance /etc/systemd/system/{fault_box.DCGM}")  # fmt: skip
        vm.run(f"systemctl daemon-reload; systemctl start {WATCHDOG}", timeout=300)

    def _well(self, gpu: int) -> bool:
        shown = self.gpu(gpu)
        return shown["state"] == "HEALTHY" and "v1" in str(shown["checks"])

    def gpu(self, gpu: int) -> dict[str, Any]:
        return dict(json.loads(self._vm.run("healthcheck status --json", check=False).stdout)["gpus"][gpu])

    def uncorrectable(self, gpu: int) -> None:
        """What a GPU shows then: counters, the recovery action that the driver asks for, NVML's events, the Xid."""
        self._vm.run(f"{_PYTHON} -P -c {shlex.quote(_UNCORRECTABLE.format(script=_SCRIPT, uuid=UUIDS[gpu]))}")

    def way(self, gpu: int) -> list[str]:
        """The states that it went through, without SUSPECT, which may be seen or not."""
        return [state for state in self._host.way(gpu) if state != "SUSPECT"]

    def wait_way(self, gpu: int, way: list[str], timeout: float = 600.0) -> None:
        """Until the watchdog has had this GPU go this way."""
        deadline = time.monotonic() + timeout
        while (gone := self.way(gpu)) != way:
            assert time.monotonic() < deadline and gone == way[: len(gone)], (gone, self._vm.journal(WATCHDOG))
            time.sleep(1)

    def phases(self, gpu: int) -> dict[str, float]:
        """Seconds, of the last repair."""
        return dict(self.gpu(gpu)["phases"])

    def resets(self) -> list[int]:
        return [gpu.get("resets", 0) for gpu in fault_box.state(self._inside)["gpus"]]

    def all_is_back(self) -> bool:
        """What the reset stopped runs again, persistence mode is on."""
        return fault_box.all_is_back(self._inside)

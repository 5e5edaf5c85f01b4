"""Why a unit failed and what became of its GPU: `python -m appliance.report_failure UNIT`, started by OnFailure=.

One event "unit-failed" in events.jsonl, and the same in two lines in the journal. Everything is read from systemd,
/proc, /sys and the kernel's log; no NVML (the watchdog is its only user) and no device is opened, so a GPU that hangs
cannot hang the report.

What cannot be read is "unknown" in the event; a report is never refused for it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from appliance import command
from appliance.events import append_event
from appliance.gpu_facts import GpuFacts, gpu_facts
from appliance.gpus import read_slots
from appliance.log import ApplianceError, UsageError, printable, report_error
from appliance.paths import Paths
from appliance.statefile import read_state

_UNIT = re.compile(r"[A-Za-z0-9:_.@\\-]{1,255}")
_LAUNCHER = re.compile(r"appliance-gpu@(\d{1,4})\.service")
_PROPERTIES = "Result,ExecMainCode,ExecMainStatus,NRestarts,StatusText"
_KERNEL_LINES = 12
_LINE_CHARS = 300
_TIMEOUT_SECONDS = 15.0
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
# What the exit statuses of our programs mean (appliance/log.py:ExitCode), and systemd's own that a fresh install meets.
_STATUS_MEANING = {
    "2": "wrong arguments: see the unit and its drop-ins, `systemctl cat`",
    "4": "refused: `appliance config check` and `appliance doctor` name the cause",
    "203": "the program is not there: is /usr/lib/appliance/current right?",
    "217": "there is no user `appliance`: run systemd-sysusers",
    "226": "its sandbox cannot be set up: a path in a drop-in that is not there?",
    "243": "its credentials cannot be read: see /etc/appliance/credentials",
}


def diagnose(unit: dict[str, str], gpu: GpuFacts | None, kernel: Sequence[str]) -> str:
    """The cause in one line, from what was read: the driver's word first, then systemd's."""
    result, status = unit.get("Result", "unknown"), unit.get("ExecMainStatus", "")
    if gpu is not None:
        if gpu.state == "no-driver":
            return "the NVIDIA driver is not loaded"
        if gpu.state == "off-bus":
            return "the GPU fell off the PCI bus"
        # Where the GPU is known, Xids of others do not count. (The driver writes 0000:1b:00, sysfs 0000:1b:00.0.)
        found = [match for line in kernel if (match := _XID.search(line))]
        xids = [match[2] for match in found if gpu.pci is None or gpu.pci.lower().startswith(match[1].lower())]
        if xids:
            return f"the driver reported Xid {', '.join(dict.fromkeys(xids))}"
        if gpu.state == "not-shown":
            return "the driver does not show the GPU of this slot"
    if result == "watchdog":
        return "its loop stood still (WatchdogSec)"
    if result == "timeout":
        return "it did not start or stop in time"
    if result == "oom-kill":
        return "it was killed for want of memory"
    if result == "start-limit-hit":
        return "it ended too often in a short time; `journalctl -u` has the reason of each"
    if result == "exit-code" and status in _STATUS_MEANING:
        return _STATUS_MEANING[status]
    return f"{result}, exit status {status or 'unknown'}"


def report(unit: str, paths: Paths) -> dict[str, Any]:
    """Reads everything and appends the event; returns its fields."""
    properties = _properties(unit)
    kernel = _kernel_lines()
    fields: dict[str, Any] = {
        "unit": unit,
        "result": properties.get("Result", "unknown"),
        "exit_status": properties.get("ExecMainStatus", "unknown"),
        "restarts": properties.get("NRestarts", "unknown"),
        "status": properties.get("StatusText") or None,
    }
    gpu: GpuFacts | None = None
    if matched := _LAUNCHER.fullmatch(unit):
        number = int(matched[1])
        uuid = _slot_uuid(paths, number)
        if uuid is not None and uuid.startswith("GPU-"):  # backend "cpu" has slots without a device
            gpu = gpu_facts(uuid)
        fields |= {"gpu": number, "uuid": uuid, "gpu_state": gpu and gpu.state, "engines": _engines(paths, number)}
    fields |= {"driver": _driver_version(), "kernel": kernel or None, "cause": diagnose(properties, gpu, kernel)}
    append_event(paths.events, "unit-failed", **fields)
    return fields


def _slot_uuid(paths: Paths, number: int) -> str | None:
    try:
        return read_slots(paths.gpus).get(number, {}).get("uuid")
    except (ApplianceError, KeyError, ValueError, OSError) as error:
        print(f"warning: {paths.gpus}: {error}", file=sys.stderr)
        return None


def _engines(paths: Paths, number: int) -> list[str] | None:
    """What the launcher last wrote of its engines."""
    try:
        state = read_state(paths.launcher_state(number), schema=1)
    except (ApplianceError, OSError):
        return None
    engines = (state or {}).get("engines", [])
    return [
        f"{engine.get('release')}: {engine.get('state')}, last exit {engine.get('last_exit')}" for engine in engines
    ]


def _driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    try:
        return path.read_text(errors="replace").splitlines()[0][:_LINE_CHARS]
    except (OSError, IndexError):
        return None


def _properties(unit: str) -> dict[str, str]:
    lines = _output(["systemctl", "show", "--property", _PROPERTIES, "--", unit])
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _kernel_lines() -> list[str]:
    """The last messages of the driver in this boot and the last ten minutes."""
    argv = ["journalctl", "-k", "-b", "--since", "-10min", "-n", str(_KERNEL_LINES), "-o", "cat", "-q", "--no-pager"]
    return [line[:_LINE_CHARS] for line in _output([*argv, "-g", "NVRM|nvidia"])][-_KERNEL_LINES:]


def _output(argv: list[str]) -> list[str]:
    """Lines of stdout; none (and a warning) if the program is not there or hangs. journalctl -g exits with 1 when
    nothing matches, so the status says little."""
    result = command.run(argv, timeout=_TIMEOUT_SECONDS)
    if result.code == command.NOT_FOUND or result.timed_out:
        print(f"warning: {result.why()}", file=sys.stderr)
        return []
    return result.text.splitlines()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m appliance.report_failure", description=__doc__.partition("\n")[0])
    parser.add_argument("unit", help="for example appliance-gpu@0.service")
    args = parser.parse_args(argv)
    try:
        if not _UNIT.fullmatch(args.unit):
            raise UsageError(f"{args.unit!r} is no unit name", hint="appliance-gpu@0.service")
        fields = report(args.unit, Paths.default())
    except ApplianceError as error:
        report_error(error.message, hint=error.hint, code=error.exit_code)
        return error.exit_code
    # <3> is the journal's priority "err" (sd-daemon.h).
    print(f"<3>{args.unit} failed: {printable(fields['cause'])}")
    if "gpu" in fields:
        print(f"<3>GPU {fields['gpu']} ({fields['uuid']}): {fields['gpu_state'] or 'no device (backend cpu)'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""All probes of the watchdog on the GPUs of this machine: `python -m tests.bench.nvml_evidence [--results DIR]`.

Through NvmlProbe and its child, as the watchdog does it: a first reading, ten more, half a minute of idling (CPU time
and memory of the child), closing (does anything of ours still hold a GPU?), opening again, the checks on what was read,
the kernel's log, and each value beside what nvidia-smi says. With `--load COMMAND ...` it reads once more while that
runs.
Needs nvidia-ml-py, msgspec and nvidia-smi. Exit code 1 where something is not as it should be; it says what.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance.gpus import visible_gpus
from appliance.launcher.loop import Loop, Timer
from healthcheck.checks import Baseline, judge
from healthcheck.kmsg import KmsgFollower
from healthcheck.limits import Limits
from healthcheck.nvml import Hang, NvmlProbe, Round, child_command
from healthcheck.nvml_protocol import Event
from healthcheck.nvml_read import FIELDS
from healthcheck.pci import normalise_pci
from healthcheck.types import GpuReading, Signal, Status
from tests.bench.__main__ import _commit

READINGS = 10
WAIT = 120.0  # seconds: the first opening of a GPU without persistence mode takes its time
_ON = {"Enabled": True, "Disabled": False, "Yes": True, "No": False}
_ACTIONS = {"None": 0, "Reset": 1, "Reboot": 2, "Drain P2P": 3, "Drain and Reset": 4}
# Of ours -> of nvidia-smi --query-gpu, and how its words are read. Values that move are left out.
SAME: dict[str, tuple[str, Callable[[str], Any]]] = {
    "name": ("name", str), "pci": ("pci.bus_id", normalise_pci), "serial": ("serial", str),
    "vbios": ("vbios_version", str), "recovery_action": ("gpu_recovery_action", lambda word: _ACTIONS.get(word, word)),
    "ecc_mode": ("ecc.mode.current", _ON.get), "ecc_mode_pending": ("ecc.mode.pending", _ON.get),
    "corrected_volatile": ("ecc.errors.corrected.volatile.total", int),
    "uncorrected_volatile": ("ecc.errors.uncorrected.volatile.total", int),
    "corrected_aggregate": ("ecc.errors.corrected.aggregate.total", int),
    "uncorrected_aggregate": ("ecc.errors.uncorrected.aggregate.total", int),
    "uncorrected_volatile_dram": ("ecc.errors.uncorrected.volatile.dram", int),
    "uncorrected_volatile_sram": ("ecc.errors.uncorrected.volatile.sram", int),
    "retired_pages_pending": ("retired_pages.pending", _ON.get), "pcie_generation_max": ("pcie.link.gen.max", int),
    "pcie_width": ("pcie.link.width.current", int), "pcie_width_max": ("pcie.link.width.max", int),
    "power_limit_mw": ("enforced.power.limit", lambda watts: round(1000 * float(watts))),
    "persistence_mode": ("persistence_mode", _ON.get), "mig_mode": ("mig.mode.current", _ON.get),
    "memory_total_bytes": ("memory.total", lambda mib: int(mib) << 20),
}  # fmt: skip
ROWS: dict[str, tuple[str, Callable[[str], Any]]] = {  # of nvidia-smi --query-remapped-rows
    "remapped_corrected": ("remapped_rows.correctable", int),
    "remapped_uncorrected": ("remapped_rows.uncorrectable", int),
    "remap_pending": ("remapped_rows.pending", _ON.get), "remap_failure": ("remapped_rows.failure", _ON.get),
}  # fmt: skip


class Evidence:
    def __init__(self) -> None:
        self.loop = Loop()
        self.rounds: list[Round] = []
        self.hangs: list[Hang] = []
        self.events: list[Event] = []
        self.signals: list[Signal] = []
        self.wrong: list[str] = []
        known = {gpu.pci: gpu.uuid for gpu in visible_gpus()}
        self.probe = NvmlProbe(
            self.loop, child_command(), Limits().probe_deadline, lambda _: None, self.events.append, self.hangs.append,
            on_round=self.rounds.append, known=known,
        )  # fmt: skip
        self.log = KmsgFollower(self.loop, self.signals.append, self.probe.known)
        self.known = dict(known)

    def until(self, reached: Callable[[], bool], seconds: float = WAIT) -> bool:
        timers: list[Timer] = []

        def tick() -> None:
            timers[:] = [self.loop.later(0.05, tick)]

        tick()
        came = self.loop.run(reached, seconds)
        timers[0].cancel()
        return came

    def read(self, begin: Callable[[], object]) -> float:
        """Seconds of one round."""
        count, started = len(self.rounds), self.loop.time()
        begin()
        if not self.until(lambda: len(self.rounds) > count):
            raise SystemExit(f"no reading within {WAIT:g} s; hangs: {self.hangs}")
        if not self.rounds[-1].ok:
            raise SystemExit(f"NVML does not work here: {self.rounds[-1]}")
        return self.loop.time() - started

    def idle(self, seconds: float) -> dict[str, float | int]:
        """What the child costs while nothing is asked of it but its events."""
        pid = self.probe.pid
        assert pid is not None
        before = cpu_seconds(pid)
        self.until(lambda: False, seconds)
        return {"cpu_percent": 100 * (cpu_seconds(pid) - before) / seconds, "pss_kib": pss_kib(pid)}

    def close(self) -> tuple[float, list[str]]:
        """Seconds, and what of ours still has a GPU open."""
        done: list[float] = []
        pid = self.probe.pid
        started = self.loop.time()
        self.probe.close(lambda: done.append(self.loop.time() - started))
        self.until(lambda: bool(done))
        links = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        mine = [link for link in links if link.startswith("/dev/nvidia")]
        if Path(f"/proc/{pid}").exists():
            mine.append(f"the child {pid} is still there")
        return done[0], mine


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def ask_nvidia_smi(option: str, uuid_field: str, field: str) -> dict[str, str]:
    """UUID -> its words; empty where this nvidia-smi does not know the field."""
    argv = ["nvidia-smi", f"{option}={uuid_field},{field}", "--format=csv,noheader,nounits"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    if result.returncode:
        return {}
    rows = (line.partition(",") for line in result.stdout.splitlines())
    return {uuid.strip(): value.strip() for uuid, _, value in rows}


def compare(readings: dict[str, GpuReading]) -> tuple[list[dict[str, Any]], list[str]]:
    """(every value beside nvidia-smi's, what differs). "[N/A]" there has to be unknown here, and vice versa."""
    rows, differences = [], []
    for option, uuid_field, table in (("--query-gpu", "uuid", SAME), ("--query-remapped-rows", "gpu_uuid", ROWS)):
        for ours, (theirs, convert) in table.items():
            for uuid, word in ask_nvidia_smi(option, uuid_field, theirs).items():
                if uuid not in readings:
                    differences.append(f"{uuid}: nvidia-smi lists it, we do not")
                    continue
                said = None if word in ("[N/A]", "N/A", "[Not Supported]", "") else convert(word)
                value = readings[uuid].fields.get(ours)
                rows.append({"uuid": uuid, "field": ours, "ours": value, "nvidia_smi": word})
                if said != value:
                    differences.append(f"{uuid}: {ours} is {value!r}, nvidia-smi says {word!r}")
    return rows, sorted(set(differences))


def judged(readings: dict[str, GpuReading], evidence: Evidence) -> dict[str, list[dict[str, Any]]]:
    """Twice, so that rates and differences are there too. A check that is not ok is listed as wrong."""
    table = {}
    for uuid, reading in readings.items():
        first = judge(reading, Baseline(), Limits())
        result = judge(reading, first.baseline, Limits())
        table[uuid] = [{"check": c.name, "status": str(c.status), "reason": c.reason, "value": c.value}
                       for c in result.checks]  # fmt: skip
        evidence.wrong += [f"{uuid}: {c.name} {c.status}: {c.reason}" for c in result.checks if c.status != Status.OK]
        evidence.wrong += [f"{uuid}: signal {signal.key}: {signal.detail}" for signal in result.signals]
    return table


def collect(evidence: Evidence, idle_seconds: float, load: list[str]) -> dict[str, Any]:
    probe = evidence.probe
    first = evidence.read(probe.read)
    seconds = [evidence.read(probe.read) for _ in range(READINGS)]
    idle = evidence.idle(idle_seconds)
    close_seconds, held = evidence.close()
    reopen = evidence.read(probe.open)
    under_load = None
    if load:
        with subprocess.Popen(load) as process:
            evidence.until(lambda: process.poll() is not None, 20.0)
            evidence.read(probe.read)
            under_load = {uuid: reading.fields for uuid, reading in probe.readings.items()}
            process.terminate()
    readings = dict(probe.readings)
    rows, differences = compare(readings)
    last = evidence.rounds[-1]
    evidence.wrong += differences + [f"held after closing: {what}" for what in held]
    evidence.wrong += [f"{uuid} sends no events: {why}" for uuid, why in last.deaf.items()]
    evidence.wrong += [f"{where} could not be read: {why}" for where, why in last.unread.items()]
    evidence.wrong += [f"hang: {hang}" for hang in evidence.hangs]
    if set(evidence.known.values()) != set(readings):
        evidence.wrong.append(f"/proc/driver/nvidia lists {sorted(evidence.known.values())}")
    return {
        "bench": "nvml", "commit": _commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(), "driver": last.driver, "fields": list(FIELDS),
        "seconds": {"first": first, "readings": seconds, "close": close_seconds, "reopen": reopen},
        "child": idle, "deaf": dict(last.deaf), "crashes": probe.crashes,
        "kernel_log": {"records": evidence.log.records, "lost": evidence.log.lost, "error": evidence.log.error},
        "gpus": [{"uuid": r.uuid, "at": r.at, "fields": r.fields, "unknown": r.unknown, "error": r.error}
                 for r in readings.values()],
        "under_load": under_load, "checks": judged(readings, evidence), "beside_nvidia_smi": rows,
        "events": [{"kind": e.kind, "uuid": e.uuid, "xid": e.xid, "data": e.data} for e in evidence.events],
        "wrong": evidence.wrong,
    }  # fmt: skip


def show(record: dict[str, Any]) -> None:
    for gpu in record["gpus"]:
        print(gpu["uuid"], gpu["error"] or "")
        for name in FIELDS:
            value = gpu["fields"].get(name)
            print(f"  {name:28} {value if value is not None else 'unknown: ' + gpu['unknown'].get(name, '')}")
        for row in record["checks"][gpu["uuid"]]:
            print(f"  {row['status']:9} {row['check']:20} {row['reason']}")
    times, child = record["seconds"], record["child"]
    print(f"first reading {times['first']:.3f} s, then {max(times['readings']):.3f} s at most, close "
          f"{times['close']:.3f} s, reopen {times['reopen']:.3f} s; child {child['cpu_percent']:.2f} % of a core idle, "
          f"{child['pss_kib']} KiB PSS; {len(record['beside_nvidia_smi'])} values beside nvidia-smi")  # fmt: skip
    print("\n".join(["wrong:", *record["wrong"]]) if record["wrong"] else "nothing wrong")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="directory for the record")
    parser.add_argument("--idle", type=float, default=30.0, help="seconds of idling")
    parser.add_argument("--load", nargs=argparse.REMAINDER, default=[], help="a command that keeps the GPUs busy")
    options = parser.parse_args()
    record = collect(Evidence(), options.idle, options.load)
    show(record)
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        path = options.results / f"nvml-{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print("written:", path.name)
    return 1 if record["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Stands in for nvml_child.py in tests: `python -P -m healthcheck.scripted_nvml FILE`, the same protocol from a file.

The JSON file is read again whenever it has changed (script_edit.py changes it):

    {"driver": "580.159.04",
     "error": "driver_mismatch",                  NVML as a whole does not work (nvml_protocol.Done.error)
     "hang": "nvml" | "events" | "close",         for ever, in that call, until it is killed
     "exit": 139,                                 the child dies in the next read
     "gpus": {UUID: {
         "pci": "0000:1b:00.0",
         "fields": {"uncorrected_volatile": 3},   instead of those of a healthy H200
         "per_second": {"corrected_volatile": 17700},     goes up by it from when this script was read
         "unsupported": ["recovery_action"],      NOT_SUPPORTED: unknown
         "error": "gpu_is_lost" | "reset_required" | ...,
         "hang": true, "delay": seconds,          in the reading of this GPU
         "absent": true,                          NVML does not list it
         "again": {"fields": ...}}},              what a reset does not cure (script_edit.reset_gpu)
     "events": [{"seq": 1, "uuid": UUID, "kind": "xid", "xid": 79}]}     each sent once; seq goes up

As with NVML, what happened before it was opened is not sent, and volatile counters of a GPU start at 0 after a reset.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from healthcheck.nvml_protocol import Begin, Done, Event, Gpu, LibraryError, Value, die_with_parent, serve

_POLL_SECONDS = 0.1
# What an idle, healthy H200 says: the record in tests/bench/results/nvml-2026-11-30T060740Z.json (driver 580.159.04);
# what that does not have (serial, vbios, performance_state, the counts by place, ...) is made up to fit.
HEALTHY: dict[str, Value] = {
    "name": "NVIDIA H200", "serial": "0", "vbios": "96.00.00.00.00", "minor": 0, "recovery_action": 0,
    "ecc_mode": True, "ecc_mode_pending": True, "corrected_volatile": 0, "uncorrected_volatile": 0,
    "corrected_aggregate": 0, "uncorrected_aggregate": 0, "uncorrected_volatile_dram": 0,
    "uncorrected_volatile_sram": 0, "sram_threshold_exceeded": False, "sram_uncorrected_parity": 0,
    "sram_uncorrected_secded": 0, "remapped_corrected": 0, "remapped_uncorrected": 0, "remap_pending": False,
    "remap_failure": False, "remap_banks_low": 0, "remap_banks_without_spare": 0, "pcie_generation": 5,
    "pcie_generation_max": 5, "pcie_width": 16, "pcie_width_max": 16, "pcie_replays": 0,
    "pcie_tx_kib_per_second": 906, "pcie_rx_kib_per_second": 560, "nvlinks": 18, "nvlinks_up": 18,
    "clocks_event_reasons": 1, "performance_state": 0, "sm_clock_mhz": 345, "memory_clock_mhz": 3201,
    "temperature_c": 37, "temperature_slowdown_c": 90, "memory_temperature_c": 40, "power_mw": 79884,
    "power_limit_mw": 700000, "utilization_percent": 0, "memory_used_bytes": 644939776,
    "memory_total_bytes": 150754820096, "compute_processes": 0, "persistence_mode": True, "fabric_state": 3,
    "fabric_status": 0, "fabric_health_mask": 0, "fabric_health": 1, "mig_mode": False,
}  # fmt: skip
UNSUPPORTED = (
    "retired_pages_pending", "retired_pages_corrected", "retired_pages_uncorrected", "nvlink_crc_errors",
    "nvlink_replays", "nvlink_recoveries",
)  # fmt: skip

Script = dict[str, Any]


class ScriptedBackend:
    """nvml_protocol.Backend from a script."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._script: Script = {}
        self._seen: tuple[int, int, int] | None = None
        self._since = 0.0
        self._open = False
        self._last_event = 0

    @property
    def poll_seconds(self) -> float | None:
        return _POLL_SECONDS if self._open else None

    def _load(self) -> Script:
        status = self._path.stat()
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen != self._seen:
            self._script, self._seen, self._since = load_script(self._path), seen, time.time()
        return self._script

    def read(
        self, known: Mapping[str, str], skip: Set[str], begin: Callable[[Begin], None], gpu: Callable[[Gpu], None]
    ) -> Done:
        script = self._load()
        begin(Begin("nvml"))
        _hang(script.get("hang") == "nvml")
        if "exit" in script:
            sys.exit(int(script["exit"]))
        if error := script.get("error"):
            raise LibraryError(str(error), "scripted")
        if not self._open:
            self._open, self._last_event = True, max((event["seq"] for event in _events(script)), default=0)
        for uuid, one in script["gpus"].items():
            if uuid not in skip and not one.get("absent"):
                begin(Begin(uuid, uuid))
                gpu(self._gpu(uuid, one))
        listed = {uuid for uuid, one in script["gpus"].items() if not one.get("absent")}
        for uuid in sorted(set(known.values()) - listed - skip):
            gpu(Gpu(uuid, time.time(), error="not_found"))
        return Done(True, driver=str(script.get("driver", "580.159.04")))

    def _gpu(self, uuid: str, one: Script) -> Gpu:
        _hang(bool(one.get("hang")))
        time.sleep(float(one.get("delay", 0)))
        error = one.get("error")
        fields: dict[str, Value] = HEALTHY | {"pci": one.get("pci")} | one.get("fields", {})
        for name, rate in one.get("per_second", {}).items():
            fields[name] = int(float(fields.get(name) or 0) + rate * (time.time() - self._since))
        unknown = dict.fromkeys((*UNSUPPORTED, *one.get("unsupported", ())), "not supported")
        unknown = {name: why for name, why in unknown.items() if name not in one.get("fields", {})}
        if error == "gpu_is_lost":
            unknown = {name: "gpu_is_lost: GPU is lost" for name in fields if name not in ("pci", "minor", "name")}
        return Gpu(uuid, time.time(), fields | dict.fromkeys(unknown), unknown, error)

    def events(self) -> Iterable[Event]:
        script = self._load()
        _hang(script.get("hang") == "events")
        for event in _events(script):
            if event["seq"] > self._last_event:
                self._last_event = event["seq"]
                yield Event(event["kind"], time.time(), event.get("uuid"), event.get("xid"), event.get("data"))

    def close(self) -> None:
        _hang(self._open and self._script.get("hang") == "close")
        self._open = False


def _events(script: Script) -> list[dict[str, Any]]:
    return sorted(script.get("events", []), key=lambda event: int(event["seq"]))


def _hang(wanted: bool) -> None:
    while wanted:  # as in a call into the driver: nothing but a kill ends it
        time.sleep(60)


def load_script(path: Path) -> Script:
    """ValueError names the file where it is no script."""
    script = json.loads(path.read_bytes())
    if not isinstance(script, dict) or not isinstance(script.get("gpus"), dict):
        raise ValueError(f'{path} is no script: an object with "gpus" is expected, see healthcheck/scripted_nvml.py')
    return script


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -P -m healthcheck.scripted_nvml FILE", file=sys.stderr)
        return 2
    die_with_parent()
    serve(ScriptedBackend(Path(argv[0])), sys.stdin.fileno(), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Changes to the script of a scripted NVML (scripted_nvml.py), for tests, `healthcheck inject-fault` and stand-ins."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.statefile import state_lock
from healthcheck.nvml_protocol import Value
from healthcheck.scripted_nvml import Script, load_script

# What a reset of the GPU clears. Not: aggregate counters, remap_failure, the SRAM threshold, a lost GPU (health.md 0).
_CLEARED_BY_RESET = (
    "corrected_volatile", "uncorrected_volatile", "uncorrected_volatile_dram", "uncorrected_volatile_sram",
    "sram_uncorrected_parity", "sram_uncorrected_secded", "remap_pending", "recovery_action", "pcie_replays",
)  # fmt: skip


def healthy_script(uuids: Sequence[str]) -> Script:
    """A host of healthy GPUs."""
    return {"gpus": {uuid: {"pci": f"0000:{0x1B + slot:02x}:00.0", "fields": {"minor": slot}}
                     for slot, uuid in enumerate(uuids)}, "events": []}  # fmt: skip


def write_script(path: Path, script: Script) -> None:
    """Replaces the file whole: the child never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(script, indent=1))
    os.replace(temporary, path)


def change_script(path: Path, change: Callable[[Script], None]) -> None:
    """Read, change, write; one at a time. BusyError, ValueError, OSError."""
    with state_lock(path):
        script = load_script(path)
        change(script)
        write_script(path, script)


def set_fields(path: Path, uuid: str, **fields: Value) -> None:
    change_script(path, lambda script: script["gpus"][uuid].setdefault("fields", {}).update(fields))


def set_gpu(path: Path, uuid: str, **entries: object) -> None:
    """Entries of the GPU itself: error, hang, delay, absent, unsupported, per_second, again; None removes one."""

    def change(script: Script) -> None:
        gpu = script["gpus"][uuid] | entries
        script["gpus"][uuid] = {name: value for name, value in gpu.items() if value is not None}

    change_script(path, change)


def add_event(path: Path, uuid: str | None, kind: str, *, xid: int | None = None, data: int | None = None) -> None:
    """Something that NVML reports from now on, once."""

    def change(script: Script) -> None:
        events = script.setdefault("events", [])
        seq = max((event["seq"] for event in events), default=0) + 1
        events.append({"seq": seq, "uuid": uuid, "kind": kind, "xid": xid, "data": data, "at": time.time()})

    change_script(path, change)


def reset_gpu(path: Path, uuid: str) -> None:
    """What a reset does to a GPU. What it does not cure, "again" of the script, is back at once."""

    def change(script: Script) -> None:
        gpu = script["gpus"][uuid]
        fields = {name: value for name, value in gpu.get("fields", {}).items() if name not in _CLEARED_BY_RESET}
        kept = {name: value for name, value in gpu.items() if name not in ("per_second", "hang", "delay")}
        if kept.get("error") == "reset_required":
            del kept["error"]
        again = gpu.get("again", {})
        script["gpus"][uuid] = kept | again | {"fields": fields | again.get("fields", {})}

    change_script(path, change)

"""`healthcheck inject-fault` where a script plays NVML: the fault is written into the script, so that every layer above
sees it as it would a real one (an event, a level, a counter), and a reset cures of it what a reset cures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from healthcheck.script_edit import add_event, change_script, set_fields, set_gpu

_FIELDS: dict[str, dict[str, Any]] = {
    "remap:pending": {"remap_pending": True},
    "remap:failure": {"remap_failure": True},
    "sram:threshold": {"sram_threshold_exceeded": True},
    "persistence:off": {"persistence_mode": False},
    "ecc:off": {"ecc_mode": False},
}
_ENTRIES: dict[str, dict[str, Any]] = {
    "nvml:gpu_is_lost": {"error": "gpu_is_lost"},
    "nvml:reset_required": {"error": "reset_required"},
    "gpu:missing": {"absent": True},
    "probe:hung": {"hang": True},
}


def inject(script: Path, uuid: str, key: str) -> bool:
    """False: NVML would not be who tells of such a fault (golden answers, the engine, the kernel's log)."""
    edit = _edit(key)
    if edit is None:
        return False
    edit(script, uuid)
    return True


def _edit(key: str) -> Callable[[Path, str], None] | None:
    family, _, name = key.partition(":")
    if family == "xid" and name.isdecimal():
        return partial(_xid, int(name))
    if family == "recovery_action" and name.isdecimal():
        return lambda script, uuid: set_fields(script, uuid, recovery_action=int(name))
    if key == "ecc:uncorrected":
        return _uncorrected
    if key in _FIELDS:
        return lambda script, uuid: set_fields(script, uuid, **_FIELDS[key])
    if key in _ENTRIES:
        return lambda script, uuid: set_gpu(script, uuid, **_ENTRIES[key])
    return None


def _xid(number: int, script: Path, uuid: str) -> None:
    add_event(script, uuid, "xid", xid=number)


def _uncorrected(script: Path, uuid: str) -> None:
    def change(whole: dict[str, Any]) -> None:
        fields = whole["gpus"][uuid].setdefault("fields", {})
        for name in ("uncorrected_volatile", "uncorrected_aggregate"):
            fields[name] = int(fields.get(name) or 0) + 1

    change_script(script, change)

"""What commands read of the watchdog: its state file, which everybody may read and which a dead watchdog leaves behind.

Schema 1 (keys are only ever added; null is unknown; times are UTC seconds):
  pid, since, status, backend, nvml ("on", "off", "scripted"), probe_interval, maintenance {reason, since} | null,
  breaker text | null, saved bool (the ledger is on disk), unsaved text | null (why not), alerts [{at, gpu, text}],
  checks [...] of the host (with unknown_since), counters {name: number},
  gpus [{gpu, uuid, state, reason, since, needs, attempts, resets, share, probed_at, checks [...], incident, phases}]
  where a check is {name, status: ok|degraded|failed|unknown, reason, value}
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from appliance.gpus import read_slots
from appliance.log import ApplianceError, UsageError
from appliance.paths import Paths
from appliance.statefile import read_state
from appliance.terminal import age
from healthcheck.types import Check, Status

SCHEMA = 1
_LAUNCHER_SCHEMA = 1
STALE_SECONDS = 120.0  # a watchdog that runs writes its file at every probe

Document = dict[str, Any]

_ORDER = (Status.OK, Status.UNKNOWN, Status.DEGRADED, Status.FAILED)


class NoWatchdog(ApplianceError):
    """There is nothing to show."""


def read_document(paths: Paths) -> Document:
    """The state file, with "running" (bool) and "age_seconds". NoWatchdog where there is none; StateError."""
    document = read_state(paths.watchdog_state, schema=SCHEMA)
    if document is None:
        raise NoWatchdog(
            "the watchdog has not run since this host booted",
            hint="systemctl start appliance-watchdog; `systemctl status appliance-watchdog` says why it stopped",
        )
    document["running"] = _runs(document.get("pid"))
    document["age_seconds"] = round(time.time() - os.stat(paths.watchdog_state).st_mtime, 1)
    return document


def silence(document: Document) -> str | None:
    """Why what it says may be long over, with the next step; None where the watchdog runs and tells."""
    seconds = age(document["age_seconds"])
    if not document["running"]:
        return (
            f"the watchdog does not run, nobody looks after these GPUs; last seen {seconds} ago: systemctl start "
            "appliance-watchdog"
        )
    if document["age_seconds"] > STALE_SECONDS:
        return f"the watchdog has said nothing for {seconds}; journalctl -u appliance-watchdog"
    return None


def _runs(pid: Any) -> bool:
    if type(pid) is not int:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def launchers(paths: Paths) -> set[int]:
    """Slots whose launcher runs now, as far as their state files say."""
    found = set()
    for path in paths.run.glob("gpu*/state.json"):
        number = path.parent.name.removeprefix("gpu")
        try:
            state = read_state(path, schema=_LAUNCHER_SCHEMA) or {}
        except (OSError, ApplianceError):
            continue  # not understood is not known; `appliance status` names it
        if number.isascii() and number.isdecimal() and _runs(state.get("pid")):
            found.add(int(number))
    return found


def check_row(check: Check) -> Document:
    return {"name": check.name, "status": str(check.status), "reason": check.reason, "value": check.value}


def worst(rows: Iterable[Document]) -> Status:
    """The status of the worst check. No checks: unknown."""
    found = [Status(row["status"]) for row in rows]
    return max(found, key=_ORDER.index) if found else Status.UNKNOWN


def chosen(document: Document, gpus: Iterable[int], paths: Paths) -> list[Document]:
    """The entries of these slots, of all if none is named. UsageError for one that is not there."""
    rows = {row["gpu"]: row for row in document["gpus"]}
    wanted = list(dict.fromkeys(gpus)) or list(rows)
    missing = [number for number in wanted if number not in rows]
    if missing:
        bound = ", ".join(map(str, sorted(read_slots(paths.gpus)))) or "none"
        raise UsageError(f"no GPU slot {', '.join(map(str, missing))}; bound: {bound}", hint="see `healthcheck status`")
    return [rows[number] for number in wanted]

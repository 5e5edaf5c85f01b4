"""What the state files say of the canary's run and its controller, and of the watchdog, for `appliance status`. Reads
files only: no socket, no NVML; works while what it tells of is down."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypeGuard

from appliance.paths import Paths
from appliance.statefile import read_state

Document = dict[str, Any]
SILENT_SECONDS = 30.0  # a controller says every 10 s, and every 5 s in a run, that it lives (canary/controller.py)
_SCHEMA = 1
_ENDED = ("settled", "aborted", "failed")  # canary/run.py:ENDED
_CARRIES_NONE = ("rolling_back", "settling")  # canary/goals.py: the weight of its step is no goal any more
_SHOWN = ("release", "stable", "phase", "stage", "weight", "paused", "held", "reason")


def canary(paths: Paths) -> Document | None:
    """The present or last run; None: there was none. `controller.alive` is null where it has not said anything since
    the boot. StateError for a file that cannot be understood."""
    run = read_state(paths.canary_run, schema=_SCHEMA)
    if run is None:
        return None
    said = read_state(paths.canary_alive, schema=_SCHEMA) or {}
    at = said.get("at")
    seen = float(at) if _is_number(at) else None
    silent = None if seen is None else round(max(0.0, time.time() - seen), 1)
    controller = {"seen": seen, "alive": None if silent is None else silent <= SILENT_SECONDS}
    on = run.get("phase") not in _ENDED
    shown = {"run": run.get("id"), "on": on} | {key: run.get(key) for key in _SHOWN}
    return shown | _said_of(run, said if on and controller["alive"] else {}) | {"controller": controller}


def _said_of(run: Document, said: Document) -> Document:
    """What the controller says of this run beside its file, which a full disk may keep from being written. `rule`: the
    share that the kernel was last seen to give it, null where that is not known."""
    if said.get("run") != run.get("id") or not isinstance(said.get("phase"), str):
        return {"rule": None}
    rule, weight = (said.get(key) if _is_number(said.get(key)) else None for key in ("rule", "weight"))
    return {"phase": said["phase"], "weight": weight, "rule": rule}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def watchdog(paths: Paths, root: Path = Path("/")) -> Document | None:
    """None: it has said nothing since the boot."""
    state = read_state(paths.watchdog_state, schema=_SCHEMA)
    if state is None:
        return None
    pid = state.get("pid")
    known = type(pid) is int and pid > 0
    return {"pid": pid if known else None, "running": (root / "proc" / str(pid)).is_dir() if known else None}


def problems(canary: Document | None, watchdog: Document | None) -> list[str]:
    """Pure, a line each."""
    found = []
    if canary is not None and canary["on"] and not canary["controller"]["alive"]:
        found.append(
            f"{describe(canary)}: its controller does not run, so nobody watches it: `canary rollback` ends it all the"
            f" same; `systemctl status appliance-canary` says why"
        )
    if watchdog is not None and watchdog["running"] is False:
        found.append("the watchdog does not run: `systemctl status appliance-watchdog` says why")
    return found


def describe(canary: Document) -> str:
    """One line: which run, and where it stands."""
    phase = str(canary["phase"]).replace("_", " ")
    words = f"canary run {canary['run']} of {canary['release']} against {canary['stable']}: {phase}"
    if canary["on"]:
        words += f", {_share(canary)}"
        words += ", paused" if canary["paused"] else ", waits for `canary promote`" if canary["held"] else ""
    return words


def _share(canary: Document) -> str:
    """Of new connections: what the rule gives it, and what it should, where that is something else."""
    weight, rule = canary["weight"], canary["rule"]
    given = "rule unknown" if rule is None else f"rule {rule:g} % of new connections"
    if canary["phase"] in _CARRIES_NONE or not _is_number(weight):
        return given
    return f"{weight:g} % of new connections" if rule == weight else f"set {weight:g} %, {given}"

"""What runs on this host, gathered from state files, /proc, cgroups and the gateways' admin sockets. Changes nothing.

`read_status` gives the JSON document of `appliance status --json` (schema 1; keys are only ever added). Whatever cannot
be found out is null, with the reason in an `error` beside it, never a zero.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance import __version__, service_facts
from appliance.admin_http import AdminError, NotRunning, get_json
from appliance.gpus import read_slots
from appliance.log import ApplianceError
from appliance.paths import SLOT_NAMES, Paths
from appliance.slots import pointer
from appliance.statefile import read_bounded, read_state

SCHEMA = 1
_MOVING = ("starting", "loading", "ready", "backoff", "draining", "stopping")  # appliance/launcher/lifecycle.py
_STATE_SCHEMA = 1  # of the launchers' state files and of drain.json

Document = dict[str, Any]


def read_status(paths: Paths, root: Path = Path("/")) -> Document:
    """The whole document; `root` has proc and sys below it (tests)."""
    problems: list[str] = []
    slots = {slot: _attempt(lambda slot=slot: pointer(paths, slot), problems, slot) for slot in SLOT_NAMES}
    gateways = [_gateway(paths, slot) for slot in SLOT_NAMES]
    host = {"name": os.uname().nodename, "drain": _attempt(lambda: _drain(paths), problems, "drain.json")}
    bound = _attempt(lambda: read_slots(paths.gpus), problems, "gpus.json") or {}
    gpus = [_gpu(paths, root, number, bound.get(number), gateways) for number in _numbers(paths, bound)]
    document = {
        "schema": SCHEMA,
        "ts": round(time.time(), 3),
        "version": __version__,
        "host": host,
        "slots": slots,
        "gpus": gpus,
        "gateways": gateways,
        "canary": _attempt(lambda: service_facts.canary(paths), problems, "canary.json"),
        "watchdog": _attempt(lambda: service_facts.watchdog(paths, root), problems, "watchdog.json"),
    }
    problems += find_problems(document)
    return document | {"ok": not problems, "problems": problems}


def _attempt(read: Any, problems: list[str], what: str) -> Any:
    try:
        return read()
    except ApplianceError as error:
        problems.append(error.message)
    except OSError as error:
        problems.append(f"{what}: {error.strerror}")
    return None


def _drain(paths: Paths) -> Document | None:
    state = read_state(paths.host_drain, schema=_STATE_SCHEMA)
    return None if state is None else {"reason": state.get("reason"), "since": state.get("since")}


def _numbers(paths: Paths, bound: dict[int, Any]) -> list[int]:
    """Bound slots, and those that a launcher runs for without one (which is a problem to show)."""
    found = set(bound)
    for directory in paths.run.glob("gpu*") if paths.run.is_dir() else ():
        number = directory.name.removeprefix("gpu")
        if number.isascii() and number.isdecimal() and len(number) < 5 and (directory / "state.json").exists():
            found.add(int(number))
    return sorted(found)


def _gpu(paths: Paths, root: Path, number: int, entry: Document | None, gateways: list[Document]) -> Document:
    document: Document = {"gpu": number, "uuid": (entry or {}).get("uuid"), "error": None}
    document["ledger"] = entry and {key: entry.get(key) for key in ("state", "reason", "since", "needs")}
    state: Document | None = None
    try:
        state = read_state(paths.launcher_state(number), schema=_STATE_SCHEMA)
        holds = read_state(paths.holds(number), schema=_STATE_SCHEMA) if state is None else state
    except ApplianceError as error:
        document["error"], holds = error.message, None
    except OSError as error:
        document["error"], holds = f"gpu{number}: {error.strerror}", None
    state = state or {}
    alive = _alive(root, state.get("pid"))
    document["launcher"] = {
        "running": alive,
        "pid": state.get("pid") if alive else None,
        "since": state.get("since") if alive else None,
        "status": state.get("status") if alive else None,
    }
    document["holds"] = _holds((holds or {}).get("holds"))
    engines = state.get("engines") if alive else []
    document["engines"] = [
        _engine(root, number, engine, gateways)
        for engine in (engines if isinstance(engines, list) else [])
        if isinstance(engine, dict)
    ]
    document["state"] = _state(document)
    return document


def _holds(holds: Any) -> list[Document]:
    """Holds as a list, oldest first."""
    found = []
    for owner, hold in holds.items() if isinstance(holds, dict) else ():
        hold = hold if isinstance(hold, dict) else {}
        found.append({"owner": owner} | {key: hold.get(key) for key in ("level", "reason", "since")})
    return sorted(found, key=lambda hold: (_number(hold["since"]) or 0.0, hold["owner"]))


def _engine(root: Path, number: int, engine: Document, gateways: list[Document]) -> Document:
    keys = ("release", "model", "engine_version", "state", "admitted", "restarts", "last_exit", "progress", "problem")
    document = {key: engine.get(key) for key in (*keys, "retry_at", "since", "pid", "scope", "unknown_limits")}
    in_flight = [_in_flight(gateway, number, engine.get("release")) for gateway in gateways if gateway["up"]]
    known = [count for count in in_flight if count is not None]
    document["in_flight"] = sum(known) if known and len(known) == len(in_flight) else None
    return document | {"memory": scope_memory(root, engine.get("pid"))}


def _in_flight(gateway: Document, number: int, release: Any) -> int | None:
    """Requests of one engine in one gateway; 0 if the gateway answers and does not name it."""
    total = 0
    for engine in gateway["engines"]:
        if engine.get("gpu") == number and engine.get("release") == release:
            count = engine.get("in_flight")
            if type(count) is not int:
                return None
            total += count
    return total


def scope_memory(root: Path, pid: Any) -> Document | None:
    """Memory of the cgroup of a process (its scope): bytes used, limit, kills by the OOM killer."""
    if type(pid) is not int:
        return None
    try:
        lines = read_bounded(root / "proc" / str(pid) / "cgroup", 1 << 16).decode(errors="replace").splitlines()
        path = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
        directory = root / "sys/fs/cgroup" / path.lstrip("/")
        limit = read_bounded(directory / "memory.max", 64).decode().strip()
        events = read_bounded(directory / "memory.events", 4096).decode().split()
        return {
            "bytes": int(read_bounded(directory / "memory.current", 64)),
            "max_bytes": None if limit == "max" else int(limit),
            "oom_kills": int(events[events.index("oom_kill") + 1]),
        }
    except (OSError, ValueError, IndexError, StopIteration, ApplianceError):
        return None  # it ended meanwhile, or cgroup v1: unknown


def _gateway(paths: Paths, slot: str) -> Document:
    document: Document = {"slot": slot, "up": False, "ready": None, "reason": None, "in_flight": None, "waiting": None}
    document |= {"engines": [], "error": None}
    try:
        state = get_json(paths.gateway_socket(slot), "/state")  # counts, of all its workers
        health = get_json(paths.gateway_socket(slot), "/health", statuses=(200, 503))  # would it serve now?
    except NotRunning:
        return document
    except AdminError as error:
        return document | {"error": error.message}
    document["engines"] = list(_engines_of(state))
    status = health.get("status")
    document["ready"] = status == "ready" if isinstance(status, str) else None
    for key in ("in_flight", "waiting"):
        document[key] = state[key] if type(state.get(key)) is int else None
    return document | {"up": True, "reason": health.get("reason")}


def _engines_of(state: Document) -> Iterator[Document]:
    """gpu, release, in_flight of each engine that a gateway knows."""
    gpus = state.get("gpus")
    for gpu in gpus if isinstance(gpus, list) else ():
        engines = gpu.get("engines") if isinstance(gpu, dict) else None
        for engine in engines if isinstance(engines, list) else ():
            if isinstance(engine, dict):
                yield {"gpu": gpu.get("gpu")} | {key: engine.get(key) for key in ("release", "in_flight")}


def _alive(root: Path, pid: Any) -> bool:
    return type(pid) is int and pid > 0 and (root / "proc" / str(pid)).is_dir()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _state(gpu: Document) -> str:
    """One word: serving, held, starting, idle (no release), failed, down (no launcher), unknown."""
    if gpu["error"]:
        return "unknown"
    if not gpu["launcher"]["running"]:
        return "down"
    if gpu["holds"]:
        return "held"
    states = [engine["state"] for engine in gpu["engines"]]
    if any(engine["admitted"] is True for engine in gpu["engines"]):
        return "serving"
    if any(state in _MOVING for state in states):
        return "starting"
    return "failed" if "failed" in states else "idle"


def find_problems(document: Document) -> list[str]:
    """Why not everything serves, a line each; empty if everything does. Pure."""
    problems = []
    if document["host"]["drain"]:
        problems.append(f"the host is drained: {document['host']['drain']['reason']}")
    if not document["gpus"]:
        problems.append("no GPU slots; see `appliance gpus bind`")
    if document["slots"]["stable"] is None:
        problems.append("no stable release; see `appliance release use`")
    for gpu in document["gpus"]:
        problems += _problems_of(gpu, document["slots"])
    for gateway in document["gateways"]:
        name = f"gateway {gateway['slot']}"
        if gateway["error"]:
            problems.append(f"{name}: {gateway['error']}")
        elif not gateway["up"]:
            problems.append(f"{name} is not running")
        elif gateway["ready"] is False and document["slots"][gateway["slot"]] and not document["host"]["drain"]:
            problems.append(f"{name} is not ready: {gateway['reason'] or 'no engine of its release is admitted'}")
    return problems + service_facts.problems(document["canary"], document["watchdog"])


def _problems_of(gpu: Document, slots: dict[str, str | None]) -> list[str]:
    name = f"gpu {gpu['gpu']}"
    if gpu["error"]:
        return [f"{name}: {gpu['error']}"]
    if not gpu["launcher"]["running"]:
        return [
            f"{name}: its launcher is not running: `appliance start {gpu['gpu']}`; `systemctl status "
            f"appliance-gpu@{gpu['gpu']}` says why it stopped"
        ]
    if gpu["holds"]:
        return [f"{name} is held by {hold['owner']}: {hold['reason']}" for hold in gpu["holds"]]
    problems = [] if gpu["uuid"] else [f"{name} is in no slot; see `appliance gpus list`"]
    # Compared one by one: in a file that somebody damaged a release may be a list, which no set takes.
    serving = [engine["release"] for engine in gpu["engines"] if engine["admitted"] is True]
    # With exclusive placement a GPU serves one of the two releases, so either is enough here; a canary that no GPU
    # serves shows as a gateway that is not ready.
    if slots["stable"] and not any(name in serving for name in slots.values() if name):
        problems.append(f"{name} does not serve {slots['stable']}: {gpu['launcher']['status'] or gpu['state']}")
    return problems

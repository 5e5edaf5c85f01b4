"""`healthcheck history`: the events of this host that are about GPUs and the watchdog."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from appliance.arguments import add_common, bound_gpus, gpu_number, set_epilog
from appliance.events import read_events
from appliance.gpus import read_slots
from appliance.log import ExitCode, emit_json, printable
from appliance.paths import Paths
from appliance.statefile import StateError

EPILOG = """\
Oldest first, from /var/lib/appliance/events.jsonl; `jq` reads that file as well.
JSON: {"schema": 1, "events": [{"ts", "event", ...}]}
"""
PREFIX = "watchdog_"
_RESET = "gpu-reset"  # events of the reset unit (reset.py), which knows the UUID only
_TRANSITIONS = {
    f"{PREFIX}{name}" for name in ("transition", "alert", "reset", "set_healthy", "maintenance", "adopted", "started")
}
_SKIPPED = ("ts", "event", "pid")


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("--gpu", type=gpu_number, metavar="GPU", help="only this slot")
    parser.add_argument("--transitions", action="store_true", help="changes of state, resets, people and alerts only")
    parser.add_argument("-n", "--lines", type=_count, default=50, metavar="N", help="the last N (%(default)s); 0: all")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise argparse.ArgumentTypeError("wants a number from 0 on")
    return int(text)


def run(args: argparse.Namespace) -> int:
    paths = Paths.default()
    slots = _slots(paths)
    if slots is not None and args.gpu is not None:
        bound_gpus([args.gpu], paths.gpus)
    found = (event for event in _events(paths, args.gpu, slots or {}) if not args.transitions or _is_transition(event))
    events = deque(found, maxlen=args.lines or None)
    if args.json:
        emit_json({"schema": 1, "events": list(events)})
        return ExitCode.DONE
    for event in events:
        words = " ".join(f"{key}={value}" for key, value in event.items() if key not in _SKIPPED)
        when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(event["ts"]))
        print(printable(f"{when}  {event['event'].removeprefix(PREFIX)}  {words}"))
    return ExitCode.DONE


def _slots(paths: Paths) -> dict[str, int] | None:
    """UUID -> slot; None where the ledger is damaged: what happened is to be seen all the same."""
    try:
        return {entry["uuid"]: slot for slot, entry in read_slots(paths.gpus).items()}
    except StateError as error:
        print(f"{error.message}: resets, which know the UUID only, are not told by slot", file=sys.stderr)
        return None


def _is_transition(event: dict[str, Any]) -> bool:
    return event["event"] in _TRANSITIONS


def _events(paths: Paths, gpu: int | None, slots: dict[str, int]) -> Iterator[dict[str, Any]]:
    for event in read_events(paths.events):
        name, at = event.get("event"), event.get("ts")
        mine = isinstance(name, str) and name.startswith((PREFIX, _RESET)) and isinstance(at, (int, float))
        whose = event.get("gpu", slots.get(str(event.get("uuid"))))
        if mine and (gpu is None or whose == gpu):
            yield event

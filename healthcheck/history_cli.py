"""`healthcheck history`: the events of this host that are about GPUs and the watchdog."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from appliance.arguments import add_common, gpu_number, set_epilog
from appliance.events import read_events
from appliance.gpus import read_slots
from appliance.log import ExitCode, emit_json, printable
from appliance.paths import Paths

EPILOG = """\
Oldest first, from /var/lib/appliance/events.jsonl; `jq` reads that file as well.
JSON: {"schema": 1, "events": [{"ts", "event", ...}]}
"""
PREFIX = "watchdog_"
_RESET = "gpu-reset"  # events of the reset unit (reset.py), which knows the UUID only
_SKIPPED = ("ts", "event", "pid")


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("--gpu", type=gpu_number, metavar="GPU", help="only this slot")
    parser.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="the last N (%(default)s); 0: all")


def run(args: argparse.Namespace) -> int:
    events = deque(_events(Paths.default(), args.gpu), maxlen=args.lines or None)
    if args.json:
        emit_json({"schema": 1, "events": list(events)})
        return ExitCode.DONE
    for event in events:
        words = " ".join(f"{key}={value}" for key, value in event.items() if key not in _SKIPPED)
        when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(event["ts"]))
        print(printable(f"{when}  {event['event'].removeprefix(PREFIX)}  {words}"))
    return ExitCode.DONE


def _events(paths: Paths, gpu: int | None) -> Iterator[dict[str, Any]]:
    slots = {entry["uuid"]: slot for slot, entry in read_slots(paths.gpus).items()}
    for event in read_events(paths.events):
        name, at = event.get("event"), event.get("ts")
        mine = isinstance(name, str) and name.startswith((PREFIX, _RESET)) and isinstance(at, (int, float))
        whose = event.get("gpu", slots.get(str(event.get("uuid"))))
        if mine and (gpu is None or whose == gpu):
            yield event

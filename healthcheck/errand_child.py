"""`python -P -m healthcheck.errand_child`: one thing that may take long or hang, done beside the watchdog's loop.

One JSON object on stdin, one on stdout: {"ok": true, ...} or {"ok": false, "error": text}. The parent (errands.py) has
a deadline and kills this process when it is late, so nothing here needs one of its own.

  warmup   {"socket", "model", "prompt", "timeout"}   three inferences 200 ms apart, as a client asks -> {"seconds"}
  verify   {"root", "socket", "release"}   golden answers and checksum of the weights, against the release's file
                                           -> {"verdict", "weights_differ", "logits_differ", "details", ...}
  start    {"unit", "root", "uuid"}        systemctl start --no-block, unless that is not needed any more
  unit     {"unit"}                        -> {"active": ActiveState, "result": Result}   (systemctl show)
  running  {"units"}                       -> {"running": those that have not ended}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError
from healthcheck.nvml_protocol import die_with_parent

UNRECORDED = "unrecorded"  # a verdict: the weights are what was loaded, and there are no answers to compare
WARMUPS = 3
WARMUP_PAUSE = 0.2  # seconds between two of them
WARMUP_TOKENS = 16
_SYSTEMCTL_SECONDS = 10.0
_RUNNING = ("active", "activating", "deactivating", "reloading")


def warmup(request: dict[str, Any]) -> dict[str, Any]:
    """The same prompt each time: an engine that is exact gives the same text each time."""
    from appliance.engine_calls import EngineCalls

    engine, texts, seconds = EngineCalls(Path(request["socket"])), [], []
    for number in range(WARMUPS):
        if number:
            time.sleep(WARMUP_PAUSE)
        begun = time.monotonic()
        texts.append(engine.complete(request["model"], request["prompt"], WARMUP_TOKENS, request["timeout"]))
        seconds.append(round(time.monotonic() - begun, 4))
    if len(set(texts)) != 1:
        return {"ok": False, "error": f"{WARMUPS} times the same request gave {len(set(texts))} different answers"}
    return {"ok": True, "seconds": seconds}


def verify(request: dict[str, Any]) -> dict[str, Any]:
    from appliance.golden import compare
    from appliance.paths import Paths

    found = compare(Paths.under(Path(request["root"])), request["release"], request["socket"])
    if not found.recorded:
        return _unrecorded(request["socket"], found.reason)
    return {
        "ok": True,
        "verdict": found.verdict.value,
        "device": found.device,
        "weights_differ": found.weights_differ,
        "logits_differ": found.logits_differ,
        "details": list(found.differences),
        "reason": found.reason,
    }


def _unrecorded(socket: str, reason: str | None) -> dict[str, Any]:
    """A release without golden answers (`release add --golden skip`): what was loaded is still what must be there."""
    from appliance.engine_calls import EngineCalls

    weights = EngineCalls(Path(socket)).checksum()
    details = [] if weights["ok"] else [f"the weights in memory are not what was loaded: {weights['actual']}"]
    return {
        "ok": True,
        "verdict": UNRECORDED if weights["ok"] else "different",
        "weights_differ": not weights["ok"],
        "logits_differ": False,
        "details": details,
        "reason": reason,
    }


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Starts the reset, unless it runs (a watchdog that has died began it), or has left its result. In this order: a
    unit that is over has written its result before, so there is no moment at which a second reset follows the first."""
    from appliance.command import check, run
    from appliance.paths import Paths
    from healthcheck.reset_result import read_result

    running = unit(request)["active"] in _RUNNING
    paths = Paths.under(Path(request["root"]))
    if running or read_result(paths, request["uuid"]) is not None:
        return {"ok": True, "started": False}
    argv = ["systemctl", "start", "--no-block", "--", request["unit"]]
    check(run(argv, timeout=_SYSTEMCTL_SECONDS), f"cannot start {request['unit']}")
    return {"ok": True, "started": True}


def unit(request: dict[str, Any]) -> dict[str, Any]:
    from appliance.command import check, run

    argv = ["systemctl", "show", "--property=ActiveState,Result", "--", request["unit"]]
    text = check(run(argv, timeout=_SYSTEMCTL_SECONDS), f"cannot ask for {request['unit']}").text
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {"ok": True, "active": values.get("ActiveState", ""), "result": values.get("Result", "")}


def running(request: dict[str, Any]) -> dict[str, Any]:
    units = [name for name in request["units"] if unit({"unit": name})["active"] in _RUNNING]
    return {"ok": True, "running": units}


OPS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "warmup": warmup,
    "verify": verify,
    "start": start,
    "unit": unit,
    "running": running,
}


def main() -> int:
    request = json.load(sys.stdin)
    die_with_parent()
    if os.getppid() != request["parent"]:  # it had ended before: what it wanted is not wanted any more
        return 1
    try:
        answer = OPS[request["op"]](request)
    except ApplianceError as error:
        answer = {"ok": False, "error": error.message}
    except OSError as error:
        answer = {"ok": False, "error": f"{error.filename or request['op']}: {error.strerror or error}"}
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:  # the watchdog has ended: nobody wants to know
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

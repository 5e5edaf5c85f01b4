"""`healthcheck status`: each GPU's state and why, and what needs a human."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import IO

from appliance.arguments import add_common, set_epilog
from appliance.log import ExitCode, emit_json, paint
from appliance.paths import Paths
from appliance.terminal import age, cut, mark, width_of
from healthcheck.document import Document, launchers, read_document, silence, worst
from healthcheck.types import Status

EPILOG = """\
exit codes: 0 every GPU is healthy and the watchdog runs; 1 something is not (the lines say what)
JSON: the watchdog's state file with "running", "age_seconds", "problems", and "launcher" (bool: it runs) of each GPU;
healthcheck/document.py has its keys.
"""
_GRACE = 5.0  # s: a probe takes its time
_MARKS = {"HEALTHY": "good", "QUARANTINED": "bad", "MAINTENANCE": "held"}
_STATUS_WORDS = {Status.OK: "all checks ok", Status.UNKNOWN: "some checks unknown", Status.DEGRADED: "degraded"}


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)


def run(args: argparse.Namespace) -> int:
    paths = Paths.default()
    document = read_document(paths)
    running = launchers(paths)
    for gpu in document["gpus"]:
        gpu["launcher"] = gpu["gpu"] in running
    document["problems"] = [
        *unbound(document, paths), *unsaved(document, paths), *unlaunched(document), *problems(document),
        *unread(document, time.time()),
    ]  # fmt: skip
    if args.json:
        emit_json(document)
    else:
        print("\n".join(screen(document, sys.stdout, time.time())))
    return ExitCode.FAILED if document["problems"] else ExitCode.DONE


def unbound(document: Document, paths: Paths) -> Iterator[str]:
    """Slots whose launcher runs and that the ledger does not have; no slots at all."""
    known = {gpu["gpu"] for gpu in document["gpus"]}
    if launched := sorted(launchers(paths) - known):
        names = ", ".join(map(str, launched))
        yield f"nobody watches GPU slot {names}, whose launcher runs: gpus.json does not have it; appliance gpus bind"
    elif not known:
        yield "no GPU slot is bound, so no GPU is watched: appliance gpus bind"


def unread(document: Document, now: float) -> Iterator[str]:
    """What a watchdog that runs has not got to know for two probes: unknown is not "all well"."""
    if not document["running"] or document["nvml"] == "off":
        return
    limit = 2 * document.get("probe_interval", 30.0) + _GRACE  # absent: a watchdog of before, until it is restarted
    for gpu in document["gpus"]:
        seconds = now - max(gpu["probed_at"] or 0, document["since"])  # 0: not since it runs
        if seconds > limit and gpu["state"] != "RESETTING":  # NVML is closed for that
            why = next((row["reason"] for row in gpu["checks"] if row["name"] == "NVML"), "NVML does not tell")
            yield f"gpu {gpu['gpu']} has not been read for {age(seconds)}, a fault would not be seen: {why}"
    for row in document["checks"]:  # without the kernel's log NVML's levels stand: that is no problem by itself
        since = row.get("unknown_since") if row["name"] == "GPUs" else None
        if since is not None and now - since > limit:
            yield f"{row['name']} has not been known for {age(now - since)}: {row['reason']}"


def unlaunched(document: Document) -> Iterator[str]:
    """GPUs that nothing serves on, whatever their state: it is the state of the GPU, not of its launcher."""
    for gpu in document["gpus"]:
        if not gpu["launcher"]:
            state = "healthy" if gpu["state"] == "HEALTHY" else gpu["state"]
            yield f"gpu {gpu['gpu']} is {state}, but its launcher is down: systemctl start appliance-gpu@{gpu['gpu']}"


def unsaved(document: Document, paths: Paths) -> Iterator[str]:
    """The ledger is behind: what was told to the watchdog since then goes with it."""
    if document.get("saved", True):  # absent: a watchdog of before, until it is restarted
        return
    why = document.get("unsaved") or "see journalctl -u appliance-watchdog"
    what = "is in force only until the watchdog ends, and nothing is repaired" if document["running"] else "is lost"
    yield f"{paths.gpus} could not be written ({why}): what has changed since {what}; `df -h`"


def problems(document: Document) -> Iterator[str]:
    """One line each, with the next step."""
    if silent := silence(document):
        yield silent
    if document["breaker"]:
        yield f"automation is stopped: {document['breaker']}"
    for gpu in document["gpus"]:
        if gpu["state"] == "QUARANTINED":
            yield (
                f"gpu {gpu['gpu']} is quarantined and needs {gpu['needs'] or 'a human'}: {gpu['reason']}; when it is "
                f"repaired: healthcheck set-healthy {gpu['gpu']} --reason TEXT"
            )
        elif gpu["state"] != "HEALTHY":
            yield f"gpu {gpu['gpu']} is {gpu['state']}: {gpu['reason']}"
        elif worst(gpu["checks"]) is Status.FAILED:
            yield f"gpu {gpu['gpu']} has a failed check: healthcheck check --gpu {gpu['gpu']}"
    for row in document["checks"]:
        if row["status"] == Status.FAILED:
            yield f"{row['name']}: {row['reason']}"


def screen(document: Document, out: IO[str], now: float) -> Iterator[str]:
    """The lines for `out`, cut to its width."""
    width = width_of(out)
    word = "watching" if document["running"] else "NOT RUNNING"
    first = mark("good" if document["running"] else "bad", out)
    yield first + cut(f"watchdog  {word}  {document['status']}", width - 2)
    if maintenance := document["maintenance"]:
        since = age(now - maintenance["since"])
        yield mark("held", out) + cut(f"maintenance for {since}: {maintenance['reason']}", width - 2)
    for gpu in document["gpus"]:
        yield ""
        line = f"gpu {gpu['gpu']}  {gpu['state']}  {gpu['uuid']}"
        yield mark(_MARKS.get(gpu["state"], "busy") if gpu["launcher"] else "bad", out) + cut(line, width - 2)
        for line in _gpu_lines(gpu, now):
            yield cut(f"    {line}", width)
    found = document["problems"]
    if found:
        yield ""
    for problem in found:
        yield paint(cut(f"! {problem}", width), "31", out)


def _gpu_lines(gpu: Document, now: float) -> Iterator[str]:
    since = f"for {age(now - gpu['since'])}" if gpu["since"] else ""  # 0: bound by hand, and nothing happened so far
    if parts := list(filter(None, (since, gpu["reason"]))):
        yield ": ".join(parts)
    state = worst(gpu["checks"])
    bad = [row["name"] for row in gpu["checks"] if row["status"] == state]
    words = _STATUS_WORDS.get(state, "FAILED") + ("" if state is Status.OK else f": {', '.join(bad)}")
    probed = f", NVML {age(now - gpu['probed_at'])} ago" if gpu["probed_at"] else ""
    yield f"{words}{probed}"
    if gpu["share"] < 1 and gpu["state"] == "PROBATION":  # the launcher keeps it where that failed
        yield f"on probation, at {gpu['share']:.0%} of its share"
    if gpu["resets"]:
        yield f"resets that count against its limit: {gpu['resets']}"
    if gpu["phases"]:
        yield "last incident: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in gpu["phases"].items())

"""`appliance status` and `appliance list`: one screen about this host. Reads only; see appliance/status.py."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from appliance.arguments import add_common, seconds, set_epilog
from appliance.log import ExitCode, emit_json, paint, printable
from appliance.paths import Paths
from appliance.service_facts import describe
from appliance.status import Document, read_status
from appliance.terminal import age, binary_bytes, cut, mark, table, width_of

EPILOG = """\
exit codes: 0 everything serves; 1 something is down, held or drained (the last lines say what); --watch: 0
--watch draws in place on a terminal; piped it appends a screen, or with --json a document, each time.
JSON: {"schema": 1, "ok", "problems": [...], "host": {"drain"}, "slots": {"stable", "canary"}, "gpus": [...],
"gateways": [...], "canary": null or {"run", "on", "release", "phase", "weight", "controller": {"alive"}, ...},
"watchdog": null or {"running"}}; keys are only ever added, null is unknown, times are UTC seconds, sizes are bytes.
"""
_MARKS = {"serving": "good", "starting": "busy", "held": "held", "idle": "none", "failed": "bad", "down": "bad"}


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument(
        "--watch", type=seconds(0.2, 3600), nargs="?", const=2.0, metavar="SECONDS", help="show it again and again (2)"
    )


def run(args: argparse.Namespace) -> int:
    if args.watch:
        return _watch(args.watch, as_json=args.json)
    document = read_status(Paths.default())
    _print(document, as_json=args.json)
    return ExitCode.DONE if document["ok"] else ExitCode.FAILED


def _print(document: Document, *, as_json: bool) -> None:
    if as_json:
        emit_json(document)
    else:
        print("\n".join(screen(document, sys.stdout)))


def _watch(seconds: float, *, as_json: bool) -> int:
    """Until interrupted, which is how it ends and no error. On a terminal in place; elsewhere one after the other."""
    in_place = sys.stdout.isatty() and not as_json
    try:
        while True:
            document = read_status(Paths.default())
            if in_place:
                sys.stdout.write("\x1b[H\x1b[2J")
            elif not as_json:
                print(time.strftime("--- %Y-%m-%d %H:%M:%S UTC", time.gmtime(document["ts"])))
            _print(document, as_json=as_json)
            sys.stdout.flush()
            time.sleep(seconds)
    except KeyboardInterrupt:
        if in_place:
            sys.stdout.write("\n")
        return ExitCode.DONE


def screen(document: Document, out: IO[str]) -> Iterator[str]:
    """The lines for `out`, cut to its width."""
    width, now = width_of(out), document["ts"]
    yield from _head(document, out, width)
    for gpu in document["gpus"]:
        yield ""
        name = mark(_MARKS.get(gpu["state"], "bad"), out)
        yield name + cut(f"gpu {gpu['gpu']}  {gpu['state']}  {gpu['uuid'] or 'bound to no slot'}", width - 2)
        for line in _gpu_lines(gpu, now):
            yield cut(f"    {line}", width)
    yield ""
    for gateway in document["gateways"]:
        good = gateway["up"] and gateway["ready"]
        idle = gateway["up"] and not document["slots"][gateway["slot"]]
        yield mark("good" if good else "none" if idle else "bad", out) + cut(_gateway_line(gateway, idle), width - 2)
    if (canary := document["canary"]) is not None and canary["on"]:
        alive = canary["controller"]["alive"]
        words = describe(canary) + ("" if alive else "; its controller does not run")
        yield mark("busy" if alive else "bad", out) + cut(words, width - 2)
    if document["problems"]:
        yield ""
    for problem in document["problems"]:
        yield paint(cut(f"! {problem}", width), "31", out)


def _head(document: Document, out: IO[str], width: int) -> Iterator[str]:
    word = "serving" if document["ok"] else "not everything serves"
    line = f"{document['host']['name']}  {word}  appliance {document['version']}"
    yield mark("good" if document["ok"] else "bad", out) + cut(line, width - 2)
    yield cut(f"  stable {document['slots']['stable'] or '-'}   canary {document['slots']['canary'] or '-'}", width)
    if drain := document["host"]["drain"]:
        yield mark("held", out) + cut(f"drained {_since(drain, document['ts'])}: {drain['reason']}", width - 2)


def _gpu_lines(gpu: Document, now: float) -> Iterator[str]:
    for hold in gpu["holds"]:
        level = "engines stopped" if hold["level"] == "stop" else "drained"
        yield f"held by {hold['owner']} {_since(hold, now)} ({level}): {hold['reason']}"
    ledger = gpu["ledger"]
    if ledger and ledger["state"] not in (None, "HEALTHY"):
        needs = f", needs {ledger['needs']}" if ledger["needs"] else ""
        yield f"watchdog: {ledger['state']} {_since(ledger, now)}: {ledger['reason']}{needs}"
    for engine in gpu["engines"]:
        yield "  ".join(_engine_words(engine, now))
        if engine["problem"]:
            yield f"  takes no requests: {engine['problem']}"
        if isinstance(engine["unknown_limits"], list) and engine["unknown_limits"]:
            yield f"  limits not proven: {', '.join(map(str, engine['unknown_limits']))}"
        if engine["last_exit"]:
            yield f"  last exit: {engine['last_exit']}"
    if gpu["error"]:
        yield gpu["error"]
    elif not gpu["engines"]:
        yield gpu["launcher"]["status"] or "no engine"


def _engine_words(engine: Document, now: float) -> Iterator[str]:
    yield f"{engine['release']}"
    progress = engine["progress"]
    yield f"{engine['state']}" + (f" {100 * progress:.0f} %" if isinstance(progress, float | int) else "")
    if isinstance(engine["retry_at"], float | int):
        yield f"tries again in {age(engine['retry_at'] - now)}"
    elif isinstance(engine["since"], float | int):
        yield f"for {age(now - engine['since'])}"
    yield f"{_shown(engine['in_flight'])} in flight"
    yield f"{_shown(engine['restarts'])} restarts"
    if memory := engine["memory"]:
        limit = f" of {binary_bytes(memory['max_bytes'])}" if memory["max_bytes"] is not None else ""
        killed = f" ({memory['oom_kills']} OOM kills)" if memory["oom_kills"] else ""
        yield f"memory {binary_bytes(memory['bytes'])}{limit}{killed}"


def _gateway_line(gateway: Document, idle: bool) -> str:
    if gateway["error"]:
        return f"gateway {gateway['slot']}  unknown: {gateway['error']}"
    if not gateway["up"]:
        return f"gateway {gateway['slot']}  down"
    ready = {True: "ready", False: "no release" if idle else "not ready", None: "ready?"}[gateway["ready"]]
    counts = f"{_shown(gateway['in_flight'])} in flight  {_shown(gateway['waiting'])} waiting"
    return f"gateway {gateway['slot']}  {ready}  {counts}"


def _shown(value: Any) -> str:
    return "?" if value is None else str(value)


def _since(thing: Document, now: float) -> str:
    since = thing.get("since")
    return f"for {age(now - since)}" if isinstance(since, float | int) else "since an unknown time"


# -- appliance list


def list_rows(document: Document, *, drained: bool) -> list[list[str]]:
    """GPU, UUID, STATE, RELEASE, ENGINE, NOTE: a row for each engine, or one for a GPU without."""
    rows = [["GPU", "UUID", "STATE", "RELEASE", "ENGINE", "NOTE"]]
    for gpu in document["gpus"]:
        if drained and not gpu["holds"]:
            continue
        notes = [f"{h['owner']} {_since(h, document['ts'])}: {h['reason']}" for h in gpu["holds"]]
        note = (
            "; ".join(notes) or gpu["error"] or (gpu["launcher"]["status"] if gpu["state"] != "serving" else "") or ""
        )
        engines = gpu["engines"] or [{"release": "-", "state": "-"}]
        rows += [
            [str(gpu["gpu"]), gpu["uuid"] or "-", gpu["state"], str(engine["release"]), str(engine["state"]), note]
            for engine in engines
        ]
    return rows


def print_list(document: Document, *, drained: bool) -> None:
    rows = list_rows(document, drained=drained)
    if len(rows) == 1:
        print("no GPU is held" if drained else "no GPU slots; bind them: appliance gpus bind")
    else:
        print("\n".join(printable(line) for line in table(rows, width_of(sys.stdout))))
    if drain := document["host"]["drain"]:
        print(printable(f"the host is drained {_since(drain, document['ts'])}: {drain['reason']}"))

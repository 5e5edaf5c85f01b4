"""`canary pause`, `resume`, `promote`, `weight`, `drain`: asked of the controller."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from appliance.arguments import add_common
from appliance.log import ExitCode, UsageError, emit_json, printable
from appliance.paths import Paths
from canary.arguments import duration, run_id, weight
from canary.asking import POLL_SECONDS, Document, ask, read_document
from canary.run import ENDED, MAX_REASON_CHARS
from canary.view import one_line


def reason(text: str) -> str:
    """An argparse type: printable, on one line, not empty."""
    text = printable(text.strip())
    if not 0 < len(text) <= MAX_REASON_CHARS:
        raise argparse.ArgumentTypeError(f"wants 1 to {MAX_REASON_CHARS} characters")
    return text


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    verb = parser.prog.rpartition(" ")[2]
    if verb == "weight":
        parser.add_argument("weight", metavar="PERCENT", type=weight, help="of new connections")
        parser.add_argument("--run", type=run_id, metavar="RUN", help="refused if another one is on")
    else:
        parser.add_argument("run", metavar="RUN", nargs="?", type=run_id, help="refused if another one is on")
    if verb == "pause":
        parser.add_argument("--reason", type=reason, default="by hand", help="shown by status and in the events")
    if verb == "promote":
        parser.add_argument("--full", action="store_true", help="skip all further steps: into service now")
        parser.add_argument("--confirm", type=run_id, metavar="RUN", help="--full: the run, so that it is no accident")
    if verb == "drain":
        parser.add_argument("--wait", action="store_true", help="return when nothing is left")
        parser.add_argument("--timeout", type=duration, default=600.0, metavar="TIME", help="of --wait (10m)")


def run(args: argparse.Namespace) -> int:
    paths = Paths.default()
    match args.command:
        case "pause":
            document = ask(paths, "pause", run=args.run, reason=args.reason)
        case "resume":
            document = ask(paths, "resume", run=args.run)
        case "promote":
            _check_full(paths, args)
            document = ask(paths, "promote", run=args.run, full=args.full)
        case "weight":
            document = ask(paths, "weight", run=args.run, weight=args.weight)
        case _:
            return _drain(paths, args)
    show(document, as_json=args.json)
    return ExitCode.DONE


def show(document: Document, *, as_json: bool) -> None:
    if as_json:
        emit_json(document)
    else:
        print(printable(one_line(document)))


def _check_full(paths: Paths, args: argparse.Namespace) -> None:
    if not args.full:
        return
    number = read_document(paths)["run"]["id"]
    if args.confirm != number:
        raise UsageError(
            "--full skips the analysis", hint=f"if that is what you want: canary promote --full --confirm {number}"
        )


def _drain(paths: Paths, args: argparse.Namespace) -> int:
    deadline, told = time.monotonic() + args.timeout, False
    while True:
        document = read_document(paths, args.run)
        run, live = document["run"], document["live"]
        left, drained = _left(run, live)
        if not args.wait or drained or time.monotonic() >= deadline:
            break
        if not told and run["weight"]:
            told = True
            text = f"run {run['id']} gets {run['weight']:g} % of the new connections: it drains once that is 0"
            print(f"{text} (canary rollback, or weight 0)", file=sys.stderr)
        time.sleep(POLL_SECONDS)
    connections = live.get("draining")
    if args.json:
        document = {"run": run["id"], "requests": left, "connections": connections, "weight": run["weight"]}
        emit_json({"schema": 1, "drained": drained} | document)
    else:
        more = "" if connections is None else f", {connections} connections"
        print(f"run {run['id']}: {'unknown' if left is None else left} requests in work on {run['release']}{more}")
    if args.wait and not drained:
        print("not drained in time", file=sys.stderr)
        return ExitCode.INCONCLUSIVE
    return ExitCode.DONE


def _left(run: dict[str, Any], live: dict[str, Any]) -> tuple[int | None, bool]:
    """(requests in work, None where unknown; whether nothing is there and nothing comes any more)."""
    if run["phase"] in ENDED:
        return 0, True  # its engines are gone, or it is what stable serves
    left = live.get("in_work")
    return left, left == 0 and not run["weight"] and live.get("rule") == 0

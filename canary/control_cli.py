"""`canary pause`, `resume`, `promote`, `weight`, `drain`: asked of the controller."""

from __future__ import annotations

import argparse
import sys
import time

from appliance.arguments import add_common
from appliance.log import ExitCode, UsageError, emit_json, printable
from appliance.paths import Paths
from canary.arguments import duration, run_id, weight
from canary.asking import POLL_SECONDS, Document, ask, read_document
from canary.run import MAX_REASON_CHARS
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
    deadline = time.monotonic() + args.timeout
    while True:
        document = read_document(paths, args.run)
        live, over = document["live"], document["run"]["phase"] in ("settled", "aborted", "failed")
        left = 0 if over else live.get("in_work")
        if not args.wait or left == 0 or time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    if args.json:
        emit_json({"schema": 1, "run": document["run"]["id"], "requests": left, "connections": live.get("draining")})
    else:
        words = "unknown" if left is None else str(left)
        print(f"run {document['run']['id']}: {words} requests in work on the canary's release")
    if args.wait and left != 0:
        print("not drained in time", file=sys.stderr)
        return ExitCode.INCONCLUSIVE
    return ExitCode.DONE

"""`canary status`: one screen about a run; --watch redraws it, --wait returns when it is over."""

from __future__ import annotations

import argparse
import sys
import time

from appliance.arguments import add_common, set_epilog
from appliance.log import ApplianceError, ExitCode, emit_json, printable, report_error
from appliance.paths import Paths
from canary.arguments import duration, run_id
from canary.asking import POLL_SECONDS, Document, offline, read_document, wait_over
from canary.run import ENDED
from canary.store import Damaged, reason_of
from canary.view import one_line, screen
from canary.wiring import real_parts

EPILOG = """\
--watch redraws in place on a terminal, and elsewhere prints a line whenever something changes; both end with the run.
exit codes: 0 shown (--watch, --wait: settled), 1 there is no run (--watch, --wait: rolled back), 3 --wait: timed out,
or it waits for a person
JSON: {"schema": 1, "controller": true|false, "run": {...}, "live": {...}}; times named *_at are UTC seconds, others are
seconds of CLOCK_BOOTTIME, durations are seconds, null is unknown.
"""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("run", metavar="RUN", nargs="?", type=run_id, help="default: the present or last one")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-w", "--watch", action="store_true", help="show it again and again")
    how.add_argument("--wait", action="store_true", help="return when the run is over, or waits for a person")
    parser.add_argument("--timeout", type=duration, default=86400.0, metavar="TIME", help="of --wait (1d)")


def run(args: argparse.Namespace) -> int:
    paths = Paths.default()
    try:
        document = read_document(paths, args.run)
    except Damaged as error:
        return _lost(paths, error, as_json=args.json)
    number = document["run"]["id"]
    if args.watch and not args.json:
        return _watch(paths, number)
    code = ExitCode.DONE
    if args.wait or args.watch:
        document, code = wait_over(paths, number, args.timeout)
    if args.json:
        emit_json(document)
    else:
        print("\n".join(screen(document, sys.stdout)))
    return code


def _lost(paths: Paths, error: Damaged, *, as_json: bool) -> int:
    """No controller, and its file cannot be understood: what the rules say counts."""
    try:
        state = real_parts(paths).rules.read()
        weight, rule = state.weight or 0.0, f"{state.weight or 0.0:g}%"
    except (ApplianceError, OSError) as unknown:
        weight, rule = None, f"unknown: {reason_of(unknown)}"
    report_error(error.message, hint=error.hint)
    if as_json:
        emit_json(offline(None) | {"problem": error.message, "live": {"rule": weight}})
    else:
        print(f"{'Run:':<11} unknown\n{'Weight:':<11} rule {printable(rule)}\n{'Next:':<11} canary rollback")
    return ExitCode.FAILED


def _watch(paths: Paths, number: str) -> int:
    """Of this run, also when a newer one starts. Ctrl-C ends the watching, not the run."""
    shown: list[str] = []
    try:
        while True:
            document = read_document(paths, number)
            shown = _draw(document, shown)
            if document["run"]["phase"] in ENDED:
                return ExitCode.DONE if document["run"]["phase"] == "settled" else ExitCode.FAILED
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ExitCode.DONE


def _draw(document: Document, before: list[str]) -> list[str]:
    """In place on a terminal; else a line when it differs from the one before."""
    if sys.stdout.isatty():
        lines = list(screen(document, sys.stdout))
        sys.stdout.write("\x1b[H\x1b[2J" + "\n".join(lines) + "\n")
    else:
        lines = [printable(one_line(document))]
        if lines != before:
            print(lines[0])
    sys.stdout.flush()
    return lines

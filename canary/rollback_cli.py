"""`canary rollback` (alias abort): works with the controller up, down or hanging.

The wish is written first, durably: whoever controls the run, now or after a restart, acts on it before anything else.
Then the controller is told; where none runs this process takes its lock and does the work; where one holds the lock and
does not answer, the rule is set to 0 from here, and it will do the rest when it comes back to itself.
"""

from __future__ import annotations

import argparse
import sys

from appliance.arguments import add_common, set_epilog
from appliance.log import ApplianceError, BusyError, ExitCode, emit_json, printable, report_error
from appliance.paths import Paths
from appliance.slots import pointer
from canary.arguments import duration, run_id
from canary.asking import Document, ask, read_document, wait_over, whoami
from canary.client import NoController
from canary.control_cli import reason, show
from canary.run import Phase, Run
from canary.seams import Parts
from canary.service import quick_rule, roll_back_here
from canary.store import AbortWish, Store
from canary.wiring import real_parts

EPILOG = """\
New connections go to stable at once; connections that are there keep working, and get the stable release with their
next request. Requests that the canary has in work get --drain to finish, then its engines stop (they give what is left
another engine.drain_timeout).
A promoted release is taken back as well, as long as the engines of the former one are kept (status: settling, bake).
exit codes: 0 rolled back, or on its way (--wait: done), or there was nothing to do: the run had been rolled back
already; 1 failed, 3 --wait: timed out, 4 too late: the run was promoted for good (`canary undo` starts the way back)
"""
_ANSWER_SECONDS = 5.0


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("run", metavar="RUN", nargs="?", type=run_id, help="refused if another one is on")
    parser.add_argument("--reason", type=reason, default="by hand", help="shown by status and in the events")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--drain", type=duration, default=60.0, metavar="TIME", help="for requests in work (60s)")
    how.add_argument("--kill", action="store_true", help="the same as --drain 0s")
    parser.add_argument("--wait", action="store_true", help="return when the release's engines are gone")
    parser.add_argument("--timeout", type=duration, default=600.0, metavar="TIME", help="of --wait (10m)")


def run(args: argparse.Namespace) -> int:
    paths, drain = Paths.default(), 0.0 if args.kill else args.drain
    present = _present(paths, args.run)
    try:
        return _roll_back(paths, present, args, drain)
    except ApplianceError:
        found = Store(paths).load()
        if found is None or found.id != present.id or found.phase not in (Phase.ABORTED, Phase.FAILED):
            raise
        return _nothing_to_do(paths, found, args)  # also where it ended by itself as this was typed


def _nothing_to_do(paths: Paths, found: Run, args: argparse.Namespace) -> int:
    """As with every rollback that comes twice: what it asks for is so."""
    if args.json:
        emit_json(read_document(paths, found.id))
    else:
        stable = pointer(paths, "stable")
        words = f"run {found.id} is over: rolled back ({found.phase}: {found.reason}), stable is {stable}"
        print(printable(f"{words}; nothing to do"))
    return ExitCode.DONE


def _roll_back(paths: Paths, present: Run, args: argparse.Namespace, drain: float) -> int:
    Store(paths).wish_abort(AbortWish(present.id, args.reason, whoami(), drain))
    try:
        document = ask(paths, "rollback", timeout=_ANSWER_SECONDS, run=present.id, reason=args.reason, drain=drain)
    except NoController as error:
        document = _without_controller(paths, present, error, real_parts(paths), args.timeout)
    code = ExitCode.DONE
    if args.wait:
        document, code = wait_over(paths, present.id, args.timeout)
        code = ExitCode.DONE if document["run"]["phase"] in ("aborted", "failed") else code
    show(document, as_json=args.json)
    took = document["live"].get("rule_seconds")
    if took is not None and not args.json:
        print(f"the rule was at 0 after {1000 * took:.0f} ms", file=sys.stderr)
    return code


def _present(paths: Paths, pinned: str | None) -> Run:
    found = Store(paths).load()
    if found is None or pinned not in (None, found.id):
        what = f"run {pinned} is not the present one" if found else "there was no run on this host yet"
        error = ApplianceError(what, hint="`canary list`")
        error.exit_code = ExitCode.REFUSED
        raise error
    return found


def _without_controller(paths: Paths, present: Run, why: NoController, parts: Parts, timeout: float) -> Document:
    try:
        print(f"{printable(why.message)}: rolling back from here", file=sys.stderr)
        roll_back_here(paths, lambda _: parts, timeout)
    except BusyError:
        quick_rule(parts, present)
        report_error(
            "a controller holds the run and does not answer; the rule is at 0, the rest is left to it",
            hint="systemctl restart appliance-canary: it ends the run first of all",
        )
    return read_document(paths, present.id)

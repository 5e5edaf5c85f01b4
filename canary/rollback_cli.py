"""`canary rollback` (alias abort): works with the controller up, down or hanging.

The rule is set to 0 first: the safe direction needs no record, no disk and no controller. Then the wish is written,
durably: whoever controls the run, now or after a restart, acts on it before anything else. A controller that was just
about to put its weight back has the rule set to 0 once more. Then the controller is told; where none runs this process
takes its lock and does the work; one that holds the lock and does not answer will do the rest when it comes back to
itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress

from appliance.arguments import add_common, set_epilog
from appliance.log import ApplianceError, BusyError, ExitCode, emit_json, printable, report_error
from appliance.paths import Paths
from appliance.slots import pointer
from canary.arguments import duration, run_id
from canary.asking import Document, ask, offline, read_document, wait_over, whoami
from canary.client import ControllerError, NoController
from canary.control_cli import reason, show
from canary.happenings import Refused
from canary.run import Phase, Run
from canary.service import roll_back_here
from canary.store import AbortWish, Damaged, Store, reason_of
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
LAST_RESORT = "iptables -t nat -F APPLIANCE-CANARY; ip6tables -t nat -F APPLIANCE-CANARY"
"""Weight 0 with nothing of ours: a chain without a rule sends every new connection to stable."""
_RESTART = "systemctl restart appliance-canary: it ends the run first of all"


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
    _need_root(paths)
    try:
        return _roll_back(paths, args, drain)
    except ApplianceError:
        found = _on_disk(paths)
        if found is None or args.run not in (None, found.id) or found.phase not in (Phase.ABORTED, Phase.FAILED):
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


def _roll_back(paths: Paths, args: argparse.Namespace, drain: float) -> int:
    store = Store(paths)
    present, lost = _present(store, args.run)
    took = _rule_to_zero(paths, present)
    wish = AbortWish(present.id if present else "0", args.reason, whoami(), drain)
    problem = _write_wish(store, wish) if present else None
    if present and took is not None:
        _keep_at_zero(paths, present)
    try:
        document = ask(paths, "rollback", timeout=_ANSWER_SECONDS, run=args.run, reason=args.reason, drain=drain)
    except NoController as error:
        document = _without_controller(paths, wish, error, args.timeout, held_up=took is None)
        problem = problem if document["controller"] else document["problem"]
    except ControllerError as error:
        if lost is None:
            raise
        raise ApplianceError(f"{lost.message}; the controller says: {error.message}", hint=_RESTART) from None
    code = ExitCode.DONE
    if args.wait and document["run"] and not problem:
        document, code = wait_over(paths, document["run"]["id"], args.timeout)
        code = ExitCode.DONE if document["run"]["phase"] in ("aborted", "failed") else code
    if document["run"] or args.json:
        show(document, as_json=args.json)
    if took is not None:
        print(f"the rule was at 0 after {1000 * took:.0f} ms", file=sys.stderr)
    if problem:
        report_error(problem, hint="free some space on that disk (`df -h`), then `canary rollback` again")
        return ExitCode.FAILED
    return ExitCode.FAILED if took is None and not document["controller"] else code


def _need_root(paths: Paths) -> None:
    if os.geteuid() != 0 and not os.access(paths.state, os.W_OK):
        raise Refused("no permission to end a run", hint="run as root")


def _present(store: Store, pinned: str | None) -> tuple[Run | None, Damaged | None]:
    """The run that can be ended; or none and why that is not known."""
    try:
        return store.may_abort(store.load(), pinned), None
    except Damaged as error:
        report_error(error.message)
        return None, error


def _rule_to_zero(paths: Paths, present: Run | None) -> float | None:
    """Before anything else, whatever the disk and the controller say: seconds it took; None: it could not be done."""
    began = time.monotonic()
    try:
        real_parts(paths).rules.set_weight(present.id if present else "0", 0.0)
    except (ApplianceError, OSError) as error:
        report_error(
            f"the rule could not be set to 0 from here: {reason_of(error)}",
            hint=f"last resort, as root: {LAST_RESORT}",
        )
        return None
    return time.monotonic() - began


def _keep_at_zero(paths: Paths, present: Run) -> None:
    """A controller that took the 0 for drift may have put its weight back before it could see the wish."""
    with suppress(ApplianceError, OSError):  # what cannot be read was set to 0 a moment ago
        if real_parts(paths).rules.read().weight:
            _rule_to_zero(paths, present)


def _write_wish(store: Store, wish: AbortWish) -> str | None:
    """On disk, or until a reboot in /run, which is enough: a reboot ends the run. Returns what is wrong if nowhere."""
    try:
        store.wish_abort(wish)
        return None
    except Refused:
        raise
    except (ApplianceError, OSError) as error:
        path, why = store.paths.canary_abort, reason_of(error)
    try:
        store.wish_abort_volatile(wish)
    except OSError as error:
        return f"the wish to end run {wish.run} is nowhere on disk: {path}: {why}; /run: {reason_of(error)}"
    note = f"{path} could not be written: {why}; the wish is in {store.paths.canary_abort_volatile} until a reboot"
    print(f"{printable(note)} (which ends the run as well). Free some space: `df -h`", file=sys.stderr)
    return None


def _on_disk(paths: Paths) -> Run | None:
    try:
        return Store(paths).load()
    except Damaged:
        return None


def _without_controller(paths: Paths, wish: AbortWish, why: NoController, timeout: float, *, held_up: bool) -> Document:
    """`problem`: why the run is not over."""
    try:
        print(f"{printable(why.message)}: rolling back from here", file=sys.stderr)
        controller = roll_back_here(paths, real_parts, timeout, wish=wish)
    except BusyError:
        rule = "it could not be set to 0 from here" if held_up else "the rule is at 0"
        text = f"a controller holds the run and does not answer; {rule}, the rest is left to it"
        report_error(text, hint=_RESTART)
        return offline(_on_disk(paths)) | {"controller": True, "problem": text if held_up else None}
    except OSError as error:
        why_not = f"the rule is at 0, and the run is not ended: {error.filename}: {error.strerror}"
        return offline(None) | {"problem": why_not}
    run, unsaved = controller.run, controller.unsaved
    if run is None:
        print("nothing that the lost run has left is known; no run is on now", file=sys.stderr)
    problem = f"the rule is at 0, and run {run.id} is not ended: {unsaved}" if run and unsaved else None
    return offline(run) | {"problem": problem, "live": {"rule": controller.live.rule}}

"""`canary start`, `check`, `retry`, `undo`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from appliance.arguments import add_common, set_epilog
from appliance.log import ExitCode, UsageError, emit_json, printable
from appliance.paths import Paths
from appliance.statefile import StateError, read_bounded
from appliance.terminal import mark
from appliance.tomlfile import NotToml, parse_toml
from canary.arguments import duration, limit, run_id, share, steps
from canary.asking import Document, ask, wait_over
from canary.client import ControllerError
from canary.store import Store
from canary.view import one_line

EPILOG = """\
examples:
  canary start v2                                      5, 10, 25, 50, 100 % of new connections, 5 minutes each
  canary start v2 --steps 1,10,100 --step-time 10m --limit itl=60ms:1% --limit ttft=500ms:5%
  canary start v2 --manual                             each step waits for `canary promote`
  canary start v2 --blue-green                         0 -> 100 % in one step, judged there
  canary start v2 --no-itl --no-ttft                   of clients that never stream: those two could not be measured
  canary start v2 --wait || echo "not promoted"
What is not given comes from /etc/appliance/canary.toml, then from the defaults. A policy file is TOML with those keys.
exit codes: 0 started (--wait: settled), 1 failed (--wait: rolled back), 2 usage, 3 --wait: timed out, or it waits for a
person, 4 refused by preflight, 5 another run is on
"""
UNDO_EPILOG = """\
While a promoted run still settles (its former engines are kept) this is `canary rollback`: it is taken back at once.
Later it starts a run back to what served before the last settled run: readiness and golden answers, no analysis. So it
is refused for a release that failed or was rolled back since; `canary start` judges that one again.
exit codes: 0 started (--wait: done), 1 failed (--wait: rolled back), 3 --wait: timed out, 4 refused, 5 another run on
"""
_MARKS = {"ok": "good", "warn": "held", "refused": "bad", "unknown": "bad"}
_KEYS = {
    "steps": "steps", "step_time": "step_seconds", "interval": "interval", "warmup": "warmup_seconds",
    "error_rate": "error_rate", "limit": "limits", "alpha": "alpha", "min_requests": "min_requests",
    "min_connections": "min_connections", "on_inconclusive": "on_inconclusive", "deadline": "progress_deadline",
    "cooldown": "cooldown", "settle": "settle_seconds",
}  # fmt: skip


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    verb = parser.prog.rpartition(" ")[2]
    if verb in ("start", "check"):
        set_epilog(parser, EPILOG)
        parser.add_argument("release", metavar="RELEASE", help="a name of `appliance release list`")
        _policy_options(parser)
    if verb == "undo":
        parser.add_argument("--to", type=run_id, metavar="RUN", help="undo that settled run instead of the last one")
        parser.add_argument("--force", action="store_true", help="also to a release that was rolled back since")
        set_epilog(parser, UNDO_EPILOG)
    if verb != "check":
        parser.add_argument("--wait", action="store_true", help="return when the run is over")
        parser.add_argument("--timeout", type=duration, default=86400.0, metavar="TIME", help="of --wait (1d)")


def _policy_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("policy")
    group.add_argument("--policy", type=Path, metavar="FILE", help="TOML with the keys of [policy] in canary.toml")
    group.add_argument("--steps", type=steps, metavar="LIST", help="percent of new connections: 5,10,25,50,100")
    group.add_argument("--blue-green", action="store_true", help="the same as --steps 100")
    group.add_argument("--step-time", "--window", type=duration, metavar="TIME", help="of each step, at least (5m)")
    group.add_argument("--interval", type=duration, metavar="TIME", help="between two judgements (10s)")
    group.add_argument("--warmup", type=duration, metavar="TIME", help="left out of latencies, not of errors (30s)")
    group.add_argument("--error-rate", type=share, metavar="SHARE", help="at most so many requests may fail (0.1%%)")
    group.add_argument(
        "--limit", type=limit, action="append", metavar="METRIC=TIME[:SHARE]",
        help="at most SHARE of itl, ttft or request times may be TIME or longer (itl=80ms:1%%); repeatable",
    )  # fmt: skip
    group.add_argument("--no-itl", action="store_true", help="no limit of itl: only requests that stream have one")
    group.add_argument(
        "--no-ttft", action="store_true",
        help="do not compare the time to first token with stable's: only requests that stream have one",
    )  # fmt: skip
    group.add_argument("--alpha", type=share, metavar="SHARE", help="chance of a false rollback (5%%)")
    group.add_argument("--min-requests", type=int, metavar="N", help="of the canary in each step (300)")
    group.add_argument("--min-connections", type=int, metavar="N", help="of the canary in each step (20)")
    group.add_argument(
        "--on-inconclusive", choices=["extend", "hold", "rollback"], help="at the end of a step's time (extend)"
    )
    group.add_argument("--deadline", type=duration, metavar="TIME", help="without progress: rolled back (1h)")
    group.add_argument("--cooldown", type=duration, metavar="TIME", help="after a failure no run may start (10m)")
    group.add_argument("--settle", type=duration, metavar="TIME", help="the old engines stay after a promotion (60s)")
    parser.add_argument("--manual", action="store_true", help="each step waits for `canary promote`")
    parser.add_argument("--dry-run", action="store_true", help="judge only: no weight changes, nothing is promoted")
    parser.add_argument("--ignore-cooldown", action="store_true", help="start although the last run has just failed")
    parser.add_argument(
        "--other-model-name", action="store_true",
        help="although clients call it otherwise than stable: those that ask for stable's name get 404 from it",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    paths = Paths.default()
    if args.command == "check":
        return _check(paths, args)
    request = _start(args) if args.command == "start" else _undo(args) if args.command == "undo" else {}
    document = ask(paths, args.command, **request)
    number = document["run"]["id"]
    if args.command == "undo":
        document["skipped"] = _left_out(paths)
    for check in document["checks"]:
        if check["status"] == "warn":
            print(f"warning: {printable(check['text'])}", file=sys.stderr)
    if not args.wait:
        return _started(document, args)
    document, code = wait_over(paths, number, args.timeout)
    if document["run"]["reverted"] and document["run"]["phase"] == "aborted" and args.command == "undo":
        code = ExitCode.DONE
    if args.json:
        emit_json(document)
    else:
        print(printable(one_line(document)))
    return code


def _left_out(paths: Paths) -> list[str]:
    """Files of earlier runs that cannot be read: what there was to undo may be in one of them."""
    skipped: list[str] = []
    Store(paths).history(skipped)
    for problem in skipped:
        print(printable(f"left out: {problem}"), file=sys.stderr)
    return skipped


def _started(document: Document, args: argparse.Namespace) -> int:
    found = document["run"]
    if args.json:
        emit_json(document)
    else:
        if found["reverted"]:
            print(f"run {found['id']}: {document['before']} is taken back, {document['after']} serves again")
            return ExitCode.DONE
        shown = ", ".join(f"{weight:g}" for weight in found["policy"]["steps"])
        if found["skip_analysis"]:
            print(f"run {found['id']}: {found['release']} goes into service without analysis, in place of", end=" ")
            print(found["stable"])
        else:
            print(f"run {found['id']}: {found['release']} against {found['stable']}, steps {shown} %")
        print("follow it: canary status --watch", file=sys.stderr)
    return ExitCode.DONE


def _undo(args: argparse.Namespace) -> dict[str, Any]:
    return {"to": args.to, "force": args.force or None}


def _check(paths: Paths, args: argparse.Namespace) -> int:
    try:
        document = ask(paths, "check", **_start(args))
    except ControllerError as error:
        if not args.json or "checks" not in error.reply:
            raise
        document = error.reply
    if args.json:
        emit_json(document)
    for check in () if args.json else document["checks"]:
        words = f"{check['status']:<8} {check['name']:<10} {printable(check['text'])}"
        print(mark(_MARKS[check["status"]], sys.stdout) + words)
        if check["hint"] and check["status"] != "ok":
            print(f"  hint: {printable(check['hint'])}")
    return ExitCode.DONE if document.get("passed") else ExitCode.REFUSED


def _start(args: argparse.Namespace) -> dict[str, Any]:
    """The request."""
    policy: dict[str, Any] = _policy_file(args.policy) if args.policy else {}
    for option, key in _KEYS.items():
        if (value := getattr(args, option)) is not None:
            policy[key] = value
    if args.blue_green:
        if args.steps:
            raise UsageError("--blue-green and --steps exclude each other")
        policy["steps"] = [100]
    if args.no_itl and any(limit["metric"] == "itl" for limit in args.limit or ()):
        raise UsageError("--no-itl and --limit itl exclude each other")
    if args.no_ttft:
        policy["ttft_not_worse"] = False
    return {
        "release": args.release, "policy": policy, "manual": args.manual, "dry_run": args.dry_run,
        "ignore_cooldown": args.ignore_cooldown, "no_itl": args.no_itl, "other_model_name": args.other_model_name,
    }  # fmt: skip


def _policy_file(path: Path) -> dict[str, Any]:
    try:
        table = parse_toml(read_bounded(path, 256 << 10), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except StateError as error:
        raise UsageError(f"--policy: {error.message}", hint="a file of TOML, like canary.toml") from None
    except NotToml as error:
        raise UsageError(error.message, hint=error.hint) from None
    inner = table.get("policy", table)
    return inner if isinstance(inner, dict) else table

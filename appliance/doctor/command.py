"""`appliance doctor`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO

from appliance.arguments import add_common, seconds, set_epilog
from appliance.doctor import install, kernel_log, nvidia, releases, system, watchdog
from appliance.doctor.report import Check, Host, Line, Status, run_checks
from appliance.hostconfig import load_config
from appliance.log import ApplianceError, ExitCode, Progress, emit_json, paint, printable
from appliance.paths import Paths
from appliance.terminal import cut, mark, width_of

GROUPS: dict[str, dict[str, Check]] = {
    "nvidia": nvidia.CHECKS,
    "kernel": kernel_log.CHECKS,
    "system": system.CHECKS,
    "install": install.CHECKS,
    "releases": releases.CHECKS,
    "watchdog": watchdog.CHECKS,
}
_WAITED_FOR: dict[str, dict[str, Check]] = {"nvidia": {"driver": nvidia.driver, "nodes": nvidia.nodes}}
_POLL_SECONDS = 0.5
_COLORS = {Status.OK: "32", Status.DEGRADED: "33", Status.FAILED: "31", Status.UNKNOWN: "35"}
_MARKS = {Status.OK: "good", Status.DEGRADED: "busy", Status.FAILED: "bad", Status.UNKNOWN: "none"}

EPILOG = """\
ok; degraded: it serves, but somebody should mend this; failed: it does not serve as promised; unknown: could not be
found out, which never fails and is never a pass.
exit codes: 0 nothing failed, 1 something failed
"""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("--only", action="append", metavar="GROUP", choices=list(GROUPS), help=", ".join(GROUPS))
    parser.add_argument(
        "--wait",
        type=seconds(0, 3600),
        default=0.0,
        metavar="SECONDS",
        help="at boot: wait as long for driver and device nodes first",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="only what is not ok")


def run(args: argparse.Namespace, make_host: Callable[[], Host] | None = None) -> int:
    make = make_host or default_host
    if args.wait:
        _wait(make, args.wait, quiet=args.json)
    groups = {name: checks for name, checks in GROUPS.items() if not args.only or name in args.only}
    lines = run_checks(groups, make())
    bad = any(line.finding.status is Status.FAILED for line in lines)
    if args.json:
        counts = {str(status): sum(line.finding.status is status for line in lines) for status in Status}
        emit_json({"schema": 1, "ok": not bad, "counts": counts, "checks": [line.as_json() for line in lines]})
    else:
        print("\n".join(text(lines, sys.stdout, quiet=args.quiet)))
    return ExitCode.FAILED if bad else ExitCode.DONE


def default_host() -> Host:
    """This host. A configuration that cannot be used is a finding of its own check, not the end."""
    paths = Paths.default()
    try:
        return Host(paths, load_config(paths.config))
    except ApplianceError:
        return Host(paths, None)


def _wait(make: Callable[[], Host], limit: float, *, quiet: bool) -> None:
    """Until driver and nodes have not failed, or the time is over (then the checks say what is missing)."""
    deadline = time.monotonic() + limit
    progress = Progress(quiet=quiet)
    progress.stage("waiting for driver and device nodes")
    while any(line.finding.status is Status.FAILED for line in run_checks(_WAITED_FOR, make())):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(_POLL_SECONDS, left))
    progress.finish()


def text(lines: list[Line], out: IO[str], *, quiet: bool) -> Iterator[str]:
    """A line for each finding, and one with the fix below what is not ok; then the counts."""
    width = width_of(out)
    name_width = max((len(line.check) for line in lines), default=0)
    for line in lines:
        finding = line.finding
        if quiet and finding.status is Status.OK:
            continue
        word = paint(f"{finding.status:<8}", _COLORS[finding.status], out)
        lead = f"{mark(_MARKS[finding.status], out)}{word}  {line.check:<{name_width}}  "
        yield lead + cut(finding.text, max(20, width - name_width - 14))
        if finding.fix:
            yield " " * 10 + f"fix: {printable(finding.fix)}"
    counts = [f"{sum(line.finding.status is status for line in lines)} {status}" for status in Status]
    yield ", ".join(counts)

"""`appliance logs`: journalctl for our units and scopes. It becomes journalctl: Ctrl-C and the pager work as usual."""

from __future__ import annotations

import argparse
import re
import sys

from appliance.arguments import add_common, bound_gpus, gpu_number, set_epilog
from appliance.command import become
from appliance.log import ApplianceError, UsageError
from appliance.paths import SLOT_NAMES, Paths

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
EPILOG = """\
examples:
  appliance logs -f                        everything, as it comes
  appliance logs --gpu 3 --since "1 hour ago"
  appliance logs --request req-8f3a        what gateways and engines wrote about one request
Exit code: journalctl's; 2 where no such GPU slot is bound.
"""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines come")
    parser.add_argument("--gpu", type=gpu_number, metavar="GPU", help="only this slot's launcher and engines")
    parser.add_argument("--gateway", choices=SLOT_NAMES, help="only this gateway")
    parser.add_argument("--since", metavar="TIME", help='as journalctl takes it: "1 hour ago", "2026-01-31 10:00"')
    parser.add_argument("--until", metavar="TIME")
    parser.add_argument("--request", metavar="ID", help="only lines that name this request (X-Request-Id)")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="the last N lines")


def run(args: argparse.Namespace) -> int:
    if args.gpu is not None:
        try:
            bound_gpus([args.gpu], Paths.default().gpus)
        except UsageError:
            raise
        except (ApplianceError, OSError) as error:  # which are bound is not known: its journal may say why
            print(f"note: {error}", file=sys.stderr)
    become(journalctl(args))


def journalctl(args: argparse.Namespace) -> list[str]:
    """The command line."""
    if args.gpu is not None and args.gateway:
        raise UsageError("--gpu and --gateway exclude each other", hint="without them everything is shown")
    if args.lines is not None and not 0 < args.lines <= 10_000_000:
        raise UsageError("--lines wants a number from 1 to 10000000")
    units = ["appliance-*", "appliance.*"]
    if args.gpu is not None:
        # The journal files what an engine writes under its scope.
        units = [f"appliance-gpu@{args.gpu}.service", f"appliance-gpu{args.gpu}-*.scope"]
    elif args.gateway:
        units = [f"appliance-gateway@{args.gateway}.service"]
    argv = ["journalctl", *(f"--unit={unit}" for unit in units)]
    argv += [f"--output={'json' if args.json else 'short-iso-precise'}"]
    for option, value in (("since", args.since), ("until", args.until), ("lines", args.lines)):
        if value is not None:
            argv.append(f"--{option}={value}")
    if args.request is not None:
        if not _REQUEST_ID.fullmatch(args.request):
            raise UsageError(f"{args.request!r} is no request id", hint="the X-Request-Id of the answer")
        argv += [f"--grep={re.escape(args.request)}", "--case-sensitive=yes"]
    return [*argv, *(["--follow"] if args.follow else [])]

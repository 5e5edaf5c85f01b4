"""`healthcheck policy check`: whether a policy can be used, before the watchdog is restarted with it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from appliance.arguments import add_common, set_epilog
from appliance.log import ExitCode, UsageError, emit_json
from appliance.paths import Paths
from healthcheck.limits import read_limits
from healthcheck.policy import load_policy
from healthcheck.policy_review import warnings

EPILOG = """\
Without FILE: /etc/appliance/healthcheck.toml, where there is one, on top of what is shipped.
exit codes: 0 it can be used, perhaps with warnings; 4 it cannot, the message names the row
"""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("verb", choices=("check",))
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="an override, like healthcheck.toml")


def run(args: argparse.Namespace) -> int:
    path = args.file or Paths.default().healthcheck_config
    if args.file is not None and not path.exists():
        raise UsageError(f"there is no {path}")
    policy = load_policy(path)
    read_limits(policy.limits)
    overridden = path.exists()
    warned = list(warnings(policy, load_policy()))
    if args.json:
        file = str(path) if overridden else None
        emit_json({"schema": 1, "file": file, "rules": len(policy.rules), "ok": True, "warnings": warned})
    else:
        for warning in warned:
            print(f"warning: {warning}", file=sys.stderr)
        where = f"with {path}" if overridden else "as shipped; nothing is overridden"
        print(f"ok: {len(policy.rules)} rules, {where}")
    return ExitCode.DONE

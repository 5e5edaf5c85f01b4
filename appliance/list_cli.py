"""`appliance list`: a line for each GPU and engine, for eyes and for `grep`."""

from __future__ import annotations

import argparse

from appliance.arguments import add_common, set_epilog
from appliance.log import ExitCode, emit_json
from appliance.paths import Paths
from appliance.status import read_status
from appliance.status_cli import print_list

EPILOG = """\
exit codes: 0 listed (whatever the state is; `appliance status` judges)
"""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("--drained", action="store_true", help="only GPUs that somebody holds, with reason and age")


def run(args: argparse.Namespace) -> int:
    document = read_status(Paths.default())
    if args.json:
        gpus = [gpu for gpu in document["gpus"] if gpu["holds"] or not args.drained]
        emit_json({"schema": document["schema"], "host": document["host"], "gpus": gpus})
    else:
        print_list(document, drained=args.drained)
    return ExitCode.DONE

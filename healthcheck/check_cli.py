"""`healthcheck check`: has the watchdog look at the GPUs now, and shows every check with its reason."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from appliance.arguments import add_common, gpu_number, seconds, set_epilog
from appliance.control import WatchdogClient
from appliance.log import ExitCode, emit_json, paint
from appliance.paths import Paths
from appliance.terminal import table, width_of
from healthcheck.document import Document, chosen, read_document, silence, worst
from healthcheck.types import Status

EPILOG = """\
exit codes: 0 nothing failed, 1 something failed, 3 nothing failed but something is unknown; 3 also where the watchdog
does not run or has gone silent (--cached): what it saw last is no news of these GPUs
JSON: {"schema": 1, "status", "running", "age_seconds", "silence": text | null,
 "checks": [...], "gpus": [{"gpu", "uuid", "state", "status", "checks": [...]}]}
"""
_COLORS = {Status.OK: "32", Status.DEGRADED: "33", Status.FAILED: "31", Status.UNKNOWN: "2"}
_CODES = {Status.FAILED: ExitCode.FAILED, Status.UNKNOWN: ExitCode.INCONCLUSIVE}


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("--gpu", type=gpu_number, action="append", default=[], metavar="GPU", help="only this slot")
    parser.add_argument("--cached", action="store_true", help="what the watchdog saw last; needs no root")
    parser.add_argument("--golden", action="store_true", help="compare the golden answers and weights as well")
    parser.add_argument("--timeout", type=seconds(1, 3600), default=60.0, metavar="SECONDS", help="(%(default)g)")


def run(args: argparse.Namespace) -> int:
    paths = Paths.default()
    chosen(read_document(paths), args.gpu, paths)  # wrong numbers are said before anything is asked
    if args.cached:
        document = read_document(paths)
    else:
        document = WatchdogClient(paths).call("check", golden=args.golden, timeout=args.timeout)["state"]
        document |= {"running": True, "age_seconds": 0.0}
    silent = silence(document)
    gpus = chosen(document, args.gpu, paths)
    rows = [*([] if args.gpu else document["checks"]), *(row for gpu in gpus for row in gpu["checks"])]
    status = worst(rows)
    if args.json:
        listed = [
            {key: gpu[key] for key in ("gpu", "uuid", "state", "checks")} | {"status": str(worst(gpu["checks"]))}
            for gpu in gpus
        ]
        said = {"running": document["running"], "age_seconds": document["age_seconds"], "silence": silent}
        emit_json({"schema": 1, "status": str(status), **said, "checks": document["checks"], "gpus": listed})
    else:
        if silent is not None:
            word = "SILENT" if document["running"] else "NOT RUNNING"
            print(paint(f"{word}: {silent}", "31", sys.stdout))
        print("\n".join(_lines(document, gpus, hosts=not args.gpu)))
    if silent is not None:
        return ExitCode.INCONCLUSIVE
    if status is Status.DEGRADED and any(row["status"] == Status.UNKNOWN for row in rows):
        return ExitCode.INCONCLUSIVE
    return _CODES.get(status, ExitCode.DONE)


def _lines(document: Document, gpus: list[Document], *, hosts: bool) -> Iterator[str]:
    groups = [("host", document["checks"])] if hosts and document["checks"] else []
    groups += [(f"gpu {gpu['gpu']}", gpu["checks"]) for gpu in gpus]
    rows = [["WHERE", "CHECK", "STATUS", "REASON"]]
    rows += [[where, row["name"], row["status"], row["reason"]] for where, found in groups for row in found]
    for number, line in enumerate(table(rows, width_of(sys.stdout))):
        status = Status(rows[number][2]) if 0 < number < len(rows) else None
        word = f"  {status}" if status is not None else ""
        yield line.replace(word, f"  {paint(str(status), _COLORS[status], sys.stdout)}", 1) if status else line

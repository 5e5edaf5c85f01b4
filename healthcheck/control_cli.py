"""`healthcheck set-healthy | maintenance | inject-fault`: telling the watchdog something, over its control socket."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.arguments import add_common, bound_gpus, gpu_number, set_epilog
from appliance.control import WatchdogClient
from appliance.log import ApplianceError, ExitCode, UsageError, emit_json, printable
from appliance.paths import Paths

MAX_REASON_CHARS = 500
EPILOGS = {
    "set-healthy": """\
Ends a quarantine (or an incident that hangs): the GPU is verified, and then serves again; its attempts are forgotten.
Refused while the watchdog is at work on this GPU, or while its reset unit has not ended.
examples:
  healthcheck set-healthy 3 --reason "board swapped, ticket 4711"
""",
    "maintenance": """\
While it is on, the watchdog probes and shows, and acts on nothing: for driver upgrades and work at the machine. A reset
that runs ends first, and until then "off" is refused.
examples:
  healthcheck maintenance on --reason "driver 580.95"
  healthcheck maintenance off --reason "done"
""",
    "inject-fault": """\
Only where the watchdog was started for tests (--test or --scripted-nvml), and only with --i-know: the GPU is drained,
its engine is stopped and the GPU is reset, as the policy says for that signal.
examples:
  healthcheck inject-fault 0 xid:48 --i-know
""",
}
EXIT_CODES = (
    "exit codes: 0 done, 1 failed, or in force and not saved, 2 usage, 3 not known, 4 refused, 5 busy: a reset runs\n"
)


class Refused(ApplianceError):
    exit_code = ExitCode.REFUSED


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    command = parser.prog.split()[-1]
    set_epilog(parser, EPILOGS[command] + EXIT_CODES)
    if command == "maintenance":
        parser.add_argument("switch", choices=("on", "off"))
    else:
        parser.add_argument("gpu", metavar="GPU", type=gpu_number, help="slot number")
    if command == "inject-fault":
        parser.add_argument("key", help="a signal as the policy names it: xid:48, ecc:uncorrected, golden:mismatch ...")
        parser.add_argument("--detail", type=_reason, default="injected by hand", help="what to say of it")
        parser.add_argument("--i-know", action="store_true", help="that this takes a GPU out of service")
    else:
        parser.add_argument("--reason", required=True, type=_reason, help="kept in the history")


def _reason(text: str) -> str:
    reason = printable(text.strip())
    if not 0 < len(reason) <= MAX_REASON_CHARS:
        raise argparse.ArgumentTypeError(f"wants 1 to {MAX_REASON_CHARS} characters")
    return reason


def run(args: argparse.Namespace) -> int:
    paths = Paths.default()
    request = _request(args, paths)
    reply = WatchdogClient(paths).call(**request)
    if args.json:
        emit_json({"schema": 1, "verb": args.command} | {key: value for key, value in reply.items() if key != "ok"})
    else:
        print(printable(str(reply.get("note", "done"))))
    return ExitCode.DONE


def _request(args: argparse.Namespace, paths: Paths) -> dict[str, Any]:
    if args.command == "maintenance":
        return {"op": "maintenance", "on": args.switch == "on", "reason": args.reason}
    bound_gpus([args.gpu], paths.gpus)
    if args.command == "set-healthy":
        return {"op": "set-healthy", "gpu": args.gpu, "reason": args.reason}
    if not args.i_know:
        raise Refused("inject-fault takes a GPU out of service", hint="say --i-know if that is what you want")
    if ":" not in args.key:
        raise UsageError(f"{args.key!r} is no signal like xid:48", hint="`healthcheck explain` shows them")
    return {"op": "inject", "gpu": args.gpu, "key": args.key, "detail": args.detail}

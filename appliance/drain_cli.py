"""`appliance drain` and `appliance undrain`.

A GPU: its launcher gets a hold of the owner "operator" (it survives restarts and reboots; only undrain takes it away).
The host (--all): a file that makes the gateways answer 503 on /readyz, so that load balancers leave; what still comes
is served.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from appliance.admin_http import AdminError, NotRunning, get_json
from appliance.arguments import add_common, bound_gpus, gpu_number, seconds, set_epilog
from appliance.control import ControlClient
from appliance.events import append_event
from appliance.log import ApplianceError, ExitCode, Progress, UsageError, emit_json, printable
from appliance.paths import SLOT_NAMES, Paths
from appliance.statefile import read_state, remove_state, state_lock, write_state

SCHEMA = 1
OWNER = "operator"
MAX_REASON_CHARS = 500
_POLL_SECONDS = 0.2

EPILOG = """\
examples:
  appliance drain 3 --reason "replace fan" --wait     GPU 3: no new requests; returns when it has none in flight
  appliance drain --all --reason "kernel upgrade" --wait
`appliance undrain` takes it back.
exit codes: 0 done, 1 failed, 2 usage, 3 the wait timed out (the drain stays)
"""
UNDRAIN_EPILOG = """\
examples:
  appliance undrain 3 --wait     GPU 3 takes requests again; returns when its engines are ready
  appliance undrain --all        load balancers may come back: /readyz answers 200 again
Only the operator's own drain is taken away: what the watchdog or a release holds stays held, and is named.
exit codes: 0 done, 1 failed, 2 usage, 3 the wait timed out (it goes on)
"""


class DrainTimeout(ApplianceError):
    """There are still requests in flight."""

    exit_code = ExitCode.INCONCLUSIVE


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    drain = parser.prog.endswith(" drain")
    add_common(parser)
    set_epilog(parser, EPILOG if drain else UNDRAIN_EPILOG)
    parser.add_argument("gpus", metavar="GPU", nargs="*", type=gpu_number, help="slot numbers")
    parser.add_argument("--all", action="store_true", help="the host, for load balancers; GPUs keep their own state")
    wait = "return when nothing is in flight any more" if drain else "GPUs: return when their engines are ready again"
    parser.add_argument("--wait", action="store_true", help=wait)
    parser.add_argument(
        "--timeout", type=seconds(0, 86_400), default=600.0, metavar="SECONDS", help="of --wait (%(default)g)"
    )
    if drain:
        parser.add_argument(
            "--settle",
            type=seconds(0, 3600),
            default=5.0,
            metavar="SECONDS",
            help="--all --wait: how long nothing may be in flight; load balancers need time to notice (%(default)g)",
        )
        parser.add_argument("--reason", required=True, type=_reason, help="shown by status, list and /readyz")
        how = parser.add_argument_group("GPUs only")
        how.add_argument("--stop-engines", action="store_true", help="stop the engines as well, which frees the GPU")
        how.add_argument("--abort", action="store_true", help="do not let requests in flight finish here")


def _reason(text: str) -> str:
    """Printable, on one line, not empty; launchers take no more than MAX_REASON_CHARS."""
    reason = printable(text.strip())
    if not 0 < len(reason) <= MAX_REASON_CHARS:
        raise argparse.ArgumentTypeError(f"wants 1 to {MAX_REASON_CHARS} characters")
    return reason


def run(args: argparse.Namespace) -> int:
    if bool(args.gpus) == args.all:
        raise UsageError("name GPU slots, or --all for the host", hint=f"appliance {args.command} --help")
    paths = Paths.default()
    if args.all and args.command == "drain" and (args.stop_engines or args.abort):
        raise UsageError("--stop-engines and --abort are for GPUs", hint="name the GPUs: appliance drain 0 1 ...")
    gpus = bound_gpus(args.gpus, paths.gpus)
    progress = Progress(quiet=args.json)
    try:
        if args.command == "undrain":
            results = [_undrain_host(paths)] if args.all else _undrain_gpus(paths, gpus, args)
        elif args.all:
            results = [_drain_host(paths, args, progress)]
        else:
            results = _drain_gpus(paths, gpus, args, progress)
    finally:
        progress.finish()
    if args.json:
        emit_json({"schema": SCHEMA, "verb": args.command, "results": results})
    else:
        for result in results:
            print(f"{result['what']}: {result['text']}")
    return ExitCode.DONE


# -- GPUs


def _drain_gpus(paths: Paths, gpus: list[int], args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """Asks all launchers first, then waits, so that the drains run side by side."""
    deadline = time.monotonic() + args.timeout
    hold = {
        "owner": OWNER,
        "reason": args.reason,
        "level": "stop" if args.stop_engines else "drain",
        "mode": "abort" if args.abort else "graceful",
    }
    former = {gpu: _former_reason(paths, gpu) for gpu in gpus}
    for gpu in gpus:
        ControlClient(paths, gpu).call("hold", **hold, wait=False)
    late: dict[int, str] = {}
    for gpu in gpus if args.wait else ():
        progress.stage(f"waiting until gpu {gpu} has no requests in flight")
        left = max(0.0, round(deadline - time.monotonic(), 1))
        try:
            # A hold that is already there is only waited for: the launcher keeps its time.
            ControlClient(paths, gpu).call("hold", **hold, wait=True, timeout=left)
        except ApplianceError as error:
            if error.exit_code != ExitCode.INCONCLUSIVE:
                raise
            late[gpu] = error.message
    if late:
        done = [str(gpu) for gpu in gpus if gpu not in late]
        names = ", ".join(map(str, late))
        drained = f"; drained: {', '.join(done)}" if done else ""
        raise DrainTimeout(
            f"not drained within {args.timeout:g} s: GPU {names}{drained}",
            hint=f"all of them stay held and it goes on; see `appliance status` ({next(iter(late.values()))})",
        )
    text = "drained" if args.wait else "draining"
    return [{"what": f"gpu {gpu}", "gpu": gpu} | _answer(text, args.reason, former[gpu]) for gpu in gpus]


def _answer(text: str, reason: str, former: Any) -> dict[str, Any]:
    """The operator has one reason at a time: one that is replaced is said, since another person may have had it."""
    if not isinstance(former, str) or former == reason:
        return {"text": text}
    return {"text": f"{text}; was drained already, for another reason: {printable(former)}", "former_reason": former}


def _former_reason(paths: Paths, gpu: int) -> Any:
    """Of the operator's hold, which is on disk; None without one. What cannot be read, its launcher complains of."""
    try:
        holds = (read_state(paths.holds(gpu), schema=SCHEMA) or {}).get("holds")
    except (ApplianceError, OSError):
        return None
    hold = holds.get(OWNER) if isinstance(holds, dict) else None
    return hold.get("reason") if isinstance(hold, dict) else None


def _undrain_gpus(paths: Paths, gpus: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    deadline = time.monotonic() + args.timeout
    results = []
    for gpu in gpus:
        extra = {"wait": True, "timeout": max(0.0, deadline - time.monotonic())} if args.wait else {"wait": False}
        changed = OWNER in _holds(paths, gpu)
        ControlClient(paths, gpu).call("unhold", owner=OWNER, **extra)
        left = _holds(paths, gpu)
        text = "back in service" if changed else "was not drained"
        if left:
            text = f"still held by {', '.join(map(printable, left))}"
        results.append({"what": f"gpu {gpu}", "gpu": gpu, "text": text, "holds": left, "changed": changed})
    return results


def _holds(paths: Paths, gpu: int) -> dict[str, Any]:
    return (ControlClient(paths, gpu).call("status").get("state") or {}).get("holds") or {}


# -- the host


def _drain_host(paths: Paths, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    with state_lock(paths.host_drain):
        before = read_state(paths.host_drain, schema=SCHEMA)
        since = (before or {}).get("since") or round(time.time(), 3)
        state = {"reason": args.reason, "since": since, "owner": OWNER, "uid": os.getuid()}
        write_state(paths.host_drain, state, schema=SCHEMA)
    append_event(paths.events, "host-drain", reason=args.reason, uid=os.getuid())
    if args.wait:
        progress.stage("waiting until the gateways have no requests in flight")
        _wait_idle(paths, args.timeout, args.settle)
    text = "drained, nothing in flight" if args.wait else "draining: /readyz answers 503"
    answer = _answer(text, args.reason, (before or {}).get("reason"))
    return {"what": "host"} | answer | {"since": since, "changed": before is None}


def _undrain_host(paths: Paths) -> dict[str, Any]:
    with state_lock(paths.host_drain):
        changed = remove_state(paths.host_drain)
    if changed:
        append_event(paths.events, "host-undrain", uid=os.getuid())
    return {"what": "host", "text": "back in service" if changed else "was not drained", "changed": changed}


def _wait_idle(paths: Paths, timeout: float, settle: float) -> None:
    """Until every gateway that runs says, for `settle` seconds on end, that it has no request in flight and none
    waiting. A gateway that does not answer properly is not idle."""
    deadline = time.monotonic() + timeout
    idle_since: float | None = None
    while True:
        busy = [words for slot in SLOT_NAMES if (words := _busy(paths, slot))]
        now = time.monotonic()
        idle_since = None if busy else now if idle_since is None else idle_since
        if idle_since is not None and now - idle_since >= settle:
            return
        if now >= deadline:
            raise DrainTimeout(
                f"after {timeout:g} s: {'; '.join(busy) or f'idle, but not for {settle:g} s yet'}",
                hint="the drain stays; wait on with the same command, or look who still sends with `appliance logs`",
            )
        time.sleep(_POLL_SECONDS)


def _busy(paths: Paths, slot: str) -> str | None:
    """Why the gateway of `slot` is not idle; None if it is, or does not run."""
    try:
        state = get_json(paths.gateway_socket(slot), "/state")
    except NotRunning:
        return None
    except AdminError as error:
        return error.message
    in_flight, waiting = state.get("in_flight"), state.get("waiting") or 0
    if type(in_flight) is not int or type(waiting) is not int:
        return f"gateway {slot} does not say how many requests are in flight"
    return f"gateway {slot}: {in_flight} in flight, {waiting} waiting" if in_flight or waiting else None

"""`appliance start|stop|restart`: systemctl with the names of our units, and errors that say what to do."""

from __future__ import annotations

import argparse

from appliance import command
from appliance.arguments import add_common, bound_gpus, gpu_number, seconds, set_epilog
from appliance.command import CommandTimeout, Result
from appliance.log import ApplianceError, ExitCode, Progress, emit_json
from appliance.paths import Paths

EPILOG = """\
Without GPU numbers: appliance.target, that is launchers and gateways. With numbers: those launchers (and with them
their engines) only; `systemctl VERB appliance-gpu@N` is the same. A drained GPU stays drained.
start and restart look at the configuration first (`appliance config check`); what units would refuse stops nothing.
exit codes: 0 done, 1 failed, 2 no such GPU slot, 3 not done within --timeout (systemd goes on), 4 not root, or the
configuration cannot be used
"""
_DONE = {"start": "started", "stop": "stopped", "restart": "restarted"}
_COUNTED = [f"appliance-{name}.service" for name in ("gpu@*", "gateway@*", "watchdog*", "canary*")]
"""Units whose starts systemd counts."""


class NotPermitted(ApplianceError):
    """systemd does this for root only."""

    exit_code = ExitCode.REFUSED


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("gpus", metavar="GPU", nargs="*", type=gpu_number, help="slot numbers (default: everything)")
    parser.add_argument("--no-block", action="store_true", help="do not wait until it is done")
    parser.add_argument(
        "--timeout", type=seconds(1, 86_400), default=900.0, metavar="SECONDS", help="how long to wait (%(default)g)"
    )


def run(args: argparse.Namespace, run_command: command.Runner = command.run) -> int:
    verb = args.command
    paths = Paths.default()
    gpus = bound_gpus(args.gpus, paths.gpus)
    if verb != "stop":
        _check_first(paths, gpus)
    units = [f"appliance-gpu@{number}.service" for number in gpus] or ["appliance.target"]
    progress = Progress(quiet=args.json)
    progress.stage(f"{verb} {' '.join(units)}")
    if verb != "stop":
        _forget_starts(units if gpus else _COUNTED, run_command)
    argv = ["systemctl", verb, *(["--no-block"] if args.no_block else []), "--", *units]
    try:
        if verb == "stop" and not gpus and not args.no_block:
            argv += _related(units[0], "ConsistsOf", run_command)
        result = run_command(argv, timeout=args.timeout)
    finally:
        progress.finish()
    if not result.ok:
        raise _failure(verb, units, result, args.timeout)
    if verb != "stop" and not gpus and not args.no_block:
        _check_parts(verb, units[0], run_command)
    if args.json:
        emit_json({"schema": 1, "verb": verb, "units": units, "waited": not args.no_block})
    else:
        done = f"{_DONE[verb]}" if not args.no_block else f"{verb} asked for"
        print(f"{', '.join(units)}: {done}")
    return ExitCode.DONE


def _check_first(paths: Paths, gpus: list[int]) -> None:
    """Refused with what units would refuse to start with: a restart would stop what runs, and nothing comes back."""
    from appliance.config_check import check_units  # `stop` does without

    check_units(paths, gpus)


def _forget_starts(units: list[str], run_command: command.Runner) -> None:
    """systemd counts starts by hand like those after a crash: five within 300 s, and it refuses the next one. Who types
    the command wants it started. A unit that is not loaded has no count, and systemctl says so with a failure."""
    run_command(["systemctl", "reset-failed", "--", *units], timeout=30.0)


def _related(target: str, relation: str, run_command: command.Runner) -> list[str]:
    """Units of the target. ConsistsOf: what is PartOf= it. `systemctl stop TARGET` stops them as well, but returns when
    the target has stopped, which is before them; it waits for units that are named. Wants: what it starts."""
    result = run_command(["systemctl", "show", f"--property={relation}", "--value", "--", target], timeout=30.0)
    return sorted(command.check(result, f"asking systemd for the units of {target}").text.split())


def _check_parts(verb: str, target: str, run_command: command.Runner) -> None:
    """A target is reached, and systemctl content, whatever became of the units that it only wants (Wants=)."""
    parts = _related(target, "Wants", run_command)
    if not parts:
        return
    properties = "--property=Id,ActiveState,SubState,Result"
    shown = command.check(run_command(["systemctl", "show", properties, "--", *parts], timeout=30.0), "asking systemd")
    states = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in shown.text.split("\n\n")]
    down = [state for state in states if state.get("Id") and state.get("ActiveState") != "active"]
    if down:
        words = ", ".join(f"{s['Id']} is {s['ActiveState']} ({s.get('Result') or s.get('SubState')})" for s in down)
        names = " ".join(state["Id"] for state in down)
        raise ApplianceError(f"{verb} {target}: {words}", hint=f"see `systemctl status {names}` and `appliance doctor`")


def _failure(verb: str, units: list[str], result: Result, timeout: float) -> ApplianceError:
    names = " ".join(units)
    if result.timed_out:
        return CommandTimeout(
            f"{verb} {names}: not done after {timeout:g} s; systemd goes on with it", hint="see `appliance status`"
        )
    if b"Interactive authentication required" in result.stderr or b"Access denied" in result.stderr:
        # Not systemctl's own last words, which send people to the status of some unit.
        return NotPermitted(f"{verb} {names}: systemd does not let you", hint="run as root")
    hint = f"see `systemctl status {names}` and `appliance doctor`"
    if b"not found" in result.stderr:
        hint = "is the appliance installed here? see `appliance doctor --only install`"
    return ApplianceError(f"{verb} {names}: {result.why()}", hint=hint)

"""`appliance start|stop|restart`: systemctl with the names of our units, and errors that say what to do."""

from __future__ import annotations

import argparse
import sys

from appliance import command
from appliance.arguments import add_common, bound_gpus, gpu_number, seconds, set_epilog
from appliance.command import CommandTimeout, Result
from appliance.log import ApplianceError, ExitCode, Progress, emit_json
from appliance.paths import Paths

EPILOG = """\
Without GPU numbers: appliance.target; start and restart also see to it that gateways, watchdog and the launchers of all
bound slots run, enabled or not. With numbers: those launchers (and with them their engines) only; `systemctl VERB
appliance-gpu@N` is the same. A drained GPU stays drained.
start and restart look at the configuration first (`appliance config check`); what units would refuse stops nothing.
exit codes: 0 done, 1 failed, 2 no such GPU slot, 3 not done within --timeout (systemd goes on), 4 not root, or the
configuration cannot be used
"""
TARGET = "appliance.target"
_ALWAYS = ("appliance-gateway@stable.service", "appliance-gateway@canary.service", "appliance-watchdog.service")
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
    verb, paths = args.command, Paths.default()
    gpus = bound_gpus(args.gpus, paths.gpus)
    parts = _check_first(paths, gpus) if verb != "stop" else []
    units = [_launcher(number) for number in gpus] or [TARGET]
    progress = Progress(quiet=args.json)
    progress.stage(f"{verb} {' '.join(units)}")
    try:
        if verb == "stop":
            related = [] if gpus or args.no_block else _related(TARGET, "ConsistsOf", run_command)
            _systemctl(args, verb, units, related, run_command)
        else:
            _forget_starts(units if gpus else _COUNTED, run_command)
            _systemctl(args, verb, units, [], run_command)
        not_enabled = _start_parts(args, parts, run_command) if parts else []
    finally:
        progress.finish()
    _report(args, [*units, *parts], units, not_enabled)
    return ExitCode.DONE


def _systemctl(
    args: argparse.Namespace, verb: str, units: list[str], more: list[str], run_command: command.Runner
) -> None:
    """With `more` units, which no message names."""
    argv = ["systemctl", verb, *(["--no-block"] if args.no_block else []), "--", *units, *more]
    result = run_command(argv, timeout=args.timeout)
    if not result.ok:
        raise _failure(args.command, units, result, args.timeout)


def _start_parts(args: argparse.Namespace, parts: list[str], run_command: command.Runner) -> list[str]:
    """What the target has not started, since it only wants what is enabled. Which of them are not. A start of what runs
    does nothing, while a restart by name would restart once more what the target has just started."""
    try:
        _systemctl(args, "start", parts, [], run_command)
    except CommandTimeout:
        raise
    except ApplianceError:
        if not args.no_block:
            _check_parts(args.command, parts, run_command)  # names all that are down, and why
        raise
    return [] if args.no_block else _check_parts(args.command, parts, run_command)


def _report(args: argparse.Namespace, units: list[str], shown: list[str], not_enabled: list[str]) -> None:
    if args.json:
        document = {"schema": 1, "verb": args.command, "units": units, "waited": not args.no_block}
        emit_json(document | {"not_enabled": not_enabled})
        return
    print(f"{', '.join(shown)}: {_DONE[args.command] if not args.no_block else f'{args.command} asked for'}")
    if not_enabled:
        names = " ".join(not_enabled)
        print(f"not enabled, so gone after a reboot: {names} (`systemctl enable {names}`)", file=sys.stderr)


def _launcher(number: int) -> str:
    return f"appliance-gpu@{number}.service"


def _check_first(paths: Paths, gpus: list[int]) -> list[str]:
    """Refused with what units would refuse to start with: a restart would stop what runs, and nothing comes back. The
    units without which the host does not serve as promised; none where `gpus` are named. The target only wants those
    that are enabled, so they are named to systemctl."""
    from appliance.config_check import check_units, used_slots  # `stop` does without

    config = check_units(paths, gpus)
    return [] if gpus else [*map(_launcher, used_slots(config, paths)), *_ALWAYS]


def _forget_starts(units: list[str], run_command: command.Runner) -> None:
    """systemd counts starts by hand like those after a crash: five within 300 s, and it refuses the next one. Who types
    the command wants it started. A unit that is not loaded has no count, and systemctl says so with a failure."""
    run_command(["systemctl", "reset-failed", "--", *units], timeout=30.0)


def _related(target: str, relation: str, run_command: command.Runner) -> list[str]:
    """Units of the target. ConsistsOf: what is PartOf= it. `systemctl stop TARGET` stops them as well, but returns when
    the target has stopped, which is before them; it waits for units that are named. Wants: what it starts."""
    result = run_command(["systemctl", "show", f"--property={relation}", "--value", "--", target], timeout=30.0)
    return sorted(command.check(result, f"asking systemd for the units of {target}").text.split())


def _check_parts(verb: str, named: list[str], run_command: command.Runner) -> list[str]:
    """A target is reached, and systemctl content, whatever became of the units that it only wants (Wants=). Which of
    the `named` units run and are not enabled."""
    parts = sorted({*_related(TARGET, "Wants", run_command), *named})
    properties = "--property=Id,ActiveState,SubState,Result,UnitFileState"
    shown = command.check(run_command(["systemctl", "show", properties, "--", *parts], timeout=30.0), "asking systemd")
    states = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in shown.text.split("\n\n")]
    down = [state for state in states if state.get("Id") and state.get("ActiveState") != "active"]
    if down:
        words = ", ".join(f"{s['Id']} is {s['ActiveState']} ({s.get('Result') or s.get('SubState')})" for s in down)
        names = " ".join(state["Id"] for state in down)
        raise ApplianceError(f"{verb} {TARGET}: {words}", hint=f"see `systemctl status {names}` and `appliance doctor`")
    return [state["Id"] for state in states if state.get("UnitFileState") == "disabled"]


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
    if b" is masked" in result.stderr:
        hint = "an admin has masked it: `systemctl unmask UNIT`, if it is to run again"
    if b"not found" in result.stderr:
        hint = "is the appliance installed here? see `appliance doctor --only install`"
    return ApplianceError(f"{verb} {names}: {result.why()}", hint=hint)

"""The `appliance` command. It only knows the names of its subcommands; each lives in its own module.

A command module has `configure(parser, common)`, which adds arguments, and `run(args) -> int`, which returns an exit
code or raises ApplianceError. Only the module of the chosen command is imported, so `appliance --help` stays instant.
To add a command, add a line to COMMANDS.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, cast

from appliance import __version__
from appliance.arguments import add_common
from appliance.log import ApplianceError, ExitCode, report_error


class CommandModule(Protocol):
    """What a command module offers."""

    def configure(self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class Command(NamedTuple):
    name: str
    help: str
    module: str


class Program(NamedTuple):
    """What a console script of ours calls itself."""

    name: str
    description: str


COMMANDS = (
    Command("status", "show GPUs, engines, gateways and what is wrong", "appliance.status_cli"),
    Command("list", "list GPUs and engines, a line each", "appliance.list_cli"),
    Command("start", "start the appliance, or the launchers of some GPUs", "appliance.service_cli"),
    Command("stop", "stop the appliance, or the launchers of some GPUs", "appliance.service_cli"),
    Command("restart", "restart the appliance, or the launchers of some GPUs", "appliance.service_cli"),
    Command("drain", "take GPUs, or the host, out of service", "appliance.drain_cli"),
    Command("undrain", "take GPUs, or the host, back into service", "appliance.drain_cli"),
    Command("gpus", "list GPUs and bind them to slot numbers", "appliance.gpus_cli"),
    Command("config", "check and show the configuration", "appliance.config_cli"),
    Command("doctor", "check host and installation, with the fix for what is wrong", "appliance.doctor.command"),
    Command("logs", "show the journal of the appliance", "appliance.logs_cli"),
    Command("bug-report", "collect what a maintainer needs into one file", "appliance.bug_report"),
    Command("version", "show the versions of everything", "appliance.version_cli"),
    Command("completion", "print a completion script for bash or zsh", "appliance.completion_cli"),
    Command("man", "print the man page", "appliance.man_cli"),
    Command("demo", "start the server, ask it something, print answers and speed, stop it", "appliance.demo"),
    Command("serve", "serve a model in the foreground", "appliance.serve"),
    Command("model", "fetch, add, list, verify and remove models", "appliance.model_cli"),
    Command("release", "make releases, put them into service, check what they compute", "appliance.release_cli"),
)

EPILOG = """\
exit codes: 0 done, 1 failed, 2 usage, 3 inconclusive or timed out, 4 refused by preflight or policy, 5 busy
Results go to stdout (text, or JSON with --json), progress and errors to stderr. NO_COLOR is honoured.
"""


_OS_HINTS = {
    errno.EACCES: "run as root, or as the owner of that file",
    errno.EPERM: "run as root, or as the owner of that file",
    errno.ENOSPC: "the disk is full: free some space (see `df -h`) and run it again",
    errno.EROFS: "the file system is mounted read-only; after disk errors that is how the kernel protects it (dmesg)",
}


class _Parser(argparse.ArgumentParser):
    """argparse, with our error format (also as JSON where --json was given) and exit code 2."""

    as_json = False
    deepest = ""  # the parser of the verb that was named: what none of them knows is reported by the first

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        _Parser.deepest = self.prog
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        hint = f"see `{max(self.prog, _Parser.deepest, key=len)} --help`"
        report_error(message, hint=hint, code=ExitCode.USAGE, as_json=type(self).as_json)
        raise SystemExit(int(ExitCode.USAGE))


APPLIANCE = Program("appliance", "Turns a bare-metal NVIDIA host into a trustworthy LLM endpoint.")


def main(
    argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS, program: Program = APPLIANCE
) -> int:
    """Runs one command; returns its exit code. An error becomes a message with a next step, a traceback only with
    --debug."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json, debug = "--json" in arguments, "--debug" in arguments
    _Parser.as_json = as_json
    try:
        chosen = next((argument for argument in arguments if not argument.startswith("-")), "")
        parser, modules = build_parser(commands, chosen, program)
        args = parser.parse_args(arguments)
        if args.command is None:
            parser.print_help(sys.stderr)
            return ExitCode.USAGE
        status: int = modules[args.command].run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader left (`| head`). Keep Python from complaining again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        report_error("interrupted", hint="nothing is left half done; run it again", code=130, as_json=as_json)
        return 128 + signal.SIGINT
    except Exception as error:
        if debug:
            raise
        code = _explain(error, as_json)
        _give_up_stdout()
        return code


def _open_standard_streams() -> None:
    """One that the caller has closed (`>&-`) is /dev/null: nobody wants it, and no file of ours may become fd 1."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(fd)
                continue
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", closefd=False))


def _give_up_stdout() -> None:
    """What a full disk or a closed descriptor does not take is lost, and was said: Python would complain once more at
    its end, with a status of its own (120)."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser(
    commands: Sequence[Command] = COMMANDS, chosen: str | None = None, program: Program = APPLIANCE
) -> tuple[argparse.ArgumentParser, dict[str, CommandModule]]:
    """The parser, with the options of the command `chosen`; of all of them where it is None (man page, completion)."""
    parser = _Parser(
        prog=program.name,
        description=program.description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{program.name} {__version__}")
    add_common(parser, default=False)
    common = argparse.ArgumentParser(add_help=False)
    add_common(common)
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    modules: dict[str, CommandModule] = {}
    for command in commands:
        description = f"{command.help[0].upper()}{command.help[1:]}."
        sub = subparsers.add_parser(command.name, help=command.help, description=description, allow_abbrev=False)
        if chosen is None or command.name == chosen:
            module = cast(CommandModule, importlib.import_module(command.module))
            modules[command.name] = module
            module.configure(sub, common)
    return parser, modules


def _explain(error: Exception, as_json: bool) -> int:
    """Reports an expected error with its hint, an unexpected one as what it is: a defect."""
    message, hint = getattr(error, "message", None), getattr(error, "hint", None)
    if isinstance(error, ApplianceError) or isinstance(message, str):  # EngineError has the same two attributes
        code = int(getattr(error, "exit_code", ExitCode.FAILED))
        report_error(str(message), hint=hint, code=code, as_json=as_json)
        return code
    if isinstance(error, OSError):
        code = ExitCode.REFUSED if isinstance(error, PermissionError) else ExitCode.FAILED
        where = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
        report_error(
            f"{error.strerror or error}{where}",
            hint=_OS_HINTS.get(error.errno or 0, "run it again with --debug to see where"),
            code=code,
            as_json=as_json,
        )
        return code
    report_error(
        f"internal error: {type(error).__name__}: {error}",
        hint="this is a defect; run it again with --debug and report the traceback",
        as_json=as_json,
    )
    return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())

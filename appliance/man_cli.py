"""`appliance man`: appliance(8) from the parser and appliance.toml(5) from the configuration's tables, as troff."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from appliance import __version__
from appliance.arguments import set_epilog
from appliance.hostconfig import SECTIONS, allowed_values, description
from appliance.log import ExitCode, UsageError
from appliance.parser_tree import PROGRAMS, Argument, Node, tree
from appliance.paths import Paths

EPILOG = """\
examples:
  appliance man | man -l -
  appliance man --program canary | man -l -
  appliance man --page 5 > /usr/share/man/man5/appliance.toml.5
"""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    set_epilog(parser, EPILOG)
    parser.add_argument("--program", choices=PROGRAMS, default="appliance", help="of which command")
    parser.add_argument("--page", choices=["8", "5"], default="8", help="8: the command; 5: the configuration file")


def run(args: argparse.Namespace) -> int:
    if args.page == "5" and args.program != "appliance":
        raise UsageError(f"there is no page {args.program}(5)", hint="--page 8")
    print("\n".join(command_page(tree(args.program)) if args.page == "8" else config_page()))
    return ExitCode.DONE


def escape(text: str) -> str:
    """`text` as troff shows it unchanged: backslashes, hyphens that one can copy, lines that begin with . or '."""
    text = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("^", "\\(ha").replace("~", "\\(ti").replace("`", "\\(ga")
    )
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in text.split("\n"))


def _quoted(text: str) -> str:
    """As an argument of a macro."""
    return '"' + escape(text).replace('"', "\\(dq") + '"'


def command_page(root: Node) -> Iterator[str]:
    """NAME(8) of a console script. No date: the same version gives the same bytes."""
    name = root.path[0]
    yield f'.TH {name.upper()} 8 "" {_quoted(f"appliance {__version__}")} "System Administration"'
    yield from (".SH NAME", f"{name} \\- {escape(_first_lower(root.help)).rstrip('.')}")
    yield from (".SH SYNOPSIS", f".B {name}", "[\\fIoptions\\fR] \\fICOMMAND\\fR [\\fIarguments\\fR]")
    yield from (".SH DESCRIPTION", escape(root.help))
    yield from _preformatted(root.epilog)
    yield ".SH OPTIONS"
    yield from _arguments(root)
    yield ".SH COMMANDS"
    for node in root.walk():
        if node is not root:
            yield from _command(node)
    yield from _constant_parts(name)


def _command(node: Node) -> Iterator[str]:
    own = [argument for argument in node.arguments if "-h" not in argument.flags]
    yield f".SS {_quoted(' '.join(node.path[1:]))}"
    if not node.children:
        yield f"\\fB{escape(' '.join(node.path))}\\fR {' '.join(_usage(argument) for argument in own)}".rstrip()
        yield ".PP"
    yield escape(f"{node.help[:1].upper()}{node.help[1:]}.")
    yield from _arguments(node)
    yield from _preformatted(node.epilog)


def _usage(argument: Argument) -> str:
    if not argument.flags:
        words = f"\\fI{escape(argument.metavar)}\\fR" + (" ..." if argument.repeated else "")
    else:
        words = f"\\fB{escape(max(argument.flags, key=len))}\\fR"
        words += f" \\fI{escape(argument.metavar)}\\fR" if argument.metavar else ""
    return words if argument.required and not argument.repeated else f"[{words}]"


def _arguments(node: Node) -> Iterator[str]:
    for argument in node.arguments:
        if len(node.path) > 1 and {"-h", "--json", "--debug"} & set(argument.flags):
            continue  # once is enough
        yield ".TP"
        flags = ", ".join(f"\\fB{escape(flag)}\\fR" for flag in argument.flags)
        yield f"{flags} \\fI{escape(argument.metavar)}\\fR".strip() if argument.metavar else flags
        yield escape(argument.help) or "\\&"


def _preformatted(text: str) -> Iterator[str]:
    if text.strip():
        yield from (".PP", ".nf", escape(text.strip("\n")), ".fi")


def _first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _constant_parts(name: str) -> Iterator[str]:
    paths = Paths()
    yield ".SH FILES"
    files = {
        paths.config: "configuration, see appliance.toml(5)",
        paths.etc / "credentials": "API keys and TLS files, readable by root alone",
        paths.releases: "releases",
        paths.gpus: "GPU slots: number, UUID, state",
        paths.events: "what changed, one JSON object a line",
        paths.run: "sockets and state of what runs",
    }
    if name == "canary":
        files = {
            paths.canary_config: "policy of runs where the command line says nothing, and hooks; optional",
            paths.canary_run: "the present or last run",
            paths.canary_runs: "runs that are over",
            paths.events: "what happened, one JSON object a line",
            paths.canary_control: "the controller's socket",
        }
    for path, text in files.items():
        yield from (".TP", f"\\fI{escape(str(path))}\\fR", escape(text))
    yield ".SH ENVIRONMENT"
    for name, text in {
        "NO_COLOR": "not empty: no colours",
        "APPLIANCE_MODELS": "another model store",
    }.items():
        yield from (".TP", f"\\fB{escape(name)}\\fR", escape(text))
    others = (f".BR {other} (8)," for other in PROGRAMS if other != name)
    yield from (".SH SEE ALSO", *others, ".BR appliance.toml (5),", ".BR systemctl (1),", ".BR journalctl (1)")


def config_page() -> Iterator[str]:
    """appliance.toml(5)."""
    yield f'.TH APPLIANCE.TOML 5 "" {_quoted(f"appliance {__version__}")} "File Formats"'
    yield from (".SH NAME", "appliance.toml \\- configuration of the LLM appliance")
    yield from (".SH SYNOPSIS", f"\\fI{escape(str(Paths().config))}\\fR")
    yield from (".SH DESCRIPTION", "TOML. An unknown key or a value that is not allowed is an error; keys that are not")
    yield "there have their defaults. Durations are seconds. \\fBappliance config check\\fR reads the file,"
    yield "\\fBappliance config show\\fR shows what counts, \\fBappliance config defaults\\fR prints all keys."
    for section, table in SECTIONS.items():
        yield from (f".SH {_quoted(f'[{section}]')}", escape(" ".join((table.__doc__ or "").split())))
        for key in table.__struct_fields__:
            default = getattr(table(), key)
            shown = "none" if default is None else repr(default).lower() if isinstance(default, bool) else str(default)
            yield from (".TP", f"\\fB{escape(key)}\\fR", escape(f"{description(table, key)}."))
            yield escape(
                f"{allowed_values(table, key)[:1].upper()}{allowed_values(table, key)[1:]}. Default: {shown or '[]'}."
            )
    yield from (".SH SEE ALSO", ".BR appliance (8)")

"""The command line as data, read from the argparse parser: the one source of man page and completion."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Argument:
    """An option (`flags` not empty) or a positional."""

    flags: tuple[str, ...]
    metavar: str  # of the value; "" for an option without one
    help: str
    choices: tuple[str, ...]
    required: bool
    repeated: bool  # any number of values


@dataclass(frozen=True, slots=True)
class Node:
    """A command, or a verb of one."""

    path: tuple[str, ...]  # ("appliance", "model", "pull")
    help: str
    epilog: str
    arguments: tuple[Argument, ...]
    children: tuple[Node, ...]

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


PROGRAMS = ("appliance", "healthcheck", "canary")


def tree(name: str = "appliance") -> Node:
    """All commands of a console script with all their options. Imports every command's module."""
    from appliance.cli import build_parser

    if name == "appliance":
        parser, _ = build_parser()
    else:
        module = importlib.import_module(f"{name}.cli")
        parser, _ = build_parser(module.COMMANDS, program=module.PROGRAM)
    return _node(parser, (parser.prog,), parser.description or "")


def _node(parser: argparse.ArgumentParser, path: tuple[str, ...], text: str) -> Node:
    arguments: list[Argument] = []
    children: list[Node] = []
    for action in parser._actions:  # argparse has no public way to list them
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            children += [_node(sub, (*path, name), texts.get(name, "")) for name, sub in action.choices.items()]
        elif action.help != argparse.SUPPRESS:
            arguments.append(_argument(action))
    return Node(path, text, parser.epilog or "", tuple(arguments), tuple(children))


def _argument(action: argparse.Action) -> Argument:
    takes_value = action.nargs != 0
    choices = tuple(map(str, action.choices)) if action.choices else ()
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if takes_value and not metavar:
        metavar = "{" + ",".join(choices) + "}" if choices else action.dest.upper()
    return Argument(
        flags=tuple(action.option_strings),
        metavar=metavar if takes_value else "",
        help=_help(action),
        choices=choices,
        required=action.required,
        repeated=action.nargs in ("*", "+"),
    )


def _help(action: argparse.Action) -> str:
    """The help with %(default)s filled in, as argparse does it."""
    text = action.help or ""
    return text % {**vars(action), "prog": "appliance"} if "%" in text else text

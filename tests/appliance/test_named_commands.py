"""Every command of ours that a message, a help text or a docstring names in backquotes exists, with its options."""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.cli import build_parser
from appliance.parser_tree import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
_NAMED = re.compile(rf"`((?:{'|'.join(PROGRAMS)}) [^`]+)`")
_HOLE = "\0"  # an f-string's value
_WORDS = {"GPU": "0", "N": "0", "GPU_OR_UUID": "0", "S": "5", "SECONDS": "5", "VERB": "--help"}
_INCOMPLETE = "arguments are required"  # `appliance drain` as the name of the command


class _Refused(Exception):
    pass


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the string literals; of f-strings with a hole for each value."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else _HOLE for part in node.values)
            yield node.lineno, "".join(map(str, parts))


def named(text: str) -> Iterator[str]:
    """The commands in backquotes; `appliance drain|undrain` names two. After " | " there is another program."""
    for found in _NAMED.findall(text):
        words = [word.strip("[]") for word in found.split(" | ")[0].split() if word.strip("[]") not in ("...", "")]
        yield from (" ".join(choice) for choice in itertools.product(*(word.split("|") for word in words)))


def filled(command: str) -> Iterator[list[str]]:
    """What one may type for it: words in capitals and holes have values, a hole a number, a name or a slot."""
    for value in ("0", "v2", "stable"):
        words = shlex.split(command.replace(_HOLE, value))
        yield [_WORDS.get(word, "v2" if word.isupper() else word) for word in words]


def sources() -> list[Path]:
    return sorted(file for name in PROGRAMS for file in (ROOT / name).rglob("*.py"))


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> dict[str, argparse.ArgumentParser]:
    def refuse(self: Any, message: str) -> None:
        raise _Refused(message)

    monkeypatch.setattr("appliance.cli._Parser.error", refuse)
    made = {"appliance": build_parser()[0]}
    for name in PROGRAMS[1:]:
        module = importlib.import_module(f"{name}.cli")
        made[name] = build_parser(module.COMMANDS, program=module.PROGRAM)[0]
    return made


def problem(parser: argparse.ArgumentParser, command: str) -> str | None:
    """What the parser has against it, whatever the holes are; None where it would run."""
    found = []
    for words in filled(command):
        try:
            parser.parse_args(words[1:])
            return None
        except _Refused as error:
            found.append(str(error))
        except SystemExit:  # --help, --version
            return None
    return None if any(_INCOMPLETE in message for message in found) else found[0]


def test_commands_that_are_named_exist(parsers: dict[str, argparse.ArgumentParser]) -> None:
    wrong, count = [], 0
    for file in sources():
        for line, text in literals(ast.parse(file.read_text())):
            for command in named(text):
                count += 1
                if why := problem(parsers[command.split()[0]], command):
                    shown = command.replace(_HOLE, "{}")
                    wrong.append(f"{file.relative_to(ROOT)}:{line}: `{shown}`: {why}")
    assert count > 100 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "command", ["appliance nothing", "appliance doctor --only driver", "appliance start --hard", "canary start v2 v3"]
)
def test_one_that_does_not_exist_is_found(parsers: dict[str, argparse.ArgumentParser], command: str) -> None:
    assert problem(parsers[command.split()[0]], command)

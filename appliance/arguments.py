"""Pieces of command lines that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from appliance.log import UsageError


def add_common(parser: argparse.ArgumentParser, *, default: Any = argparse.SUPPRESS) -> None:
    """--json and --debug. A subcommand leaves the default suppressed, so it never undoes `appliance --json list`."""
    parser.add_argument("--json", action="store_true", default=default, help="print one JSON document to stdout")
    parser.add_argument("--debug", action="store_true", default=default, help="show a traceback on errors")


def set_epilog(parser: argparse.ArgumentParser, text: str) -> None:
    """Text after the options, kept as it is written."""
    parser.epilog, parser.formatter_class = text, argparse.RawDescriptionHelpFormatter


def seconds(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a finite number of seconds from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:  # also false for NaN
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {low:g} to {high:g}")
        return value

    return parse


def gpu_number(text: str) -> int:
    """An argparse type: the number of a GPU slot."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 4):
        raise argparse.ArgumentTypeError(f"{text!r} is no GPU slot number; `appliance list` shows them")
    return int(text)


def port_number(text: str) -> int:
    """An argparse type: a TCP port, 0 to 65535."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port, a number from 0 to 65535")
    return int(text)


def bound_gpus(numbers: Iterable[int], gpus_file: Path) -> list[int]:
    """`numbers` without repetitions, if all are bound in gpus.json; else UsageError that names those that are."""
    from appliance.gpus import read_slots

    known = read_slots(gpus_file)
    wanted = list(dict.fromkeys(numbers))
    if missing := [number for number in wanted if number not in known]:
        there = ", ".join(map(str, known)) or "none"
        raise UsageError(
            f"no GPU slot {', '.join(map(str, missing))}; bound: {there}", hint="see `appliance gpus list`"
        )
    return wanted

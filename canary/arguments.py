"""Durations, shares and limits as people write them: 80ms, 5m, 0.1%, itl=80ms:1%."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d|)")
_LIMIT = re.compile(r"(itl|ttft|request)=([^:]+)(?::(.+))?")


def duration(text: str) -> float:
    """An argparse type: seconds of "80ms", "5m", "90", "1.5h"."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration like 80ms, 30s, 5m or 2h")
    return float(found[1]) * _UNITS[found[2]]


def share(text: str) -> float:
    """An argparse type: 0.001 of "0.1%" or "0.001"."""
    number, percent = (text[:-1], True) if text.endswith("%") else (text, False)
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share like 0.1% or 0.001")
    return value


def steps(text: str) -> list[float]:
    """An argparse type: "5,10,25" or "5%,10%"."""
    try:
        return [float(part.strip().removesuffix("%")) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of percentages like 5,10,25,50,100") from None


def limit(text: str) -> dict[str, Any]:
    """An argparse type: "itl=80ms:1%": at most 1 % of the inter-token latencies are 80 ms or longer."""
    found = _LIMIT.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no limit like itl=80ms:1% (itl, ttft or request)")
    value: dict[str, Any] = {"metric": found[1], "seconds": duration(found[2])}
    return value | ({"share": share(found[3])} if found[3] else {})


def weight(text: str) -> float:
    """An argparse type: percent from 0 to 100."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage from 0 to 100")
    return value


def run_id(text: str) -> str:
    """An argparse type: the number of a run."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise argparse.ArgumentTypeError(f"{text!r} is no run; `canary list` shows them")
    return text

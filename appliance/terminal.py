"""Text for people: tables, ages, icons. Plain ASCII when piped, colour and icons only on a terminal."""

from __future__ import annotations

import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from typing import IO

from appliance.log import paint, printable, use_color

_ICONS = {"good": ("●", "32"), "busy": ("◐", "33"), "held": ("⏸", "33"), "bad": ("✖", "31"), "none": ("○", "2")}
"""What a mark looks like on a terminal, and its SGR colour. Elsewhere the words of a line must say it all."""


UNCUT = 10_000
"""A width that no line reaches."""


def width_of(stream: IO[str]) -> int:
    """Columns of the terminal. What is piped or written to a file is never cut."""
    return max(20, shutil.get_terminal_size().columns) if stream.isatty() else UNCUT


def mark(kind: str, stream: IO[str]) -> str:
    """An icon and a space on a terminal that shows colours, else nothing."""
    icon, color = _ICONS[kind]
    try:
        icon.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ""
    return f"{paint(icon, color, stream)} " if use_color(stream) else ""


def age(seconds: float) -> str:
    """93 -> '1m33s', 7325 -> '2h02m', 90000 -> '1d01h'. Clocks that went back give '0s'."""
    total = max(0, int(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def binary_bytes(count: float) -> str:
    """Memory as systemd writes it: 1610612736 -> '1.5G'."""
    for unit in ("B", "K", "M", "G"):
        if count < 1024:
            return f"{count:.0f}{unit}" if unit == "B" or count >= 100 else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.1f}T"


def cut(text: str, width: int) -> str:
    """`text`, made printable and cut to `width` columns (East Asian wide characters take two)."""
    text = printable(text)
    if _columns(text) <= width:
        return text
    kept = ""
    for char in text:
        if _columns(kept + char) > width - 1:
            break
        kept += char
    return kept + "…" if width > 0 else ""


def _columns(text: str) -> int:
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def table(rows: Sequence[Sequence[str]], width: int, *, indent: str = "") -> Iterator[str]:
    """Aligned columns, the first row is the heading. The last column is cut where the line would be too long; where
    even the others do not fit, each row becomes lines of 'heading: value'."""
    texts = [[printable(cell) for cell in row] for row in rows]
    widths = [max(_columns(row[column]) for row in texts) for column in range(len(texts[0]))]
    fixed = len(indent) + sum(widths[:-1]) + 2 * (len(widths) - 1)
    if fixed + min(widths[-1], 8) > width:
        yield from _stacked(texts, width, indent)
        return
    for row in texts:
        cells = [cell + " " * (size - _columns(cell)) for cell, size in zip(row[:-1], widths)]
        yield (indent + "  ".join([*cells, cut(row[-1], width - fixed)])).rstrip()


def _stacked(rows: Sequence[Sequence[str]], width: int, indent: str) -> Iterator[str]:
    heading = rows[0]
    for row in rows[1:]:
        for number, (name, value) in enumerate(zip(heading, row)):
            if value and value != "-":
                lead = indent + ("" if number == 0 else "  ")
                yield lead + cut(f"{name.lower()}: {value}", width - len(lead))

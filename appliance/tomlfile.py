"""TOML files that people write: what is wrong with one, where, and what TOML expects there."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from appliance.log import ApplianceError, ExitCode

_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_EXPECTED = (
    'TOML is lines of `[section]` and, below them, of `key = value`: text in "quotes", numbers and true or false '
    "without, lists in [ ], # before a remark"
)
_MAX_SHOWN = 60


class NotToml(ApplianceError):
    """The message names the file, the line and the column."""

    exit_code = ExitCode.REFUSED


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """The table in `data`. NotToml says what is wrong with it; `where` is named in that."""
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        text = f"{where}: not TOML: line {line} holds the byte 0x{data[error.start]:02x}, which is not UTF-8"
        raise NotToml(text, hint="is this the right file? save it as UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise NotToml(f"{where}: not TOML: {_in_words(data, str(error))}", hint=_EXPECTED) from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, lists in lists without end
        raise NotToml(f"{where}: not TOML: {error}", hint=_EXPECTED) from None


def _in_words(data: bytes, message: str) -> str:
    """`line 2, column 7: Expected ... in: prot 8000`."""
    place = _PLACE.search(message)
    if place is None:
        return message
    what = message[: place.start()]
    if place[1] is None:
        return f"{what} at the end of the file"
    line = data.decode("utf-8-sig").split("\n")[int(place[1]) - 1].strip()[:_MAX_SHOWN]
    return f"line {place[1]}, column {place[2]}: {what}" + (f" in: {line}" if line else "")

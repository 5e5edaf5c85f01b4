"""Bounded reading of JSON that came with a model: config.json, the shard index, safetensors headers.

Stricter than the json module on purpose: UTF-8 only, no duplicate keys (parsers disagree on which one wins), no NaN or
Infinity, a limit on bytes and on values (JSON of 100 MB can otherwise become gigabytes of Python objects). Numbers are
checked where they are used, by `Section`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.errors import EngineError

_SURROGATE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)

MAX_VALUES = 2_000_000
"""Commas and brackets a document may hold. A tensor of a safetensors header takes about 10: room for 200,000."""


def shown(value: object, limit: int = 120) -> str:
    """repr for messages: control characters and lone surrogates escaped, cut to `limit` characters."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # ValueError: an integer over the digit limit of int -> str
        return f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def lone_surrogate(raw: bytes) -> int | None:
    """Byte offset in JSON of the first \\uD800..\\uDFFF escape without its other half."""
    high: re.Match[bytes] | None = None
    for escape in _SURROGATE.finditer(raw):
        unit = int(escape[1], 16) if escape[1] else 0
        if high is not None:
            if not (0xDC00 <= unit <= 0xDFFF and escape.start() == high.end()):
                return high.start()
            high = None
            continue
        if 0xD800 <= unit <= 0xDBFF:
            high = escape
        elif 0xDC00 <= unit <= 0xDFFF:
            return escape.start()
    return high.start() if high is not None else None


def open_regular(path: Path, error: type[EngineError]) -> tuple[int, int]:
    """(descriptor, size in bytes) of a regular file opened for reading. A FIFO or device is refused at once."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the name
        raise error(f"cannot open {path}: {getattr(exc, 'strerror', None) or exc}") from exc
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise error(f"{path} is not a regular file")
    return fd, status.st_size


def read_json_object(path: Path, *, max_bytes: int, error: type[EngineError]) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes`; any fault raises `error`, naming the file."""
    fd, size = open_regular(path, error)
    with os.fdopen(fd, "rb") as file:
        if size > max_bytes:
            raise error(f"{path} has {size} bytes; at most {max_bytes} are read")
        try:
            data = file.read(max_bytes + 1)  # the file may have grown since fstat
        except OSError as exc:
            raise error(f"cannot read {path}: {exc.strerror}") from exc
    if len(data) > max_bytes:
        raise error(f"{path} has more than {max_bytes} bytes")
    return parse_json_object(data, what=str(path), error=error)


def parse_json_object(data: bytes, *, what: str, error: type[EngineError]) -> dict[str, Any]:
    """The JSON object in `data`; `what` names it in messages."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise error(f"{what} holds more than {MAX_VALUES} JSON values")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise error(f"{what} is not UTF-8 (byte {exc.start})") from exc
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as exc:
        place = f"{exc.msg.partition(' (')[0]}, line {exc.lineno} column {exc.colno}"
        hint = "The file may be cut short: copy it again." if exc.pos >= len(text.rstrip()) - 1 else None
        raise error(f"{what} is not valid JSON: {place}", hint=hint) from exc
    except RecursionError as exc:
        raise error(f"{what} is nested too deeply") from exc
    except ValueError as exc:
        why = "a number has thousands of digits" if "int_max_str_digits" in str(exc) else exc
        raise error(f"{what} is not acceptable JSON: {why}") from exc
    if not isinstance(value, dict):
        raise error(f"{what} must hold a JSON object, not {type(value).__name__}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(double)} appears twice in one object")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


@dataclass(frozen=True, slots=True)
class Section:
    """Typed and bounded access to one JSON object of a configuration; every error names file, key and value."""

    values: Mapping[str, Any]
    where: str  # "config.json", "config.json: rope_scaling"

    def fail(self, key: str, must: str) -> NoReturn:
        if key not in self.values:
            raise ConfigError(f"{self.where}: {key} is missing; it must be {must}")
        raise ConfigError(f"{self.where}: {key} is {shown(self.values[key])}; it must be {must}")

    def has(self, key: str) -> bool:
        """Present and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        # NaN and infinity fail the comparison; so does an integer too large for float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.fail(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self.fail(key, "a string")
        return value

    def section(self, key: str) -> Section:
        """The object under `key`; an empty one if it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return Section({}, f"{self.where}: {key}")
        if not isinstance(value, dict):
            self.fail(key, "an object")
        return Section(value, f"{self.where}: {key}")

"""What an engine's /admin/state says went wrong on its GPU, as signals: which kernel, layer, head and position.

Engines bring their own version with their release, so everything in the answer is taken with care.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from appliance.log import printable

_KEYS = {
    "nonfinite": "engine:nonfinite",  # NaN or Inf in what a kernel wrote
    "logits": "engine:nonfinite",  # a row that cannot be sampled
    "page_range": "engine:index",
    "position_range": "engine:index",
    "token_range": "engine:index",
    "step": "engine:step",  # a plan that was refused: a bug of ours
}
_OTHER = "engine:fault"
_PLACES = ("layer", "head", "position", "value", "sm", "step")
_MAX_TEXT = 200  # characters of the engine's own words


@dataclass(frozen=True, slots=True)
class EngineErrors:
    """What is new in one answer. `total`: since the engine started; `age`: seconds since the newest, None: none."""

    total: int
    found: dict[str, str]  # key -> the first new one of that kind, in words
    age: float | None
    last: str  # the newest, in words; "" where there is none


def read_errors(state: dict[str, Any], seen: int) -> EngineErrors:
    """`seen`: the `total` of this engine's answer before."""
    table = state.get("errors")
    recent = table.get("recent") if isinstance(table, dict) else None
    entries = [entry for entry in recent if isinstance(entry, dict)] if isinstance(recent, list) else []
    found: dict[str, str] = {}
    total, last, age = seen, "", None
    for entry in entries:
        number = entry.get("number")
        if type(number) is not int or not 0 < number < 1 << 53:
            continue
        last, age = _text(entry), _age(entry)
        total = max(total, number)
        if number > seen:
            found.setdefault(_KEYS.get(str(entry.get("kind")), _OTHER), last)
    more = total - seen - len(found)
    if found and more > 0:
        found = {key: f"{text} (and {more} more)" for key, text in found.items()}
    return EngineErrors(total, found, age, last)


def _text(entry: dict[str, Any]) -> str:
    """ "nonfinite in attention, layer 3, head 5, position 17: what the engine said"."""
    where = entry.get("where")
    where = where if isinstance(where, dict) else {}
    kernel = where.get("op")
    text = str(entry.get("kind"))[:40]
    text += f" in {kernel[:40]}" if isinstance(kernel, str) else ""
    text += "".join(f", {name} {where[name]}" for name in _PLACES if type(where.get(name)) is int)
    error = entry.get("error")
    return printable(f"{text}: {error[:_MAX_TEXT]}" if isinstance(error, str) else text)


def _age(entry: dict[str, Any]) -> float | None:
    age = entry.get("age_seconds")
    return float(age) if isinstance(age, (int, float)) and 0 <= age < 1e9 else None

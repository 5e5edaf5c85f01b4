"""Unicode properties and Normalization Form C in Python, from the tables that gen_unicode.py made."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

L, N, S, W, D, Q, C = 1, 2, 4, 8, 16, 32, 64


@cache
def _unicode_data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((Path(__file__).parent / "_unicode.json").read_text())
    return data


@cache
def char_flags() -> bytes:
    """One byte of property bits per code point (see gen_unicode.py)."""
    flags = bytearray(0x110000)
    bits = {"L": L, "N": N, "S": S, "W": W, "D": D, "Q": Q, "C": C}
    for name, spans in _unicode_data()["classes"].items():
        for first, last in spans:
            for c in range(first, last + 1):
                flags[c] |= bits[name]
    return bytes(flags)


@cache
def _nfc_tables() -> tuple[dict[int, int], dict[int, str], dict[str, str]]:
    data = _unicode_data()
    composed = {chr(a) + chr(b): chr(c) for a, b, c in data["composed"]}
    return dict(data["ccc"]), dict(data["decomposed"]), composed


def nfc(text: str) -> str:
    """Normalization Form C with the tables of `tokenizers` (Unicode 9.0), Unicode Standard Annex #15. Linear but for
    one sort per run of marks, where unicodedata.normalize is quadratic."""
    flags = char_flags()
    if text.isascii() or not any(flags[ord(char)] & (Q | C) for char in text):
        return text
    ccc, decomposed, composed = _nfc_tables()
    chars: list[str] = []
    for char in text:
        c = ord(char)
        if 0xAC00 <= c <= 0xD7A3:
            index = c - 0xAC00
            chars += [chr(0x1100 + index // 588), chr(0x1161 + index % 588 // 28)]
            if index % 28:
                chars.append(chr(0x11A7 + index % 28))
        else:
            chars += decomposed.get(c, char)
    out: list[str] = []
    starter = -1
    last_class = 0
    for char, mark in _in_canonical_order(chars, ccc):
        if starter >= 0 and (starter == len(out) - 1 or last_class < mark):
            pair = _compose(out[starter], char, composed)
            if pair is not None:
                out[starter] = pair
                continue
        if mark == 0:
            starter = len(out)
        last_class = mark
        out.append(char)
    return "".join(out)


def _in_canonical_order(chars: list[str], ccc: dict[int, int]) -> Iterator[tuple[str, int]]:
    run: list[tuple[str, int]] = []
    for char in chars:
        mark = ccc.get(ord(char), 0)
        if mark:
            run.append((char, mark))
            continue
        yield from sorted(run, key=lambda item: item[1])
        run.clear()
        yield char, 0
    yield from sorted(run, key=lambda item: item[1])


def _compose(first: str, second: str, composed: dict[str, str]) -> str | None:
    a, b = ord(first), ord(second)
    if 0x1100 <= a < 0x1113 and 0x1161 <= b < 0x1176:
        return chr(0xAC00 + (a - 0x1100) * 588 + (b - 0x1161) * 28)
    if 0xAC00 <= a <= 0xD7A3 and (a - 0xAC00) % 28 == 0 and 0x11A7 < b < 0x11C3:
        return chr(a + b - 0x11A7)
    return composed.get(first + second)

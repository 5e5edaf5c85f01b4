"""Makes `_unicode.h` and `_unicode.json`: the Unicode properties the `tokenizers` library really uses.

Run `python -m engine.tokenizer.gen_unicode` with the pinned `tokenizers`. That library mixes Unicode versions, and ids
are only equal to its own if we mix them the same way, so the tables are taken from its behaviour, one code point at a
time, rather than from one release of the Unicode Character Database:

  L, N, S   \\p{L}, \\p{N} and \\s of Oniguruma (Split and ByteLevel)          = Unicode 16.0
  D         Rust's char::is_numeric (Digits)                                 = Unicode 17.0
  W         \\w of Rust's regex crate (single_word of added tokens)           = Unicode 16.0
  NFC       crate unicode-normalization-alignments                           = Unicode 9.0

White_Space has been the same set since Unicode 6.3. Canonical combining classes never change once given (Unicode
stability policy), so the standard library's values are right for every code point that the probe finds to have one.
tests/engine/test_tokenizer_unicode.py compares all 0x110000 code points with the installed library again.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
BITS = {"L": 1, "N": 2, "S": 4, "W": 8, "D": 16, "Q": 32, "C": 64}  # Q: NFC_Quick_Check is not Yes; C: ccc is not 0
BLOCK = 128
HERE = Path(__file__).parent


def probe_classes() -> dict[str, set[int]]:
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    found: dict[str, set[int]] = {}
    for name, pattern in (("L", r"\p{L}"), ("N", r"\p{N}"), ("S", r"\s")):
        split = pre_tokenizers.Split(Regex(pattern), "removed")
        found[name] = {c for c in CODE_POINTS if not split.pre_tokenize_str(chr(c))}
    digits = pre_tokenizers.Digits(individual_digits=True)
    found["D"] = {c for c in CODE_POINTS if len(digits.pre_tokenize_str("a" + chr(c))) == 2}
    tokenizer = Tokenizer(models.BPE(vocab={"?": 0}, merges=[], unk_token="?"))
    tokenizer.add_tokens([AddedToken("zz", single_word=True, normalized=False)])
    word = tokenizer.token_to_id("zz")
    found["W"] = {c for c in CODE_POINTS if word not in tokenizer.encode(chr(c) + "zz").ids}
    return found


def probe_nfc() -> tuple[dict[int, str], dict[str, int], dict[int, int]]:
    """(full canonical decomposition, pair -> composite, combining class). Hangul syllables are left to arithmetic."""
    from tokenizers import normalizers

    nfd, nfc = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str
    decomposed = {c: nfd(chr(c)) for c in CODE_POINTS if not 0xAC00 <= c <= 0xD7A3}
    decomposed = {c: text for c, text in decomposed.items() if text != chr(c)}
    composed: dict[str, int] = {}
    for c, text in decomposed.items():
        if nfc(chr(c)) != chr(c):
            continue  # a composition exclusion or a singleton
        # The primary composite's pair is (composite or first character of all but the last, last character).
        composed[nfc(text[:-1]) + text[-1]] = c
    classes = {}
    for c in CODE_POINTS:
        char = chr(c)
        # U+0334 has the lowest class (1) and U+0345 the highest (240): one of the two swaps with any other mark.
        if c not in decomposed and (nfd(char + "\u0334")[0] == "\u0334" or nfd("\u0345" + char)[-1] == "\u0345"):
            classes[c] = unicodedata.combining(char)
    classes[0x334], classes[0x345] = 1, 240
    bad = [pair for pair in composed if len(pair) != 2]
    if bad or 0 in classes.values():
        raise SystemExit(f"the probe met pairs or classes it does not understand: {bad[:5]}")
    return decomposed, composed, classes


def ranges(members: set[int]) -> list[list[int]]:
    out: list[list[int]] = []
    for c in sorted(members):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def c_array(kind: str, name: str, values: list[Any]) -> str:
    lines, line = [], "   "
    for value in values:
        if len(line) + len(str(value)) > 116:
            lines.append(line)
            line = "   "
        line += f" {value},"
    return f"static const {kind} {name}[{len(values)}] = {{\n" + "\n".join([*lines, line]) + "\n};\n"


def main() -> None:
    import tokenizers

    classes = probe_classes()
    decomposed, composed, combining = probe_nfc()
    hangul_maybe = set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))
    classes["Q"] = {ord(pair[1]) for pair in composed} | hangul_maybe | (set(decomposed) - set(composed.values()))
    classes["C"] = set(combining)
    flags = bytearray(0x110000)
    for name, members in classes.items():
        for c in members:
            flags[c] |= BITS[name]
    blocks: dict[bytes, int] = {}
    stage1 = [blocks.setdefault(bytes(flags[i : i + BLOCK]), len(blocks)) for i in range(0, len(flags), BLOCK)]
    made_by = f"made by engine/tokenizer/gen_unicode.py from tokenizers {tokenizers.__version__}; do not edit"
    versions = {"L": "16.0", "N": "16.0", "S": "16.0", "W": "16.0", "D": "17.0", "NFC": "9.0"}
    data = {
        "made_by": made_by,
        "unicode": versions,
        "classes": {name: ranges(members) for name, members in classes.items()},
        "ccc": sorted(combining.items()),
        "decomposed": sorted(decomposed.items()),
        "composed": sorted([ord(pair[0]), ord(pair[1]), c] for pair, c in composed.items()),
    }
    (HERE / "_unicode.json").write_text(json.dumps(data, ensure_ascii=True, separators=(",", ":")) + "\n")

    text: list[int] = []
    index: list[tuple[int, int, int]] = []
    for c, full in sorted(decomposed.items()):
        index.append((c, len(text), len(full)))
        text.extend(ord(part) for part in full)
    pairs = sorted((ord(pair[0]) << 21 | ord(pair[1]), c) for pair, c in composed.items())
    header = [
        f"/* {made_by}.",
        " * Unicode versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ". */",
        *(f"#define UC_{name} {bit}" for name, bit in BITS.items()),
        "",
        c_array("uint16_t", "uc_stage1", stage1),
        c_array("uint8_t", "uc_stage2", [value for block in blocks for value in block]),
        "/* code point << 8 | canonical combining class, ascending */",
        c_array("uint32_t", "uc_ccc", [f"0x{c << 8 | k:x}u" for c, k in sorted(combining.items())]),
        "/* code point << 32 | offset in uc_decomposition << 8 | length, ascending */",
        c_array("uint64_t", "uc_decomposed", [f"0x{c << 32 | at << 8 | n:x}ull" for c, at, n in index]),
        c_array("uint32_t", "uc_decomposition", [f"0x{c:x}" for c in text]),
        "/* first << 21 | second, ascending, and what they compose to */",
        c_array("uint64_t", "uc_pairs", [f"0x{key:x}ull" for key, _ in pairs]),
        c_array("uint32_t", "uc_composites", [f"0x{c:x}" for _, c in pairs]),
    ]
    (HERE / "_unicode.h").write_text("\n".join(header))


if __name__ == "__main__":
    main()

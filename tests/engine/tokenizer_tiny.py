"""Tiny tokenizers trained on a fixed text, and the same file read by both libraries."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from engine.tokenizer import Tokenizer
from engine.tokenizer.spec import bytes_to_chars

TRAINING = [
    "the cat sat on the mat and the hat that the cat had sat on was flat",
    "don't we'll they've it's I'm 'tis 12345 1999 2024 100 3.14",
    "naïve café déjà vu señor Straße 你好世界 こんにちは 안녕 Привет мир e\u0301 a\u0308",
    "if (x == 1) {\n    return foo(bar);\n}\n\n\n  while True:\n\tpass  # ok",
]


ALPHABET = bytes_to_chars()


def _merges(words: Counter[tuple[str, ...]], count: int) -> list[tuple[str, str]]:
    """Plain BPE training (Sennrich et al. 2016); ties go to the smaller pair, so that every run gives the same file."""
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_joined(word, best): times for word, times in words.items()})
    return merges


def _joined(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    at = 0
    while at < len(word):
        step = 2 if word[at : at + 2] == pair else 1
        out.append("".join(word[at : at + step]))
        at += step
    return tuple(out)


@cache
def _trained(byte_level: bool) -> str:
    words = re.findall(r" ?[^ \n]+|\n+| +", "\n".join(TRAINING))
    if byte_level:
        base = list(ALPHABET.values())
        split = Counter(tuple(ALPHABET[b] for b in word.encode()) for word in words)
    else:
        known = set("".join(TRAINING)) - set("好界é ") | {"▁"}
        base = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *sorted(known)]
        split = Counter(tuple(c for c in word.replace(" ", "▁") if c in base) for word in words)
    merges = _merges(split, 300)
    vocab = {token: at for at, token in enumerate(dict.fromkeys([*base, *(a + b for a, b in merges)]))}
    special = [] if byte_level else [added(at, token, special=True) for at, token in enumerate(base[:3])]
    model = {
        "type": "BPE", "dropout": None, "unk_token": None if byte_level else "<unk>", "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": not byte_level, "byte_fallback": not byte_level, "ignore_merges": False,
        "vocab": vocab, "merges": [f"{a} {b}" for a, b in merges],
    }  # fmt: skip
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    data = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None if byte_level else {"type": "Sequence", "normalizers": [prepend, replace]},
        "pre_tokenizer": step if byte_level else None, "post_processor": None,
        "decoder": step if byte_level else LLAMA_DECODER, "model": model,
    }  # fmt: skip
    return json.dumps(data)


LLAMA_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def tiny(*, byte_level: bool = True, **changes: Any) -> dict[str, Any]:
    """tokenizer.json as a dict; `model__key=value` changes model.key, anything else a key of the top level."""
    data: dict[str, Any] = copy.deepcopy(json.loads(_trained(byte_level)))
    for key, value in changes.items():
        if key.startswith("model__"):
            data["model"][key.removeprefix("model__")] = value
        else:
            data[key] = value
    return data


def added(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": token_id, "content": content, **{name: flags.get(name, False) for name in names}}


def both(tmp_path: Path, data: dict[str, Any]) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    return Tokenizer.from_dir(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def load(tmp_path: Path, data: Any, **files: str) -> Tokenizer:
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_text(content)
    return Tokenizer.from_dir(tmp_path)

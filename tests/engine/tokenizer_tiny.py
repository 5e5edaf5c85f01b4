"""Tiny tokenizers trained with the `tokenizers` library on a fixed text, and the same file read by both libraries."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from engine.tokenizer import Tokenizer

TRAINING = [
    "the cat sat on the mat and the hat that the cat had sat on was flat",
    "don't we'll they've it's I'm 'tis 12345 1999 2024 100 3.14",
    "naïve café déjà vu señor Straße 你好世界 こんにちは 안녕 Привет мир e\u0301 a\u0308",
    "if (x == 1) {\n    return foo(bar);\n}\n\n\n  while True:\n\tpass  # ok",
]


@cache
def _trained(byte_level: bool) -> str:
    tokenizer = tokenizers.Tokenizer(
        models.BPE(unk_token=None if byte_level else "<unk>", byte_fallback=not byte_level)
    )
    special = [] if byte_level else ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False, limit_alphabet=60
    )
    tokenizer.train_from_iterator(TRAINING * 3, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if not t["content"].startswith("<0x")]
    if byte_level:
        data["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    else:
        data["pre_tokenizer"] = None
        data["decoder"] = LLAMA_DECODER
        data["model"]["fuse_unk"] = True
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

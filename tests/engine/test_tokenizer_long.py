"""Long pre-tokens, which are merged window after window, and remembered words: ids equal to those of `tokenizers`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import FULL, real_dir
from tokenizer_tiny import both, tiny

from engine.tokenizer import Tokenizer
from engine.tokenizer.pure import PureEncoder

NO_REGEX = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def with_merges(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    data = tiny(pre_tokenizer=NO_REGEX)
    vocab: dict[str, int] = {token: at for token, at in data["model"]["vocab"].items() if at < 256}
    for a, b in pairs:
        vocab.setdefault(a + b, len(vocab))
    data["model"] |= {"vocab": vocab, "merges": [f"{a} {b}" for a, b in pairs]}
    return data


def random_merges(rng: random.Random, letters: str, count: int) -> list[tuple[str, str]]:
    """Merges of any two tokens in any order, so that a merge may make a pair that ranks before it."""
    tokens = list(letters)
    pairs: dict[tuple[str, str], None] = {}
    for _ in range(count):
        a, b = rng.choice(tokens), rng.choice(tokens)
        if a + b not in tokens and len(a + b) <= 300:
            tokens.append(a + b)
            pairs[a, b] = None
    order = list(pairs)
    if rng.random() < 0.7:
        rng.shuffle(order)
    return order


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200 if FULL else 20))
def test_any_merges(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    letters = "abcd"[: rng.randint(1, 4)]
    data = with_merges(random_merges(rng, letters, rng.choice([3, 10, 40, 150])))
    ours, theirs = both(tmp_path, data)
    pure = PureEncoder(ours.spec)
    for _ in range(3):
        size = rng.choice([49, 2047, 2049, 4100, 9000])
        unit = "".join(rng.choices(letters, k=rng.choice([1, 2, 7, size])))
        text = rng.choice(["", *letters]) + (unit * size)[:size]
        ids = ours.encode(text)
        assert ids == pure.encode(text), (seed, unit[:20], size)
        assert ours.decode(ids) == text
        assert ids == theirs.encode(text).ids, (seed, unit[:20], size)


def test_tokens_longer_than_a_window(tmp_path: Path) -> None:
    powers = ["a" * 2**n for n in range(14)]  # up to 8192
    ours, theirs = both(tmp_path, with_merges([(a, a) for a in powers[:-1]] + [("b", powers[3]), (powers[12], "c")]))
    for text in ("a" * 50_001, "b" + "a" * 20_000, "a" * 20_479 + "c", ("a" * 4096 + "c") * 5, "ba" * 9_000):
        assert ours.encode(text) == theirs.encode(text).ids


def test_a_whole_word_is_not_a_part_of_one(tmp_path: Path) -> None:
    """ignore_merges makes a word that is a token one id; as part of a longer word it is what the merges make of it."""
    data = tiny(model__ignore_merges=True)
    vocab = data["model"]["vocab"]
    vocab["qzj"] = len(vocab)  # a token that no merge makes
    ours, theirs = both(tmp_path, data)
    assert ours.encode("qzj") == [vocab["qzj"]]
    for text in ("qzj", "qzjqzj", "qzj the\u00e9qzj", "aqzj", "qzja", "qzj", "qzj\u4f60", "qzj"):
        assert ours.encode(text) == theirs.encode(text).ids, text


PIECES = [
    " ",
    "  ",
    "\u2581",
    "\n",
    "\n\n",
    "\t",
    "a",
    "the",
    "cat",
    "\u00c1",
    "\u2580",
    "\u2601",
    "12",
    ".",
    "</s>",
    "\u4f60",
    "é",
]


@pytest.mark.parametrize("form", ["legacy", "metaspace", "real"])
def test_spaces_stand_for_u2581(tmp_path: Path, form: str) -> None:
    """Spaces, U+2581 and characters whose UTF-8 looks like its ends, in every order (U+00C1 ends in 0x81 too)."""
    if form == "real":
        theirs_file = real_dir("llama2")
        data = (theirs_file / "tokenizer.json").read_text()
        (tmp_path / "tokenizer.json").write_text(data)
        import tokenizers

        ours, theirs = Tokenizer.from_dir(tmp_path), tokenizers.Tokenizer.from_str(data)
    else:
        meta = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
        changes = {"normalizer": None, "pre_tokenizer": meta} if form == "metaspace" else {}
        ours, theirs = both(tmp_path, tiny(byte_level=False, **changes))
    rng = random.Random(7)
    for _ in range(20_000 if FULL else 1_500):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 14)))
        assert ours.encode(text) == theirs.encode(text).ids, repr(text)

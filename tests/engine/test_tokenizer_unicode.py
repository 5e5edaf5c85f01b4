"""Unicode properties and NFC equal to what the installed `tokenizers` does, for every code point."""

from __future__ import annotations

import random
import unicodedata

import pytest
from tokenizer_files import FULL, MARKS
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine.tokenizer._bpe import Core
from engine.tokenizer.unicode import D, L, N, S, W, char_flags, nfc

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]


def test_compiled_and_python_tables_are_the_same() -> None:
    assert bytes(Core.char_flags(c) for c in range(0x110000)) == char_flags()


@pytest.mark.parametrize(("pattern", "bit"), [(r"\p{L}", L), (r"\p{N}", N), (r"\s", S)])
def test_classes_of_split(pattern: str, bit: int) -> None:
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    theirs = {c for c in CODE_POINTS if not split.pre_tokenize_str(chr(c))}
    assert theirs == {c for c in CODE_POINTS if char_flags()[c] & bit}


def test_class_of_digits() -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs = {c for c in CODE_POINTS if len(digits.pre_tokenize_str("a" + chr(c))) == 2}
    assert theirs == {c for c in CODE_POINTS if char_flags()[c] & D}


@pytest.mark.slow
def test_word_characters_of_added_tokens() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"?": 0}, merges=[], unk_token="?"))
    tokenizer.add_tokens([AddedToken("zz", single_word=True, normalized=False)])
    word = tokenizer.token_to_id("zz")
    step = 1 if FULL else 7
    some = CODE_POINTS[::step]
    theirs = {c for c in some if word not in tokenizer.encode(chr(c) + "zz").ids}
    assert theirs == {c for c in some if char_flags()[c] & W}


def test_nfc_of_every_code_point_and_with_marks() -> None:
    theirs = normalizers.NFC().normalize_str
    for c in CODE_POINTS:
        char = chr(c)
        assert Core.nfc(char) == theirs(char)
    flags = char_flags()
    for c in CODE_POINTS:
        if flags[c] >> 5:  # takes part in normalization
            for text in (chr(c) + "\u0323\u0301", "a\u0345" + chr(c) + "\u0334", chr(c) + chr(c) + "\u1161\u11a8"):
                assert Core.nfc(text) == theirs(text) == nfc(text), ascii(text)


def test_nfc_of_random_text() -> None:
    theirs = normalizers.NFC().normalize_str
    rng = random.Random(11)
    composing = [chr(c) for c in CODE_POINTS if char_flags()[c] >> 5]
    for _ in range(20_000 if FULL else 1_500):
        text = "".join(rng.choice((rng.choice(composing), rng.choice(MARKS), rng.choice("aeoKÅ가\u1100 ")))
                       for _ in range(rng.randint(1, 40)))  # fmt: skip
        assert Core.nfc(text) == theirs(text) == nfc(text), ascii(text)


def test_nfc_agrees_with_the_standard_library_on_old_characters() -> None:
    # An oracle that our tables were not made from; characters that are older than the library's Unicode 9.0 only.
    for text in ("e\u0301", "\u1100\u1161\u11a8", "\u2126", "q\u0307\u0323", "\u0f73", "\u0344", "\ufb1d", "\u1e69"):
        assert Core.nfc(text) == unicodedata.normalize("NFC", text)

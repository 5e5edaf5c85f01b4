"""Streaming decode: only whole characters, never taken back, and together exactly decode."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_tiny import added, load, tiny

from engine.tokenizer import Detokenizer, Tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    data = tiny()
    data["added_tokens"] = [added(1000, "<|end|>", special=True), added(1001, "<tool>")]
    return load(tmp_path_factory.mktemp("byte"), data)


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("text"), tiny(byte_level=False))


def bytes_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [tokenizer.spec.byte_ids[b] for b in data]


def pushed(tokenizer: Tokenizer, ids: list[int], **kwargs: bool) -> list[str]:
    stream = Detokenizer(tokenizer, **kwargs)
    return [*(stream.push([i]) for i in ids), stream.flush()]


def test_emoji_in_four_tokens(byte_level: Tokenizer) -> None:
    # B-01: what a client sees token by token.
    assert pushed(byte_level, bytes_ids(byte_level, "😀".encode())) == ["", "", "", "😀", ""]


def test_cut_character_becomes_one_replacement_at_the_end_only(byte_level: Tokenizer) -> None:
    assert pushed(byte_level, bytes_ids(byte_level, b"a\xf0\x9f\x98")) == ["a", "", "", "", "\ufffd"]


def test_invalid_bytes_are_replaced_as_soon_as_they_are_certain(byte_level: Tokenizer) -> None:
    # One U+FFFD per maximal subpart (Unicode Standard, 3.9 U+FFFD Substitution of Maximal Subparts).
    assert pushed(byte_level, bytes_ids(byte_level, b"\xe2\x82a\xff")) == ["", "", "\ufffda", "\ufffd", ""]


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("cat"), 1000, 1001]
    assert "".join(pushed(byte_level, ids)) == "cat<tool>"
    assert "".join(pushed(byte_level, ids, skip_special_tokens=False)) == "cat<|end|><tool>"


def test_a_skipped_special_token_does_not_break_a_character(byte_level: Tokenizer) -> None:
    first, second = bytes_ids(byte_level, "é".encode())
    assert "".join(pushed(byte_level, [first, 1000, second])) == "é"
    assert "".join(pushed(byte_level, [first, 1000, second], skip_special_tokens=False)) == "\ufffd<|end|>\ufffd"


def test_sentence_piece_keeps_the_spaces_between_words(sentence_piece: Tokenizer) -> None:
    # B-10: "Iamtesting" when Strip is applied to every token.
    ids = sentence_piece.encode("the cat sat on the mat")
    parts = pushed(sentence_piece, ids)
    assert "".join(parts) == "the cat sat on the mat"
    assert parts[0] == "the"
    assert parts[1].startswith(" ")


def test_sentence_piece_strips_one_space_at_the_very_start_only(sentence_piece: Tokenizer) -> None:
    (space,) = [i for i, t in enumerate(sentence_piece.spec.texts) if t == "▁"]
    assert pushed(sentence_piece, [space, space, space]) == ["", " ", " ", ""]
    letter = sentence_piece.spec.vocab["t"]
    assert "".join(pushed(sentence_piece, [letter, space, letter])) == "t t"


def test_sentence_piece_bytes(sentence_piece: Tokenizer) -> None:
    letter = sentence_piece.spec.vocab["t"]
    good, bad = bytes_ids(sentence_piece, "😀".encode()), bytes_ids(sentence_piece, b"\xf0\x9f")
    assert pushed(sentence_piece, [*good, letter]) == ["", "", "", "", "😀t", ""]
    assert pushed(sentence_piece, [*bad, letter]) == ["", "", "\ufffd\ufffdt", ""]
    assert pushed(sentence_piece, good) == ["", "", "", "", "😀"]


def test_choices_do_not_share_a_buffer(byte_level: Tokenizer) -> None:
    first, second = bytes_ids(byte_level, "é".encode())
    one, two = Detokenizer(byte_level), Detokenizer(byte_level)
    assert (one.push([first]), two.push([second])) == ("", "\ufffd")
    assert one.push([second]) == "é"


def test_token_text_and_bytes(byte_level: Tokenizer, sentence_piece: Tokenizer) -> None:
    first = bytes_ids(byte_level, "é".encode())[0]
    assert (byte_level.token_bytes(first), byte_level.token_text(first)) == (b"\xc3", "\ufffd")
    assert byte_level.token_bytes(1000) == b"<|end|>"
    assert sentence_piece.token_bytes(sentence_piece.spec.vocab["▁the"]) == b" the"
    assert sentence_piece.token_bytes(sentence_piece.spec.byte_ids[0xF0]) == b"\xf0"


@given(data=st.data())
def test_any_ids_in_any_pieces(byte_level: Tokenizer, sentence_piece: Tokenizer, data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([byte_level, sentence_piece]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    stream = Detokenizer(tokenizer)
    parts = [stream.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join([*parts, stream.flush()]) == tokenizer.decode(ids)


@given(text=st.text(max_size=60))
def test_what_was_encoded_comes_back(byte_level: Tokenizer, sentence_piece: Tokenizer, text: str) -> None:
    assert "".join(pushed(byte_level, byte_level.encode(text, parse_special=False))) == text
    if "\u2581" not in text:
        assert sentence_piece.decode(sentence_piece.encode(text, parse_special=False)) == text


def test_loading_is_from_a_path_or_a_string(tmp_path: Path) -> None:
    load(tmp_path, tiny())
    assert Tokenizer.from_dir(str(tmp_path)).encode("cat") == Tokenizer.from_dir(tmp_path).encode("cat")

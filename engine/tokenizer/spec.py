"""tokenizer.json -> Spec: what both encoders (C core and pure Python) are built from.

Only what is understood exactly is accepted. Anything else is refused by name with TokenizerError: a tokenizer that is
nearly right makes a model quietly worse, which is harder to find than a refusal at load.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import TokenizerError
from engine.tokenizer.added import AddedToken, read_added_tokens
from engine.tokenizer.decoders import Decoder, read_decoder
from engine.tokenizer.unicode import nfc

MAX_FILE_BYTES = 256 << 20
MAX_TOKEN_ID = (1 << 22) - 1  # bounds the id -> token table whatever ids a file claims
MAX_MERGES = 1 << 22
META = "\u2581"

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_PATTERNS = {_PATTERN % r"\p{N}{1,3}": 3, _PATTERN % r"\p{N}": 1}
"""The Split regexes with a hand-written scanner, and how many numbers one pre-token may hold: Llama-3, Qwen2."""
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Split(IntEnum):
    NONE = 0  # the whole piece is one pre-token (Llama-2)
    GPT2 = 1
    LLAMA3 = 2  # also Qwen2 with max_numbers = 1
    META = 3  # before every U+2581 (Metaspace with split)
    META_RUNS = 4  # before every run of U+2581; only chosen when it cannot change the ids of NONE


class Digits(IntEnum):
    OFF = 0
    RUNS = 1
    INDIVIDUAL = 2


class Prefix(IntEnum):
    """Text put before a piece by the pre-tokenizer unless it starts with it already."""

    NEVER = 0
    FIRST = 1  # only the piece at the very start of the text
    ALWAYS = 2


@dataclass(frozen=True, slots=True)
class NormalizerStep:
    kind: int  # 0 prepend `text`, 1 replace `text` by `to`, 2 NFC
    text: str = ""
    to: str = ""


@dataclass(frozen=True, slots=True)
class Merges:
    """Columns of equal length: ids left and right become `merged`; the lowest `rank` goes first."""

    left: array[int]
    right: array[int]
    merged: array[int]
    rank: array[int]


@dataclass(slots=True)
class Spec:
    """Everything that decides ids. Token ids are indices of `texts` and `keys`; holes are None."""

    texts: list[str | None]  # as in the file; added tokens included
    keys: list[bytes | None]  # bytes of a pre-token that the BPE vocabulary matches; None for added-only tokens
    vocab: dict[str, int]  # BPE vocabulary only
    merges: Merges
    skipped_merges: int
    byte_level: bool
    byte_ids: array[int]  # 256: id of a single byte (byte level) or of <0xNN> (byte fallback); -1 = none
    unk_id: int
    fuse_unk: bool
    byte_fallback: bool
    ignore_merges: bool
    decoder: Decoder
    normalizer: list[NormalizerStep] = field(default_factory=list)
    digits: Digits = Digits.OFF
    split: Split = Split.NONE
    max_numbers: int = 0
    prefix: Prefix = Prefix.NEVER
    prefix_text: str = ""
    meta_replace: bool = False  # Metaspace turns every space into U+2581
    added: list[AddedToken] = field(default_factory=list)
    template_prefix: list[int] = field(default_factory=list)
    template_suffix: list[int] = field(default_factory=list)

    def normalize(self, text: str) -> str:
        for step in self.normalizer:
            if step.kind == 0:
                text = step.text + text if text else text
            elif step.kind == 1:
                text = text.replace(step.text, step.to)
            else:
                text = nfc(text)
        return text

    def decoder_texts(self) -> list[str | None]:
        """What the decoder sees for each id: of an added token with `normalized`, the normalized text, as in
        `tokenizers`, so that decoding undoes what the normalizer did."""
        texts = list(self.texts)
        for token in self.added:
            if token.normalized:
                texts[token.id] = self.normalize(token.content)
        return texts


def bytes_to_chars() -> dict[int, str]:
    """GPT-2's reversible map from bytes to printable characters (Radford et al. 2019, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in printable}
    others = [b for b in range(256) if b not in table]
    table.update({b: chr(256 + i) for i, b in enumerate(others)})
    return table


def _translation() -> dict[int, str]:
    """For str.translate: byte alphabet -> U+0000..U+00FF; other characters below U+0100 -> one that Latin-1 lacks."""
    table = {ord(char): chr(byte) for byte, char in bytes_to_chars().items()}
    return {c: "\uffff" for c in range(256) if c not in table} | table


_TRANSLATION = _translation()


def byte_level_bytes(text: str) -> bytes | None:
    """The bytes that a byte-level token stands for; None if a character is not of the byte alphabet."""
    try:
        return text.translate(_TRANSLATION).encode("latin-1")
    except UnicodeEncodeError:
        return None


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TokenizerError(f"{path.name} is larger than {MAX_FILE_BYTES >> 20} MiB")
        data = msgspec.json.decode(path.read_bytes())
    except OSError as e:
        raise TokenizerError(f"cannot read {path}: {e.strerror}") from e
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise TokenizerError(f"{path.name} is not valid JSON: {e}") from e
    if not isinstance(data, dict):
        raise TokenizerError(f"{path.name} must hold a JSON object, not {type(data).__name__}")
    return data


def expect(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    """`value` if it is of `kind`; bool never passes for int."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        wanted = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise TokenizerError(f"tokenizer.json: {name} must be {wanted}, not {type(value).__name__}")
    return value


def refuse(name: str, value: Any, hint: str | None = None) -> TokenizerError:
    shown = repr(value)
    return TokenizerError(f"tokenizer.json: {name} {shown[:300]} is not supported", hint=hint)


def load_spec(data: dict[str, Any]) -> Spec:
    for key in ("truncation", "padding"):
        if data.get(key) is not None:
            raise refuse(key, data[key], f"set {key} to null: a prompt is never cut or padded silently")
    model = expect(data.get("model"), dict, "model")
    if model.get("type", "BPE") != "BPE":
        raise refuse("model.type", model["type"])
    vocab = _read_vocab(model)
    added = read_added_tokens(data.get("added_tokens") or [], vocab, MAX_TOKEN_ID)
    size = max([-1, *vocab.values(), *(t.id for t in added)]) + 1
    texts: list[str | None] = [None] * size
    for text, token_id in vocab.items():
        if texts[token_id] is not None:
            raise TokenizerError(f"tokenizer.json: model.vocab gives id {token_id} to two tokens")
        texts[token_id] = text
    for token in added:
        texts[token.id] = token.content
    merges, skipped = _read_merges(model, vocab)
    byte_fallback = _flag(model, "byte_fallback")
    unk = model.get("unk_token")
    if unk is not None and (not isinstance(unk, str) or unk not in vocab):
        raise refuse("model.unk_token", unk, "it must be a token of model.vocab")
    spec = Spec(
        texts=texts,
        keys=[],
        vocab=vocab,
        merges=merges,
        skipped_merges=skipped,
        byte_level=False,
        byte_ids=array("i", [-1] * 256),
        unk_id=-1 if unk is None else vocab[unk],
        fuse_unk=_flag(model, "fuse_unk"),
        byte_fallback=byte_fallback,
        ignore_merges=_flag(model, "ignore_merges"),
        decoder=read_decoder(data.get("decoder")),
        added=added,
    )
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise refuse(f"model.{key}", model[key])
    spec.normalizer = _read_normalizer(data.get("normalizer"))
    _read_pre_tokenizer(spec, data.get("pre_tokenizer"))
    _read_post_processor(spec, data.get("post_processor"))
    _index_bytes(spec)
    if spec.split is Split.NONE and _runs_are_independent(spec):
        spec.split = Split.META_RUNS
    return spec


def _read_vocab(model: dict[str, Any]) -> dict[str, int]:
    vocab = expect(model.get("vocab"), dict, "model.vocab")
    if not set(map(type, vocab.values())) <= {int}:
        raise TokenizerError("tokenizer.json: model.vocab holds an id that is not an integer")
    if vocab and not (min(vocab.values()) >= 0 and max(vocab.values()) <= MAX_TOKEN_ID):
        raise TokenizerError(f"tokenizer.json: model.vocab holds an id outside 0..{MAX_TOKEN_ID}")
    return dict(vocab)


def _read_merges(model: dict[str, Any], vocab: dict[str, int]) -> tuple[Merges, int]:
    """Both file forms: "a b" and ["a", "b"]. An entry that is not a pair of known tokens keeps its rank but is skipped
    (some published files hold such entries; they can never apply). Returns the merges and how many were skipped."""
    raw = expect(model.get("merges", []), list, "model.merges")
    if len(raw) > MAX_MERGES:
        raise TokenizerError(f"tokenizer.json: more than {MAX_MERGES} merges")
    pairs: dict[int, int] = {}  # packed integers: a tuple per merge would keep the garbage collector busy for seconds
    skipped = 0
    for rank, entry in enumerate(raw):
        try:
            left, right = entry.split(" ") if isinstance(entry, str) else _as_pair(entry)
            # Of duplicates the last one counts, as in `tokenizers`.
            pairs[vocab[left] << 32 | vocab[right]] = rank << 32 | vocab[left + right]
        except (ValueError, KeyError):
            skipped += 1
    low = (1 << 32) - 1
    return Merges(
        left=array("I", [key >> 32 for key in pairs]),
        right=array("I", [key & low for key in pairs]),
        merged=array("I", [value & low for value in pairs.values()]),
        rank=array("I", [value >> 32 for value in pairs.values()]),
    ), skipped


def _flag(model: dict[str, Any], key: str) -> bool:
    value = model.get(key)
    return bool(expect(False if value is None else value, bool, f"model.{key}"))


def _as_pair(entry: Any) -> tuple[str, str]:
    match entry:
        case [str(left), str(right)]:
            return left, right
    raise ValueError("not a pair of strings")


def _flatten(section: Any, name: str, items: str) -> list[dict[str, Any]]:
    """The steps of a section that may be null, one object, or a Sequence of objects."""
    if section is None:
        return []
    expect(section, dict, name)
    if section.get("type") != "Sequence":
        return [section]
    return [expect(step, dict, f"{name}.{items}[]") for step in expect(section.get(items), list, f"{name}.{items}")]


def _read_normalizer(section: Any) -> list[NormalizerStep]:
    steps = []
    for step in _flatten(section, "normalizer", "normalizers"):
        match step:
            case {"type": "NFC"}:
                steps.append(NormalizerStep(2))
            case {"type": "Prepend", "prepend": str(text)}:
                steps.append(NormalizerStep(0, text))
            case {"type": "Replace", "pattern": {"String": str(text)}, "content": str(to)} if text:
                steps.append(NormalizerStep(1, text, to))
            case _:
                raise refuse("normalizer", step)
    if len(steps) > 16 or sum(len(s.text) + len(s.to) for s in steps) > 1024:
        raise refuse("normalizer", "with so many or so long steps")
    return steps


def _read_pre_tokenizer(spec: Spec, section: Any) -> None:
    steps = _flatten(section, "pre_tokenizer", "pretokenizers")
    for at, step in enumerate(steps):
        last = at == len(steps) - 1
        match step:
            case {"type": "Digits"} if at == 0 and not last:
                spec.digits = Digits.INDIVIDUAL if step.get("individual_digits") else Digits.RUNS
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"} if (
                not step.get("invert") and not last and spec.split is Split.NONE
            ):
                if regex == GPT2_PATTERN:
                    spec.split = Split.GPT2
                elif regex in SPLIT_PATTERNS:
                    spec.split, spec.max_numbers = Split.LLAMA3, SPLIT_PATTERNS[regex]
                else:
                    raise refuse("pre_tokenizer Split pattern", regex)
            case {"type": "ByteLevel"} if last:
                _read_byte_level(spec, step, alone=at == 0)
            case {"type": "Metaspace"} if last and at == 0:
                _read_metaspace(spec, step)
            case _:
                raise refuse("pre_tokenizer", step if len(steps) == 1 else section)


def _read_byte_level(spec: Spec, step: dict[str, Any], *, alone: bool) -> None:
    spec.byte_level = True
    if step.get("use_regex", True):
        if spec.split is not Split.NONE:
            raise refuse("pre_tokenizer", step, "Split followed by ByteLevel with use_regex is not known")
        spec.split = Split.GPT2
    if step.get("add_prefix_space", True):
        if not alone:
            raise refuse("pre_tokenizer", step, "add_prefix_space after another pre-tokenizer is not known")
        spec.prefix, spec.prefix_text = Prefix.ALWAYS, " "


def _read_metaspace(spec: Spec, step: dict[str, Any]) -> None:
    if step.get("replacement") != META:
        raise refuse("pre_tokenizer", step)
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
    if scheme not in ("always", "first", "never"):
        raise refuse("pre_tokenizer", step)
    if any(n.kind == 0 for n in spec.normalizer) and scheme == "first":
        raise refuse("pre_tokenizer", step, 'prepend_scheme "first" beside a Prepend normalizer is not known')
    spec.prefix, spec.prefix_text = Prefix[scheme.upper()], META
    spec.meta_replace = True
    if step.get("split", True):
        spec.split = Split.META


def _read_post_processor(spec: Spec, section: Any) -> None:
    for step in _flatten(section, "post_processor", "processors"):
        match step:
            case {"type": "ByteLevel"}:
                pass  # only moves offsets, which we do not report
            case {"type": "TemplateProcessing", "single": list(single), "special_tokens": dict(special)}:
                before, after = _read_template(single, special, len(spec.texts))
                spec.template_prefix = before + spec.template_prefix
                spec.template_suffix = spec.template_suffix + after
            case _:
                raise refuse("post_processor", step)


def _read_template(single: list[Any], special: dict[str, Any], size: int) -> tuple[list[int], list[int]]:
    sides: list[list[int]] = [[]]
    for item in single:
        match item:
            case {"Sequence": {"id": "A"}} if len(sides) == 1:
                sides.append([])
            case {"SpecialToken": {"id": str(name)}} if isinstance(special.get(name), dict):
                ids = expect(special[name].get("ids"), list, "post_processor.special_tokens.ids")
                if not all(type(i) is int and 0 <= i < size for i in ids) or len(sides[-1]) + len(ids) > 64:
                    raise refuse("post_processor.special_tokens", special[name])
                sides[-1].extend(ids)
            case _:
                raise refuse("post_processor TemplateProcessing item", item)
    if len(sides) != 2:
        raise refuse("post_processor TemplateProcessing", single)
    return sides[0], sides[1]


def _index_bytes(spec: Spec) -> None:
    """Fill `keys` and `byte_ids`. Byte level: a key is the bytes its characters stand for."""
    keys: list[bytes | None] = [None] * len(spec.texts)
    for text, token_id in spec.vocab.items():
        keys[token_id] = byte_level_bytes(text) if spec.byte_level else text.encode()
    if "" in spec.vocab:
        keys[spec.vocab[""]] = None
    spec.keys = keys
    for byte, char in bytes_to_chars().items():
        name = char if spec.byte_level else f"<0x{byte:02X}>"
        if spec.byte_level or spec.byte_fallback:
            spec.byte_ids[byte] = spec.vocab.get(name, -1)


def _runs_are_independent(spec: Spec) -> bool:
    """May a piece be cut before every run of U+2581 without changing any id?

    Yes if no merge makes a token in which U+2581 follows another character, so that nothing ever merges across such a
    border, and no unknown token can be fused across it.
    """
    inside = re.compile(f"[^{META}]{META}")
    if spec.byte_level or -1 in spec.byte_ids:
        return False
    return not any(inside.search(spec.texts[token_id] or "") for token_id in spec.merges.merged)

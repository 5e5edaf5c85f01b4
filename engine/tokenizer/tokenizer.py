"""Tokenizer and Detokenizer: text <-> token ids, equal to the `tokenizers` library on the same tokenizer.json."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import TextError, TokenizerError
from engine.tokenizer import decoders
from engine.tokenizer.chat import ChatTemplates, named_tokens
from engine.tokenizer.pure import PureEncoder
from engine.tokenizer.spec import Spec, byte_level_bytes, load_spec, read_json

if TYPE_CHECKING:
    from collections.abc import Sequence


class Encoder(Protocol):
    def encode(
        self, text: str, parse_special: bool = True, before: tuple[int, ...] = (), after: tuple[int, ...] = (), /
    ) -> list[int]: ...


def compiled_encoder(spec: Spec) -> Encoder:
    try:
        from engine.tokenizer.core import make_core
    except ImportError as e:
        raise TokenizerError(
            "the compiled tokenizer engine.tokenizer._bpe is not built",
            hint="run `make setup` (or `python setup.py build_ext --inplace`)",
        ) from e
    return make_core(spec)


class Tokenizer:
    """Immutable after construction and safe to share between threads; `encode` releases the GIL for long input.

    vocab_size: highest id + 1, added tokens included (a model's embedding may have more rows: padding).
    special_ids: text -> id of the added tokens that are special.
    """

    def __init__(self, spec: Spec, *, config: dict[str, Any] | None = None, template: str | None = None,
                 pure_python: bool = False) -> None:  # fmt: skip
        self.spec = spec
        self.vocab_size = len(spec.texts)
        self.special_ids = {t.content: t.id for t in spec.added if t.special}
        self.added_ids = {t.content: t.id for t in spec.added}
        self._special = frozenset(self.special_ids.values())
        self._encoder: Encoder = PureEncoder(spec) if pure_python else compiled_encoder(spec)
        self._before, self._after = tuple(spec.template_prefix), tuple(spec.template_suffix)
        config = config or {}
        self.special_tokens = named_tokens(config)
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token"))
        self.eos_token_id = self.token_id(self.special_tokens.get("eos_token"))
        self._templates = ChatTemplates(config.get("chat_template"), template, self.special_tokens)
        self._texts = spec.decoder_texts()
        self._bytes: list[bytes | None] = []
        self._pieces: list[str | int | None] = []
        if spec.decoder.kind == "byte_level":
            self._bytes = decoders.byte_pieces(self._texts, byte_level_bytes)
        else:
            self._pieces = decoders.text_pieces(self._texts, spec.decoder)

    @classmethod
    def from_dir(cls, path: str | Path, *, pure_python: bool = False) -> Tokenizer:
        """Reads tokenizer.json and, where they exist, tokenizer_config.json, special_tokens_map.json and
        chat_template.jinja. TokenizerError names what is damaged or not supported."""
        path = Path(path)
        spec = load_spec(read_json(path / "tokenizer.json"))
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (path / name).exists():
                config.update(read_json(path / name))
        template = path / "chat_template.jinja"
        try:
            source = template.read_text(encoding="utf-8") if template.exists() else None
        except (OSError, UnicodeDecodeError) as e:
            raise TokenizerError(f"cannot read {template.name}: {e}") from e
        return cls(spec, config=config, template=source, pure_python=pure_python)

    def token_id(self, text: str | None) -> int | None:
        """The id of exactly this token, or None."""
        if text is None:
            return None
        added = self.added_ids.get(text)
        return self.spec.vocab.get(text) if added is None else added

    # ---- text -> ids ------------------------------------------------------------------------------------------------

    def encode(self, text: str | bytes, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """add_special_tokens: put the template's BOS/EOS around the ids (False for text that a chat template made).
        parse_special: find special tokens in the text; False takes their spelling as plain text, while added tokens
        that are not special are still found. TextError for anything that is not Unicode text, with the byte position.
        """
        text = as_text(text)
        before, after = (self._before, self._after) if add_special_tokens else ((), ())
        try:
            return self._encoder.encode(text, parse_special, before, after)
        except UnicodeEncodeError as e:
            at = len(text[: e.start].encode())
            bad = f"lone surrogate U+{ord(text[e.start]):04X} at byte {at} (character {e.start})"
            raise TextError(f"{bad} is not text", position=at) from e
        except OverflowError as e:
            raise TextError(f"the text is too long: {e}") from e

    def work(self) -> int:
        """Bytes looked at, look-ups, merges and heap moves of the last encode (compiled core): a clock for tests."""
        return int(getattr(self._encoder, "last_work", 0))

    # ---- ids -> text ------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids without a token (padding rows of an embedding) give no text; a negative id is a TextError."""
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return stream.push(ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to a text, in the middle of it; b"" for an id without a token."""
        table: Sequence[bytes | str | int | None] = self._bytes or self._pieces
        piece = table[token_id] if 0 <= token_id < len(table) else None
        if isinstance(piece, str):
            return piece.encode()
        return bytes([piece]) if isinstance(piece, int) else piece or b""

    def token_text(self, token_id: int) -> str:
        """token_bytes as text; U+FFFD for bytes that are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def new_stream(self) -> decoders.Incremental:
        if self.spec.decoder.kind == "byte_level":
            return decoders.ByteStream(self._bytes)
        return decoders.PieceStream(self.spec.decoder, self._pieces, self._texts)

    def visible(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        checked = [operator.index(i) for i in ids]
        if checked and min(checked) < 0:
            raise TextError(f"token id {min(checked)} is negative")
        if skip_special_tokens:
            return [i for i in checked if i not in self._special]
        return checked

    # ---- chat -------------------------------------------------------------------------------------------------------

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
                            add_generation_prompt: bool = True, **kwargs: Any) -> str:  # fmt: skip
        """The prompt text of a chat; encode it with add_special_tokens=False (the template prints its own BOS).
        TemplateError if there is no template, or it fails or rejects these messages."""
        return self._templates.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)


class Detokenizer:
    """Streaming decode for one choice: what push returned so far, plus flush, is always decode of all ids.

    Only complete characters are emitted. A character that is cut off by the end becomes U+FFFD in flush.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = tokenizer.new_stream()

    def push(self, ids: Sequence[int]) -> str:
        return self._stream.push(self._tokenizer.visible(ids, self._skip))

    def flush(self) -> str:
        """The end of the text; the Detokenizer must not be used afterwards."""
        return self._stream.flush()


def as_text(text: str | bytes) -> str:
    """Strict: nothing is ever replaced; TextError.position is the byte offset of the first bad byte. Lone surrogates of
    a str are left to the encoder, which needs its UTF-8 anyway."""
    if isinstance(text, bytes | bytearray | memoryview):
        try:
            return bytes(text).decode()
        except UnicodeDecodeError as e:
            raise TextError(
                f"not valid UTF-8: byte 0x{e.object[e.start]:02x} at position {e.start} ({e.reason})",
                position=e.start,
                hint="send the text as UTF-8; POST /encoding/detect tells what it probably is",
            ) from e
    if not isinstance(text, str):
        raise TextError(f"text must be str or bytes, not {type(text).__name__}")
    return text

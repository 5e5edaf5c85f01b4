"""Token ids -> text, all at once (`decode`) or token by token (`Detokenizer`), with the same result.

Three decoders of tokenizer.json are known: ByteLevel; Sequence of Replace / ByteFallback / Fuse / Strip (Llama-2,
Mistral); Metaspace. Each is written once, as an incremental decoder; decode is push everything, then flush.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")


@dataclass(frozen=True, slots=True)
class Decoder:
    kind: str  # "byte_level", "byte_fallback" or "metaspace"
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""  # this character, up to `strip_count` times, at the very start of the text
    strip_count: int = 0
    drop_first: bool = False  # Metaspace: the replacement characters of the first token vanish

    def text_of(self, token: str) -> str:
        for old, new in self.replace:
            token = token.replace(old, new)
        return token


def read_decoder(section: Any) -> Decoder:
    def refused() -> TokenizerError:
        return TokenizerError(f"tokenizer.json: decoder {str(section)[:300]} is not supported")

    if not isinstance(section, dict):
        raise refused()
    kind, steps = section.get("type"), section.get("decoders")
    if kind == "Sequence" and isinstance(steps, list) and len(steps) == 1 and isinstance(steps[0], dict):
        section, kind = steps[0], steps[0].get("type")
    if kind == "ByteLevel":
        return Decoder("byte_level")
    if kind == "Metaspace" and isinstance(replacement := section.get("replacement"), str) and len(replacement) == 1:
        scheme = section.get("prepend_scheme", "always" if section.get("add_prefix_space", True) else "never")
        if scheme not in ("always", "first", "never"):
            raise refused()
        return Decoder("metaspace", ((replacement, " "),), drop_first=scheme != "never")
    if kind != "Sequence" or not isinstance(steps, list) or len(steps) > 16:
        raise refused()
    return _read_sequence(steps, refused())


def _read_sequence(steps: list[Any], refused: TokenizerError) -> Decoder:
    replace: list[tuple[str, str]] = []
    order = ""
    strip, count = "", 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
                replace.append((old, new))
                order += "R"
            case {"type": "ByteFallback"}:
                order += "B"
            case {"type": "Fuse"}:
                order += "F"
            case {"type": "Strip", "content": str(strip), "start": int(count), "stop": 0} if len(strip) == 1:
                order += "S"
            case _:
                raise refused
    # Strip without Fuse would strip every token; nobody ships that.
    if not re.fullmatch("R*B?(FS?)?", order) or count < 0 or count > 1024:
        raise refused
    return Decoder("byte_fallback", tuple(replace), "B" in order, strip, count)


class Incremental(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class ByteStream:
    """ByteLevel: the bytes of all tokens, as UTF-8. Holds back at most three bytes of an unfinished character."""

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._decoder.decode(b"".join([pieces[i] or b"" for i in ids if i < len(pieces)]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceStream:
    """Byte fallback and Metaspace. `tokens` holds str for text, int for a byte, None for an id without a token.

    A run of byte tokens is text only if all of it is valid UTF-8, else one U+FFFD per byte (as in `tokenizers`), so it
    is held back until the run ends: nothing that was emitted ever has to be taken back.
    """

    def __init__(self, decoder: Decoder, tokens: Sequence[str | int | None], texts: Sequence[str | None]) -> None:
        self._decoder, self._tokens, self._texts = decoder, tokens, texts
        self._run = bytearray()
        self._to_strip = decoder.strip_count
        self._first = decoder.drop_first

    def push(self, ids: Sequence[int]) -> str:
        out: list[str] = []
        for i in ids:
            piece = self._tokens[i] if i < len(self._tokens) else None
            if isinstance(piece, int):
                self._run.append(piece)
            elif piece is not None:
                if self._run:
                    out.append(self._end_run())
                out.append(self._first_piece(i) if self._first else piece)
            if piece is not None:
                self._first = False
        return self._strip("".join(out))

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _first_piece(self, token_id: int) -> str:
        ((replacement, _),) = self._decoder.replace
        return (self._texts[token_id] or "").replace(replacement, "")

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._decoder.strip:
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


def byte_pieces(texts: Sequence[str | None], to_bytes: Callable[[str], bytes | None]) -> list[bytes | None]:
    """ByteLevel: the bytes of each token. A token with any character outside the byte alphabet stands for its UTF-8."""
    pieces: list[bytes | None] = []
    for text in texts:
        piece = None if text is None else to_bytes(text)
        pieces.append(text.encode() if piece is None and text is not None else piece)
    return pieces


def text_pieces(texts: Sequence[str | None], decoder: Decoder) -> list[str | int | None]:
    pieces: list[str | int | None] = []
    for text in texts:
        piece = None if text is None else decoder.text_of(text)
        match = BYTE_TOKEN.fullmatch(piece) if piece is not None and decoder.byte_fallback else None
        pieces.append(int(match[1], 16) if match else piece)
    return pieces

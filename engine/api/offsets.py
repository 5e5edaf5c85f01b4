"""Where the text of each token starts: `text_offset` of the legacy logprobs, in characters of the answer's text."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.api.service import Detokenizer, Service

_SEARCH_CHARS = 64  # how far ahead a token's text is looked for where an echoed text was normalized


class OffsetTracker:
    """Detokenizes token by token and knows where each token's own text starts.

    Bytes of a character that tokens share count for the character: all of them start where it starts. Bytes that never
    became a character are U+FFFD in the text, and the token behind them starts behind it.
    """

    def __init__(self, detokenizer: Detokenizer, service: Service, start: int = 0) -> None:
        """`start`: characters of the text before the first token."""
        self._detokenizer, self._token_bytes = detokenizer, service.tokenizer.token_bytes
        self._length = start  # characters given out so far
        self._held = b""  # bytes of tokens whose text is still held back
        self._begun = False

    def push(self, token: int) -> tuple[str, int]:
        """The text that is complete now (it may end with, or lack, the token's own), and where the token starts."""
        raw = self._token_bytes(token)
        text = self._detokenizer.push((token,))
        start, self._length = self._length, self._length + len(text)
        open_bytes = _open_tail(self._held)
        continues = bool(open_bytes and raw) and _decode_open(open_bytes + raw[:1]) is not None
        if text:
            self._begun = True
            self._held = _open_tail(self._held + raw)
            if continues:
                return text, start
            own = len(codecs.getincrementaldecoder("utf-8")("replace").decode(raw))
            return text, max(start, self._length - own)
        closed = self._held[: len(self._held) - len(open_bytes)]
        if not raw or (_is_text(raw) and (len(raw) > 1 or (raw == b" " and not self._begun))):
            # A special token that is not shown, or a first space that is stripped: nothing is held.
            return text, start + _shown(closed)
        self._begun = True
        place = start + _shown(closed if continues else self._held)
        self._held += raw
        return text, place


def _shown(run: bytes) -> int:
    """Characters of a run of bytes as byte fallback shows it: as text if it is some, else one U+FFFD a byte."""
    return len(run.decode()) if _is_text(run) else len(run)


def _decode_open(raw: bytes) -> str | None:
    """`raw` as UTF-8 of which the last character may be incomplete; None if it is none."""
    if len(raw) > 1 and raw[-2] == 0xED and raw[-1] >= 0xA0:
        return None  # half a surrogate, which the incremental codec waits for all the same
    try:
        return codecs.getincrementaldecoder("utf-8")("strict").decode(raw)
    except UnicodeDecodeError:
        return None


def _open_tail(raw: bytes) -> bytes:
    """The bytes at the end that are the beginning of a character (at most three)."""
    for size in range(min(3, len(raw)), 0, -1):
        if _decode_open(raw[-size:]) == "":
            return raw[-size:]
    return b""


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def prompt_offsets(
    service: Service, ids: Sequence[int], echo: str, added: tuple[int, int] | None, *, skip_special_tokens: bool
) -> list[int]:
    """Where each prompt token starts in `echo`. `added`: None if `echo` was decoded from `ids`; if it is the client's
    own text, how many tokens the tokenizer put before and behind it (BOS, EOS), which are no part of it."""
    front, back = added if added is not None else (0, 0)
    own = ids[front : len(ids) - back]
    skip = skip_special_tokens if added is None else False
    tracker = OffsetTracker(service.make_detokenizer(service.tokenizer, skip_special_tokens=skip), service)
    texts, offsets = [], []
    for token in own:
        text, offset = tracker.push(token)
        texts.append(text)
        offsets.append(offset)
    decoded = "".join(texts)
    if added is not None and not echo.startswith(decoded):
        offsets = _align(decoded, offsets, echo)
    return [0] * front + offsets + [len(echo)] * back


def _align(decoded: str, offsets: list[int], echo: str) -> list[int]:
    """Carry offsets in `decoded` over to `echo`, of which the tokenizer normalized a few places (NFC, spaces)."""
    out, position = [], 0
    for index, offset in enumerate(offsets):
        piece = decoded[offset : offsets[index + 1] if index + 1 < len(offsets) else len(decoded)]
        found = echo.find(piece, position, position + len(piece) + _SEARCH_CHARS) if piece else position
        if found >= 0:
            position = found
        out.append(position)
        if found >= 0:
            position += len(piece)
    return out


def added_tokens(service: Service) -> tuple[int, int]:
    """How many tokens add_special_tokens puts before and behind a text."""
    tokenizer = service.tokenizer
    inner = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    front = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
    return front, len(whole) - front - len(inner)

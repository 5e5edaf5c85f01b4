"""Added and special tokens: found in the text before pre-tokenization (longest match first, left to right)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import TokenizerError

MAX_ADDED_TOKENS = 1 << 17
MAX_CONTENT_BYTES = 512  # bounds the work per input byte of the trie walk
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class AddedToken:
    id: int
    content: str
    single_word: bool = False  # only where no word character touches it
    lstrip: bool = False  # takes the white space before it along
    rstrip: bool = False  # ... after it
    normalized: bool = False  # is looked for in the normalized text, and is itself normalized first
    special: bool = False  # skipped by decode, and not looked for with parse_special=False


def read_added_tokens(raw: Any, vocab: dict[str, int], max_id: int) -> list[AddedToken]:
    """Special tokens first, each kind in file order: that order decides between equal normalized contents."""
    if not isinstance(raw, list) or len(raw) > MAX_ADDED_TOKENS:
        raise TokenizerError(f"tokenizer.json: added_tokens must be a list of at most {MAX_ADDED_TOKENS}")
    by_content: dict[str, AddedToken] = {}
    by_id = {token_id: text for text, token_id in vocab.items()}
    for entry in raw:
        token = _read_one(entry, max_id)
        if not token.content:
            continue  # as in `tokenizers`: an empty token can never be found
        if vocab.get(token.content, token.id) != token.id or by_id.get(token.id, token.content) != token.content:
            raise TokenizerError(
                f"tokenizer.json: added token {token.content[:80]!r} has id {token.id}, but the vocabulary differs"
            )
        if by_content.get(token.content, token).id != token.id:
            raise TokenizerError(f"tokenizer.json: added token {token.content[:80]!r} has two ids")
        by_id[token.id] = token.content
        by_content[token.content] = token
    tokens = list(by_content.values())
    return [t for t in tokens if t.special] + [t for t in tokens if not t.special]


def _read_one(entry: Any, max_id: int) -> AddedToken:
    if not isinstance(entry, dict):
        raise TokenizerError("tokenizer.json: an entry of added_tokens is not an object")
    token_id, content = entry.get("id"), entry.get("content")
    if type(token_id) is not int or not 0 <= token_id <= max_id or not isinstance(content, str):
        raise TokenizerError(f"tokenizer.json: added token with id {token_id!r} and content {str(content)[:80]!r}")
    if len(content.encode()) > MAX_CONTENT_BYTES:
        raise TokenizerError(f"tokenizer.json: added token {token_id} is longer than {MAX_CONTENT_BYTES} bytes")
    flags = {name: entry.get(name, False) for name in FLAGS}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise TokenizerError(f"tokenizer.json: added token {token_id} has a flag that is not true or false")
    return AddedToken(token_id, content, **flags)

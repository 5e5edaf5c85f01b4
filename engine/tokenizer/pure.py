"""The pure-Python encoder: the oracle of the C core (_bpe.c), written for clarity. Same ids, about 100 times slower."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any

from engine.tokenizer.spec import META, Digits, Prefix, Spec, Split
from engine.tokenizer.unicode import D, L, N, S, W, char_flags

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.tokenizer.added import AddedToken


class PureEncoder:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.flags = char_flags()
        m = spec.merges
        self.pairs = {(a, b): (r, new) for a, b, new, r in zip(m.left, m.right, m.merged, m.rank, strict=True)}
        self.words = {key: token_id for token_id, key in enumerate(spec.keys) if key is not None}
        self.raw = {t.content: t for t in reversed(spec.added) if not t.normalized}
        self.normalized = {self.spec.normalize(t.content): t for t in reversed(spec.added) if t.normalized}

    # ---- the whole text ---------------------------------------------------------------------------------------------

    def encode(
        self, text: str, parse_special: bool = True, before: tuple[int, ...] = (), after: tuple[int, ...] = (), /
    ) -> list[int]:
        text.encode()  # lone surrogates: UnicodeEncodeError
        ids = list(before)
        for start, piece, token in self._find_added(text, self.raw, parse_special):
            if token is not None:
                ids.append(token.id)
                continue
            normalized = self.spec.normalize(piece)
            for inner, part, inner_token in self._find_added(normalized, self.normalized, parse_special):
                if inner_token is not None:
                    ids.append(inner_token.id)
                else:
                    for word in self.pre_tokenize(part, at_start=start == 0 and inner == 0):
                        ids += self.bpe(word)
        return [*ids, *after]

    def _find_added(
        self, text: str, tokens: dict[str, AddedToken], parse_special: bool
    ) -> Iterator[tuple[int, str, AddedToken | None]]:
        """(start, text, token or None). Leftmost-longest; a match that its flags reject still uses up its text."""
        lengths = sorted({len(content) for content in tokens if content}, reverse=True)
        at = start = 0
        while lengths and at < len(text):
            token = next((t for n in lengths if (t := tokens.get(text[at : at + n]))), None)
            if token is None:
                at += 1
                continue
            content = next(text[at : at + n] for n in lengths if tokens.get(text[at : at + n]) is token)
            first, last = at, at + len(content)
            at = last
            if token.special and not parse_special:
                continue
            if token.single_word and (
                (first > 0 and self._has(text[first - 1], W)) or (last < len(text) and self._has(text[last], W))
            ):
                continue
            if token.lstrip:
                while first > start and self._has(text[first - 1], S):
                    first -= 1
                first = max(first, start)
            while token.rstrip and last < len(text) and self._has(text[last], S):
                last += 1
            if first >= last:  # all of it is white space that an rstrip before took: as in `tokenizers`, no token
                continue
            if start < first:
                yield start, text[start:first], None
            yield first, text[first:last], token
            start = last
        if start < len(text):
            yield start, text[start:], None

    def _has(self, char: str, bits: int) -> bool:
        return bool(self.flags[ord(char)] & bits)

    # ---- pre-tokens -------------------------------------------------------------------------------------------------

    def pre_tokenize(self, text: str, at_start: bool = True) -> list[str]:
        spec = self.spec
        if spec.meta_replace:
            text = text.replace(" ", META)
        wanted = spec.prefix is Prefix.ALWAYS or (spec.prefix is Prefix.FIRST and at_start)
        if wanted and text and not text.startswith(spec.prefix_text):
            text = spec.prefix_text + text
        words = []
        for a, b in self._digit_spans(text):
            while a < b:
                end = self.scan(text, a, b)
                words.append(text[a:end])
                a = end
        return words

    def _digit_spans(self, text: str) -> Iterator[tuple[int, int]]:
        if self.spec.digits is Digits.OFF:
            yield 0, len(text)
            return
        start = 0
        for at in range(len(text) + 1):
            if at < len(text) and start < at:
                a, b = self._has(text[at - 1], D), self._has(text[at], D)
                if a == b and not (a and self.spec.digits is Digits.INDIVIDUAL):
                    continue
            elif at < len(text):
                continue
            yield start, at
            start = at

    def scan(self, s: str, a: int, end: int) -> int:
        """The end of the pre-token that starts at `a`."""
        match self.spec.split:
            case Split.GPT2:
                return self._scan_gpt2(s, a, end)
            case Split.LLAMA3:
                return self._scan_llama3(s, a, end)
            case Split.META:
                found = s.find(META, a + 1, end)
                return end if found < 0 else found
            case Split.META_RUNS:
                return self._run(s, self._run(s, a, end, lambda c: c == META), end, lambda c: c != META)
        return end

    def _run(self, s: str, a: int, end: int, test: Any) -> int:
        while a < end and test(s[a]):
            a += 1
        return a

    def _class(self, char: str) -> int:
        """L, N, S or 0 for everything else."""
        return self.flags[ord(char)] & (L | N | S)

    def _class_run(self, s: str, a: int, end: int, kind: int) -> int:
        return self._run(s, a, end, lambda c: self._class(c) == kind)

    def _white(self, s: str, a: int, end: int) -> int:
        r"""\s+(?!\S)|\s+ : the last white space before something else is left to that."""
        stop = self._class_run(s, a, end, S)
        return stop - 1 if stop < end and stop - a > 1 else stop

    def _scan_gpt2(self, s: str, a: int, end: int) -> int:
        if s[a] == "'":
            for tail in ("s", "t", "re", "ve", "m", "ll", "d"):
                if s.startswith(tail, a + 1, end):
                    return a + 1 + len(tail)
        first = a + 1 if s[a] == " " and a + 1 < end else a
        kind = self._class(s[first])
        if kind != S:
            return self._class_run(s, first, end, kind)
        return self._white(s, a, end)

    def _scan_llama3(self, s: str, a: int, end: int) -> int:
        if s[a] == "'":
            low = s[a + 1 : min(a + 3, end)].replace("\u017f", "s")
            low = "".join(c.lower() if c.isascii() else c for c in low)
            for tail in ("s", "t", "re", "ve", "m", "ll", "d"):
                if low.startswith(tail):
                    return a + 1 + len(tail)
        kind = self._class(s[a])
        if kind == L:
            return self._class_run(s, a, end, L)
        if kind != N and s[a] not in "\r\n" and a + 1 < end and self._class(s[a + 1]) == L:
            return self._class_run(s, a + 1, end, L)
        if kind == N:
            return self._class_run(s, a, min(end, a + self.spec.max_numbers), N)
        first = a + 1 if s[a] == " " and a + 1 < end else a
        if self._class(s[first]) == 0:
            return self._run(s, self._class_run(s, first, end, 0), end, lambda c: c in "\r\n")
        stop = self._class_run(s, a, end, S)
        newline = max(s.rfind("\r", a, stop), s.rfind("\n", a, stop))
        return newline + 1 if newline >= 0 else self._white(s, a, end)

    # ---- merges -----------------------------------------------------------------------------------------------------

    def bpe(self, word: str) -> list[int]:
        data = word.encode()
        if self.spec.ignore_merges and data in self.words:
            return [self.words[data]]
        return self.merge(self.symbols(word, data))

    def symbols(self, word: str, data: bytes) -> list[int]:
        spec = self.spec
        if spec.byte_level:  # a byte without a token vanishes, as in `tokenizers`
            return [spec.byte_ids[b] for b in data if spec.byte_ids[b] >= 0]
        ids: list[int] = []
        pending = False  # an unknown token that later unknown characters may still join
        for char in word:
            encoded = char.encode()
            known = self.words.get(encoded)
            fallback = [spec.byte_ids[b] for b in encoded] if spec.byte_fallback else [-1]
            if known is not None:
                if pending:
                    ids.append(spec.unk_id)
                    pending = False
                ids.append(known)
            elif -1 not in fallback:
                ids += fallback
            elif spec.unk_id >= 0:
                if pending and not spec.fuse_unk:
                    ids.append(spec.unk_id)
                pending = True
        return [*ids, spec.unk_id] if pending else ids

    def merge(self, ids: list[int]) -> list[int]:
        """Lowest rank first, leftmost first among equals: a heap of candidate pairs over a doubly linked list."""
        size = len(ids)
        after = list(range(1, size + 1))
        before = list(range(-1, size - 1))
        alive = [True] * size
        heap = [(*self.pairs[pair], i, *pair) for i, pair in enumerate(itertools.pairwise(ids)) if pair in self.pairs]
        heapq.heapify(heap)
        while heap:
            _, merged, at, left, right = heapq.heappop(heap)
            other = after[at]
            if not alive[at] or other >= size or ids[at] != left or ids[other] != right:
                continue
            ids[at], alive[other], after[at] = merged, False, after[other]
            if after[at] < size:
                before[after[at]] = at
            for i, j in ((before[at], at), (at, after[at])):
                if i >= 0 and j < size and (ids[i], ids[j]) in self.pairs:
                    heapq.heappush(heap, (*self.pairs[ids[i], ids[j]], i, ids[i], ids[j]))
        return [ids[i] for i in range(size) if alive[i]]

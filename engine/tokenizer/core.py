"""Builds the compiled encoder from a Spec."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.tokenizer._bpe import Core
from engine.tokenizer.spec import Spec

if TYPE_CHECKING:
    from engine.tokenizer.added import AddedToken

SINGLE_WORD, LSTRIP, RSTRIP, SPECIAL = 1, 2, 4, 8


def make_core(spec: Spec) -> Core:
    merges = spec.merges
    return Core(
        tokens=spec.keys,
        left=merges.left,
        right=merges.right,
        merged=merges.merged,
        rank=merges.rank,
        byte_ids=spec.byte_ids,
        byte_level=spec.byte_level,
        byte_fallback=spec.byte_fallback,
        fuse_unk=spec.fuse_unk,
        ignore_merges=spec.ignore_merges,
        unk_id=spec.unk_id,
        digits=int(spec.digits),
        split=int(spec.split),
        max_numbers=spec.max_numbers,
        prefix=int(spec.prefix),
        meta_replace=spec.meta_replace,
        prefix_text=spec.prefix_text.encode(),
        steps=[(step.kind, step.text.encode(), step.to.encode()) for step in spec.normalizer],
        raw=[_entry(t, t.content) for t in spec.added if not t.normalized],
        normalized=[_entry(t, spec.normalize(t.content)) for t in spec.added if t.normalized],
        seed=int.from_bytes(os.urandom(8), "little"),  # only moves hash table slots, never ids
    )


def _entry(token: AddedToken, content: str) -> tuple[bytes, int, int]:
    flags = token.single_word * SINGLE_WORD + token.lstrip * LSTRIP + token.rstrip * RSTRIP + token.special * SPECIAL
    return content.encode(), token.id, flags

"""Looking at the model from beside the traffic: golden hashes, and where NaN begins.

A probe computes a sequence from scratch on KV pages of its own, between two steps, without the prefix cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.batch import replay
from engine.errors import EngineError
from engine.loader import block_digest, block_starts, combine_digests

if TYPE_CHECKING:
    from engine.backend import Backend
    from engine.jobs import Job
    from engine.kv_cache import KVCache
    from engine.types import Weights


HASHED_BYTES = 8 << 20
"""Logits that are looked at and hashed between two steps: a few milliseconds, which no stream notices."""


class Probe:
    """OutOfPages, and nothing is done, when the pool has no room for the probed sequence now."""

    def __init__(self, backend: Backend, kv_cache: KVCache, chunk_tokens: int) -> None:
        self._backend, self._kv_cache = backend, kv_cache
        self._chunk_tokens = min(chunk_tokens, backend.max_batch_tokens)

    def golden(self, token_ids: list[int]) -> Job:
        """SHA-256 hex over the float32 logits of every position: the bits that judge a GPU and a release."""
        digest = hashlib.sha256()
        finite = True  # NaN has bits too and may be hashed, but whoever compares should be told
        with contextlib.closing(replay(self._kv_cache, token_ids, self._chunk_tokens)) as batches:
            for _start, batch in batches:
                logits = self._backend.forward(batch)
                yield
                rows = max(1, HASHED_BYTES // logits[0].nbytes)  # a page of logits of a large vocabulary is 66 MB
                for first in range(0, len(logits), rows):
                    part = logits[first : first + rows]
                    finite = finite and bool(np.isfinite(part).all())
                    digest.update(part.data.cast("B"))
                    yield
        return {"sha256": digest.hexdigest(), "positions": len(token_ids), "finite": finite}

    def is_finite(self, token_ids: list[int]) -> bool:
        """Whether the logits after the last token are finite: NaN in a weight or an activation reaches them."""
        finite = True
        with contextlib.closing(replay(self._kv_cache, token_ids, self._chunk_tokens)) as batches:
            for _start, batch in batches:
                logits = self._backend.forward(dataclasses.replace(batch, logits_rows=batch.logits_rows[-1:]))
                finite = finite and bool(np.isfinite(logits).all())
        return finite

    def find_nonfinite(self, token_ids: list[int]) -> dict[str, Any] | None:
        """{"layer", "op", "position"} of the first NaN or Inf, in the order of the arithmetic, or None."""
        with contextlib.closing(replay(self._kv_cache, token_ids, self._chunk_tokens)) as batches:
            for start, batch in batches:
                if (found := self._backend.find_nonfinite(batch)) is not None:
                    layer, op, row = found
                    return {"layer": layer, "op": op, "position": start + row}
        return None


def arena_checksum_job(weights: Weights) -> Job:
    """Hash the weight arena again, as engine.loader.arena_checksum does, a block at a time, and compare."""
    if weights.arena is None:
        raise EngineError("these weights have no arena to read back")
    digests = []
    for start in block_starts(weights.arena):
        digests.append(block_digest(weights.arena, start))
        yield
    actual = combine_digests(digests)
    return {"expected": weights.checksum, "actual": actual, "ok": actual == weights.checksum}

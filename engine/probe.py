"""Looking at the model from beside the traffic: golden hashes, and where NaN begins.

A probe computes a sequence from scratch on KV pages of its own, between two steps, without the prefix cache.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from engine.batch import replay

if TYPE_CHECKING:
    from engine.kv_cache import KVCache
    from engine.runner import ModelRunner


class Probe:
    """OutOfPages, and nothing is done, when the pool has no room for the probed sequence now."""

    def __init__(self, runner: ModelRunner, kv_cache: KVCache, chunk_tokens: int) -> None:
        self._runner, self._kv_cache = runner, kv_cache
        self._chunk_tokens = min(chunk_tokens, runner.max_batch_tokens)

    def golden(self, token_ids: list[int]) -> str:
        """SHA-256 hex over the float32 logits of every position: the bits that judge a GPU and a release."""
        digest = hashlib.sha256()
        for _start, batch in replay(self._kv_cache, token_ids, self._chunk_tokens):
            digest.update(self._runner.forward(batch).tobytes())
        return digest.hexdigest()

    def find_nonfinite(self, token_ids: list[int]) -> dict[str, Any] | None:
        """{"layer", "op", "position"} of the first NaN or Inf, in the order of the arithmetic, or None."""
        for start, batch in replay(self._kv_cache, token_ids, self._chunk_tokens):
            if (found := self._runner.find_nonfinite(batch)) is not None:
                layer, op, row = found
                return {"layer": layer, "op": op, "position": start + row}
        return None

"""One sequence (one choice of one request) as the scheduler sees it: its tokens, its pages and how far it is.

A sequence never holds sampling state. The sampler's counter-based RNG is keyed by (seed, position), and `token_ids`
survives preemption, so a resumed sequence samples position p exactly once, whatever happened in between.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from engine.types import PAGE_TOKENS, FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT_SERIAL = 0
"""`cache_serial` of a sequence none of whose pages is in the prefix cache yet (kv_cache.py)."""


class SeqState(StrEnum):
    WAITING = "waiting"  # in a queue, holds no pages
    RUNNING = "running"  # holds pages, gets tokens
    DRAINING = "draining"  # preempted, but a plan in flight still writes to its pages
    FINISHED = "finished"


class PageKey(NamedTuple):
    """Identity of a full page in the prefix cache: the chained digest, and the token ids that are compared on a hit."""

    digest: bytes
    tokens: bytes  # 4 bytes a token, native order


def root_digest(salt: str) -> bytes:
    """Digest that stands in front of the first page. Tenants with different salts never share a chain."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"kv-salt").digest()


def page_digest(parent: bytes, tokens: bytes) -> bytes:
    """BLAKE2b-256 (RFC 7693) over the parent's digest and this page's token ids: equal digests mean equal prefixes."""
    return blake2b(parent + tokens, digest_size=32, person=b"kv-page").digest()


class Sequence:
    """Mutable record owned by the scheduler; the runner and the sampler only read it.

    `token_ids` is prompt + output. Tokens [0, num_computed_tokens) have their K and V in the pages of `block_table`;
    [0, num_scheduled_tokens) have them or are being computed by a plan in flight. `block_table` only grows while the
    sequence runs and is emptied by preemption (`num_preemptions` then went up) and at the end.
    `num_cached_tokens`: prompt tokens found in the prefix cache when it was first admitted (what usage reports).
    """

    __slots__ = (
        "allow_prefix_hit",
        "arrival",
        "block_table",
        "bucket",
        "cache_salt",
        "cache_serial",
        "deadline",
        "finish_reason",
        "index",
        "max_kv_tokens",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_pages",
        "num_scheduled_tokens",
        "order",
        "page_keys",
        "request_id",
        "scheduling_limit",
        "seq_id",
        "state",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_ids: Iterable[int],
        *,
        max_tokens: int,
        request_id: str = "",
        index: int = 0,
        cache_salt: str = "",
        allow_prefix_hit: bool = True,
        arrival: float | None = None,
        deadline: float | None = None,
    ) -> None:
        """`deadline` is on the scheduler's clock (CLOCK_MONOTONIC seconds); `arrival` None = the time of add().

        `allow_prefix_hit` False: every prompt token is computed (echo with logprobs needs logits at each of them).
        """
        self.seq_id = seq_id
        self.request_id = request_id
        self.index = index
        self.token_ids = list(prompt_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens = max_tokens
        self.cache_salt = cache_salt
        self.allow_prefix_hit = allow_prefix_hit
        self.arrival = arrival
        self.deadline = deadline
        self.state = SeqState.WAITING
        self.finish_reason: FinishReason | None = None
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        # The last sampled token is never fed back, so its K and V are never stored.
        self.max_kv_tokens = self.num_prompt_tokens + max(max_tokens, 1) - 1
        # Scheduler internals.
        self.num_scheduled_tokens = 0
        self.scheduling_limit = 0  # tokens that may be scheduled with the pages it has
        self.num_in_flight = 0  # plans in flight that hold this sequence
        self.num_preemptions = 0
        self.order = 0  # arrival number: smaller is older
        self.bucket = 0
        self.page_keys: list[PageKey] = []
        self.num_published_pages = 0
        self.cache_serial = ROOT_SERIAL  # of the cached page that ends at num_published_pages

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.state is SeqState.FINISHED

    @property
    def unused_slots(self) -> int:
        """Token slots of its pages that hold nothing yet."""
        return len(self.block_table) * PAGE_TOKENS - self.num_scheduled_tokens

    def keys(self, num_pages: int) -> list[PageKey]:
        """Keys of at least the first `num_pages` full pages; each is hashed once in the life of the sequence."""
        keys = self.page_keys
        while len(keys) < num_pages:
            start = len(keys) * PAGE_TOKENS
            tokens = array("I", self.token_ids[start : start + PAGE_TOKENS]).tobytes()
            parent = keys[-1].digest if keys else root_digest(self.cache_salt)
            keys.append(PageKey(page_digest(parent, tokens), tokens))
        return keys

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.state.value}, prompt={self.num_prompt_tokens}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, scheduled={self.num_scheduled_tokens}, pages={self.block_table})"
        )

"""Pages of the KV pool: free list, reference counts and the prefix cache. Book-keeping only; the K and V are elsewhere.

A page is in exactly one of three places: referenced by at least one block table, in the free list, or unreferenced but
still cached (least recently used first). Every operation is O(1) per page. It must never hand out a referenced page and
never match a page whose whole prefix is not the asker's, whatever the hash function does.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import ConfigError, EngineError
from engine.sequence import ROOT_SERIAL
from engine.types import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from engine.sequence import PageKey, Sequence

_DEAD_SERIAL = -1  # the chain of this sequence is broken: nothing after it may be published


class IntegrityError(AssertionError):
    """The page book-keeping contradicts itself: a bug of ours, never of a request. The engine must stop serving."""


class OutOfPages(EngineError):
    """More pages were asked for than are free; the scheduler checks first, so a caller who sees this has a bug."""


@dataclass(slots=True)
class _Entry:
    """What the prefix cache knows of a page. `serial` is never used twice, so a chain of serials is an exact prefix:
    a child names its parent's serial, and a parent that was evicted and computed again has another one."""

    digest: bytes
    tokens: bytes
    salt: str
    parent: int
    serial: int


class KVCache:
    """A pool of `num_pages` pages of PAGE_TOKENS tokens each."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(
                f"the KV pool has {num_pages} pages; at least 1 is needed",
                hint="give the engine more memory or load a smaller model",
            )
        self.total_pages = num_pages
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is reused first
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached, unreferenced; oldest first
        self._entries: list[_Entry | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}  # digest -> page
        self._serials: dict[int, int] = {}  # serial -> page, of the entries that are still cached
        self._next_serial = ROOT_SERIAL + 1
        self.evictions = 0

    @property
    def free_pages(self) -> int:
        """Pages that allocate() can hand out, cached ones that nobody references included."""
        return len(self._free) + len(self._unused)

    @property
    def cached_pages(self) -> int:
        """Pages in the prefix cache, referenced or not."""
        return len(self._index)

    def ref_count(self, page: int) -> int:
        return self._refs[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each; evicts the least recently used cached pages when the free list is
        empty. Raises OutOfPages, and takes nothing, if fewer are free."""
        if count > self.free_pages:
            raise OutOfPages(f"{count} KV pages asked for, {self.free_pages} of {self.total_pages} are free")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._unused.popitem(last=False)
                self._drop_entry(page)
                self.evictions += 1
            self._refs[page] = 1
            pages.append(page)
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """One more reference to each page, which must be cached or referenced already."""
        for page in pages:
            if not self._refs[page]:
                del self._unused[page]
            self._refs[page] += 1

    def release(self, pages: Seq[int]) -> None:
        """One reference less to each page of a block table. From its end, so that of a cached chain the tail is
        evicted before the pages it hangs on."""
        for page in reversed(pages):
            left = self._refs[page] - 1
            if left < 0:
                raise IntegrityError(f"page {page} was freed twice")
            self._refs[page] = left
            if not left:
                if self._entries[page] is None:
                    self._free.append(page)
                else:
                    self._unused[page] = None

    # ---- the pages of one sequence -----------------------------------------------------------------------------------

    def attach(self, seq: Sequence, *, use_cache: bool, keep_free: int) -> bool:
        """Fills the empty block table of `seq` with pages for all its known tokens, cached ones first, and sets how far
        it is computed. False, and nothing is taken, if that would leave fewer than `keep_free` pages free."""
        known = len(seq.token_ids)
        # Never the page of the last known token: its logits are wanted, so at least it is computed again.
        hits, serial = self.match(seq, (known - 1) // PAGE_TOKENS) if use_cache else ([], ROOT_SERIAL)
        need = -(-known // PAGE_TOKENS) - len(hits)
        if need + self.unreferenced(hits) + keep_free > self.free_pages:
            return False
        self.acquire(hits)
        seq.block_table.extend(hits)
        seq.block_table.extend(self.allocate(need))
        seq.num_computed_tokens = seq.num_scheduled_tokens = len(hits) * PAGE_TOKENS
        seq.num_published_pages = len(hits)
        seq.cache_serial = serial
        self._limit(seq)
        return True

    def grow(self, seq: Sequence) -> None:
        """One more page at the end of the block table."""
        seq.block_table.extend(self.allocate(1))
        self._limit(seq)

    @staticmethod
    def _limit(seq: Sequence) -> None:
        seq.scheduling_limit = min(seq.max_kv_tokens, len(seq.block_table) * PAGE_TOKENS)

    def detach(self, seq: Sequence) -> None:
        """Gives up all pages of `seq`; what was published stays cached until its pages are needed."""
        self.release(seq.block_table)
        seq.block_table.clear()
        seq.num_computed_tokens = seq.num_scheduled_tokens = seq.scheduling_limit = 0
        seq.num_published_pages = 0
        seq.cache_serial = ROOT_SERIAL

    # ---- prefix cache ------------------------------------------------------------------------------------------------

    def match(self, seq: Sequence, max_pages: int) -> tuple[list[int], int]:
        """The longest cached run of the first `max_pages` pages of `seq`, and the serial of its last page.

        Takes no reference. A page counts only if its token ids, its salt and its parent are the very same.
        """
        pages: list[int] = []
        parent = ROOT_SERIAL
        for key in seq.keys(max_pages)[:max_pages]:
            page = self._index.get(key.digest)
            if page is None:
                break
            entry = self._entry(page)
            if not _same(entry, key, seq.cache_salt, parent):
                break
            pages.append(page)
            parent = entry.serial
        return pages, parent

    def unreferenced(self, pages: Iterable[int]) -> int:
        """How many of `pages` are counted in free_pages."""
        refs = self._refs
        return sum(1 for page in pages if not refs[page])

    def publish(self, seq: Sequence) -> None:
        """Offers the computed full pages of `seq` to others. Only for pages whose forward pass has ended.

        A page with the same content that is already cached stays the shared one; this sequence's copy stays private.
        """
        full = seq.num_computed_tokens // PAGE_TOKENS
        if seq.num_published_pages >= full:
            return
        keys = seq.keys(full)
        for i in range(seq.num_published_pages, full):
            parent = seq.cache_serial
            if parent != ROOT_SERIAL and parent not in self._serials:
                seq.cache_serial = _DEAD_SERIAL  # a child could never be reached through an evicted parent
                break
            seq.cache_serial = self._register(seq.block_table[i], keys[i], seq.cache_salt, parent)
        seq.num_published_pages = full

    def _register(self, page: int, key: PageKey, salt: str, parent: int) -> int:
        other = self._index.get(key.digest)
        if other is not None:
            entry = self._entry(other)
            if _same(entry, key, salt, parent):
                return entry.serial
            self.forget((other,))  # its parent is gone, or the digests collide
        serial = self._next_serial
        self._next_serial += 1
        self._entries[page] = _Entry(key.digest, key.tokens, salt, parent, serial)
        self._index[key.digest] = page
        self._serials[serial] = page
        return serial

    def forget(self, pages: Iterable[int]) -> None:
        """Takes pages out of the prefix cache; whoever references them keeps them."""
        for page in pages:
            if self._entries[page] is not None:
                self._drop_entry(page)
                if not self._refs[page]:
                    del self._unused[page]
                    self._free.append(page)

    def drop_prefix_cache(self) -> int:
        """Forgets every cached page (new weights, a golden test from scratch); returns how many."""
        pages = sorted(self._index.values())
        self.forget(pages)
        return len(pages)

    def _entry(self, page: int) -> _Entry:
        entry = self._entries[page]
        if entry is None:
            raise IntegrityError(f"page {page} is in the prefix index but has no entry")
        return entry

    def _drop_entry(self, page: int) -> None:
        entry = self._entry(page)
        self._entries[page] = None
        del self._index[entry.digest]
        del self._serials[entry.serial]

    # ---- self-check --------------------------------------------------------------------------------------------------

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Raises IntegrityError naming the page unless the pool agrees with the sequences that hold pages. O(pages)."""
        held = [0] * self.total_pages
        for seq in holders:
            self._check_table(seq)
            for page in seq.block_table:
                held[page] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a page is in the free list twice")
        for page, refs in enumerate(self._refs):
            if held[page] != refs:
                raise IntegrityError(f"page {page} has {refs} references but {held[page]} block tables hold it")
            places = (refs > 0) + (page in free) + (page in self._unused)
            if places != 1:
                raise IntegrityError(f"page {page} is in {places} places (references {refs}); must be in one")
            entry = self._entries[page]
            if page in free and entry is not None:
                raise IntegrityError(f"page {page} is in the free list and in the prefix cache")
            if page in self._unused and entry is None:
                raise IntegrityError(f"page {page} waits for eviction but is not in the prefix cache")
            if entry and (self._index.get(entry.digest) != page or self._serials.get(entry.serial) != page):
                raise IntegrityError(f"page {page} is cached but the index has another page for it")
        cached = sum(entry is not None for entry in self._entries)
        if not cached == len(self._index) == len(self._serials):
            raise IntegrityError(
                f"{cached} pages cached, {len(self._index)} in the index, {len(self._serials)} serials"
            )

    def _check_table(self, seq: Sequence) -> None:
        if len(set(seq.block_table)) != len(seq.block_table):
            raise IntegrityError(f"{seq!r} has a page twice")
        if seq.num_scheduled_tokens > len(seq.block_table) * PAGE_TOKENS:
            raise IntegrityError(f"{seq!r} has tokens without a page")
        for page in seq.block_table[seq.num_computed_tokens // PAGE_TOKENS :]:
            if self._refs[page] != 1:
                raise IntegrityError(f"page {page} of {seq!r} has {self._refs[page]} references before it is complete")


def _same(entry: _Entry, key: PageKey, salt: str, parent: int) -> bool:
    return entry.parent == parent and entry.tokens == key.tokens and entry.salt == salt

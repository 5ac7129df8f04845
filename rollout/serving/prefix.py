"""Sequences that begin with pages of earlier ones: the block manager and a prefix cache over the
same pages. Of models with linear layers a kept prefix is pages and the states after them. And
pools that have memory behind some of their pages alone.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcache import BlockManager, Ledger, PrefixMatch, RadixCache, ReqHandle
from kvcache.allocators import PagedTokenToKVPoolAllocator
from kvcache.pools import RoutedKVPool, TokenPool
from kvcache.radix import MambaMatch, MambaRadixCache, RadixNode
from kvcache.requests import HybridReqToTokenPool
from kvcache.tiers import HostTransfer
from memsaver import LeaseError, MemorySaver, OutOfMemory

# Left free beside a pool that grows on a GPU: what the steps of the engine itself may take.
_SPARE = 2**30  # bytes
_ASKED = 0.02  # seconds between two looks at what is free


@dataclass(frozen=True, kw_only=True)
class Swapped:
    """Describes what waits on the host for a preempted sample: its first `tokens`, of weights
    `version` of the prefix cache.

    page: the host page with those past the last whole page; 0 without one.
    """

    tokens: int
    version: int
    page: int


@dataclass(frozen=True)
class _Held:
    """Describes what a sequence has locked of the cache: the first `length` of its tokens, computed
    under `version`. branch: of `StatePrefixBlocks`; it is not locked.
    """

    node: RadixNode
    length: int
    version: int
    branch: int = 0


class PrefixBlocks:
    """A BlockManager for the scheduler, with beginnings kept in `cache`; None: in one that stays
    empty.

    A page of the cache that a running sequence shares is locked by that sequence, so that what the
    cache can evict is exactly what eviction makes free. Versions of the cache are numbers of its
    own: they count definitions of the weights, also those that give a version anew.
    """

    def __init__(self, blocks: BlockManager, cache: RadixCache | MambaRadixCache | None) -> None:
        self.blocks = blocks
        self.cache = RadixCache(blocks.allocator) if cache is None else cache
        self._keeps = cache is not None
        self._held: dict[ReqHandle, _Held] = {}
        self._format = self._pool_format()
        self.loaded_tokens = 0  # found below the device

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """The ledgers of the blocks; pages that the cache can evict count as available."""
        cached = self.cache.evictable_size // self.cache.page_size
        ledgers = self.blocks.ledgers
        return tuple(replace(ledger, available=ledger.available + cached) for ledger in ledgers)

    def held_pages(self, tokens: Sequence[int]) -> int:
        """Pages of running sequences that `admit` would share, without taking available ones."""
        self._notice_format()
        return self.cache.peek(tokens[:-1])[1] // self.cache.page_size

    def admit(
        self, tokens: Sequence[int], swapped: Swapped | None = None
    ) -> tuple[ReqHandle, int] | None:
        """A sequence for `tokens`, and how many are computed, not the last; None without a row.

        The pages that it found are locked from here on. swapped: of `swap_out`, used up.
        """
        self._notice_format()
        match = self._match(tokens[:-1])
        handle = self.blocks.admit(match.pages)
        if handle is None:
            return None
        self._begin(handle, match)
        return handle, match.length

    def extend(self, handles: Sequence[ReqHandle], new_lens: Sequence[int]) -> Any | None:
        """Extends as BlockManager does, and evicts from the cache what is missing."""
        slots = self.blocks.extend(handles, new_lens)
        if slots is not None:
            return slots
        missing = self.blocks.pages_needed(handles, new_lens) - self.blocks.available_pages
        self.cache.evict(missing * self.cache.page_size)
        return self.blocks.extend(handles, new_lens)

    def keep_at(self, handle: ReqHandle, computed: int, length: int) -> int:
        """After how many of a prefill's `length` tokens `keep` comes next: a chunk ends there."""
        return length

    def slide(self, handles: Sequence[ReqHandle]) -> None:
        self.blocks.slide(handles)

    def keep(self, handle: ReqHandle, tokens: Sequence[int]) -> None:
        """Lets later sequences find the whole pages of `tokens`, the sequence's first, now
        computed, while it goes on. Before its first fork. Nothing happens where another sequence
        was faster: this one has pages of its own.
        """
        if not self._keeps:
            return
        assert isinstance(self.cache, RadixCache)
        held = self._held[handle]
        # converted once: that takes longer than all that the cache does with it
        ids = array("i", tokens)
        if held.version != self.cache.version or self.cache.peek(ids)[0] > held.length:
            return
        self._insert(handle, ids, held.version)
        self._begin(handle, self.cache.match_resident(ids))
        self.cache.dec_lock_ref(held.node)

    def fork(self, handle: ReqHandle) -> ReqHandle | None:
        child = self.blocks.fork(handle)
        if child is not None:
            self._held[child] = self._held[handle]
            self.cache.inc_lock_ref(self._held[child].node)
        return child

    def release(self, handle: ReqHandle, tokens: Sequence[int]) -> None:
        """Ends a sequence, whose first, computed `tokens` can be found from now on."""
        held = self._held.pop(handle)
        try:
            if self._keeps:
                self._insert(handle, array("i", tokens), held.version)
        finally:
            self.blocks.release(handle)
            self.cache.dec_lock_ref(held.node)

    def swap_out(self, handle: ReqHandle, tokens: Sequence[int]) -> Swapped | None:
        """Returns, before the `release` of a sequence that is to go on later, what of its computed
        `tokens` waits on the host; None where they are to be computed again.
        """
        return None

    def forget(self, swapped: Swapped) -> None:
        """Gives back what `swap_out` took, for a sample that ends without being admitted again."""

    def compact(self, pages: int) -> bool:
        """Moves what sequences hold to the first `pages` pages, evicts the rest; False: no room."""
        self.cache.evict(self.cache.evictable_size)
        renamed = self.blocks.compact(pages)
        if renamed is not None:
            self.cache.rename(renamed)
        return renamed is not None

    def loads(self) -> tuple[HostTransfer, ...]:
        """Copies to the device under way, which a forward waits for."""
        return ()

    def move_below(self, keep: bool) -> None:
        """Prepares for a pause of the pool. keep: the cached pages, where there is a place."""
        self.clear()

    def swapped_pages(self) -> int:
        """Host pages that samples hold which were swapped out."""
        return 0

    def new_weights(self) -> None:
        """Ends hits on what is in the pool; what nobody uses goes first when pages are short."""
        self.cache.raise_version(self.cache.version + 1)

    def clear(self) -> None:
        """The pool's content is gone: forgets all of it. Running sequences' follows later."""
        self.new_weights()
        self.cache.evict(self.cache.evictable_size)

    def check_integrity(self) -> None:
        """AssertionError unless ledger, sequences, cache and locks agree."""
        self.cache.check_integrity()
        pages = self.cache.pages()
        self.blocks.check_integrity(pages)
        shared = int((self.blocks.allocator.ref_counts(pages) > 1).sum())
        assert shared * self.cache.page_size == self.cache.protected_size, (
            "sequences lock other pages than they share"
        )

    def _match(self, tokens: Sequence[int]) -> PrefixMatch:
        return self.cache.match_prefix(tokens)

    def _begin(self, handle: ReqHandle, match: PrefixMatch) -> None:
        """Locks what a sequence begins with, from its start or since it was kept."""
        self.cache.inc_lock_ref(match.node)
        self._held[handle] = _Held(match.node, match.length, self.cache.version)

    def _insert(self, handle: ReqHandle, tokens: array[int], version: int) -> None:
        assert isinstance(self.cache, RadixCache)
        size = self.cache.page_size
        pages = self.blocks.pages(handle)[: len(tokens) // size]
        new = pages[self.cache.peek(tokens)[0] // size :]
        if (self.blocks.allocator.ref_counts(new) > 1).any():
            # a fork goes on with these pages without a lock: evicting them would free nothing
            return
        taken = self.cache.insert(tokens, pages, version=version) // size
        self.blocks.allocator.share(pages[taken:])

    def _notice_format(self) -> None:
        """Rows that are stored as fp8 mean something else once the pool has other scales."""
        if self._format != self._pool_format():
            self._format = self._pool_format()
            self.new_weights()

    def _pool_format(self) -> tuple[object, ...]:
        pool = self.blocks.pool
        pools = pool.pools if isinstance(pool, RoutedKVPool) else (pool,)
        return tuple(each.format() for each in pools if isinstance(each, TokenPool))


class StatePrefixBlocks(PrefixBlocks):
    """States can't go back, so a prefill stops where they are to be kept: where the last whole page
    ends before the prompt's last token, and before that at its `branch`, up to where the cache has
    pages without states: other prompts began alike and went on otherwise.

    Answers are not kept: when a sequence ends, its states are past its last whole page. The cache
    has at most the slots that the request table has no row for.
    """

    def __init__(self, blocks: BlockManager) -> None:
        table = blocks.req_to_token
        assert isinstance(table, HybridReqToTokenPool), "Cache.prefix_blocks takes no other"
        self._table, self._states = table, table.mamba
        self._prefixes = MambaRadixCache(blocks.allocator, table.mamba)
        super().__init__(blocks, self._prefixes)

    def keep_at(self, handle: ReqHandle, computed: int, length: int) -> int:
        page = self._prefixes.page_size
        cuts = (self._held[handle].branch, (length - 1) // page * page)
        return min((cut for cut in cuts if cut > computed), default=length)

    def keep(self, handle: ReqHandle, tokens: Sequence[int]) -> None:
        """Keeps as the base does, with a copy of the sequence's states, which are those after
        `tokens`; nothing where these end inside a page, or no slot can be had.
        """
        ids, held = array("i", tokens), self._held[handle]
        if len(ids) % self._prefixes.page_size or held.version != self._prefixes.version:
            return
        # again after the eviction, which may take pages that this one would only add states to
        if not (self._wanted(held.length, ids) and self._slot() and self._wanted(held.length, ids)):
            return
        slot = self._states.clone(self._table.mamba_slot(handle))
        assert slot is not None, "a slot was made free"
        pages = self.blocks.pages(handle)
        kept = self._prefixes.insert(ids, pages, slot, version=held.version)
        self.blocks.allocator.share(pages[kept.length // self._prefixes.page_size :])
        if kept.length == held.length:
            super()._begin(handle, self._prefixes.match_prefix(ids))
            self._prefixes.dec_lock_ref(held.node)

    def check_integrity(self) -> None:
        super().check_integrity()
        rows = self._table.size - self._table.available_size()
        kept = len(self._prefixes.state_slots())
        assert rows + kept == self._states.size - self._states.available_size(), (
            "states are held by neither a request nor the cache"
        )

    def _wanted(self, own: int, ids: array[int]) -> bool:
        """Tells whether the cache lacks the states after `ids`, and has either their pages or no
        more than the `own` first tokens': in between this sequence has pages of its own.
        """
        match = self._prefixes.match_prefix(ids)
        return match.length < len(ids) and match.paged in (own, len(ids))

    def _slot(self) -> bool:
        """Makes a slot free that no row needs; False where requests use all that are kept."""
        while self._states.available_size() <= self._table.available_size():
            if not self._prefixes.evict_states(1):
                return False
        return True

    def _begin(self, handle: ReqHandle, match: PrefixMatch) -> None:
        assert isinstance(match, MambaMatch)
        if match.state is not None:
            try:
                self._states.copy(self._table.mamba_slot(handle), match.state)
            except BaseException:  # such as the device being out of memory
                self.blocks.release(handle)
                raise
        super()._begin(handle, match)
        self._held[handle] = replace(self._held[handle], branch=match.paged)

    def _insert(self, handle: ReqHandle, tokens: array[int], version: int) -> None:
        """Keeps nothing of a sequence that ends."""


class Elastic:
    """A pool that may have memory behind its first tokens alone; `EngineConfig.elastic`."""

    def __init__(
        self,
        pool: TokenPool,
        allocator: PagedTokenToKVPoolAllocator,
        saver: MemorySaver,
        least: int,
        most: int,
    ) -> None:
        """least, most: tokens."""
        self.pool, self.allocator, self.saver = pool, allocator, saver
        self.least, self.most = least, most
        self.shrinking = False  # who waits for memory gets what no request wants
        self._ask_at = 0.0
        self._left = most  # tokens that were left to the pool when it last gave some back

    def shrink(self) -> None:
        """Keep memory for one sequence; no page may have an owner."""
        self.allocator.limit(0)
        self._resize(self.least)

    def fill(self) -> None:
        """Take all memory; OutOfMemory changes nothing."""
        self._resize(self.most)

    def hurry(self) -> None:
        """Make the next step look for memory: there are new requests."""
        self._ask_at, self._left = 0.0, self.most

    def fit(self, wanted: Callable[[], int], compact: Callable[[int], bool]) -> None:
        """Take what is free now, up to the tokens that are wanted, in steps worth a call of the
        driver, which is asked now and then: while another process pins or maps memory, it takes its
        time to answer. While shrinking it gives back what is not wanted any more, in such steps.

        compact: moves what is used to so many first pages, if it has room there.
        """
        if (began := time.monotonic()) < self._ask_at:
            return
        tokens = max(self.pool.page_size, min(wanted(), self.most))
        if tokens > self.pool.size:
            self._take(tokens - self.pool.size)
        elif self.shrinking and min(self._left, self.pool.size) - tokens >= self.most // 16:
            self._give_back(tokens, compact)
        now = time.monotonic()
        self._ask_at = now + max(_ASKED, 10 * (now - began))

    def _take(self, missing: int) -> None:
        spare = _SPARE if self.saver.device.type == "cuda" else 0
        more = min((self.saver.free_bytes - spare) // self.pool.bytes_per_token, missing)
        if more >= min(missing, self.most // 16):
            with contextlib.suppress(OutOfMemory):  # somebody else was faster
                self._resize(self.pool.size + more)

    def _give_back(self, tokens: int, compact: Callable[[int], bool]) -> None:
        """Shrink the pool, or leave it as it is where that is impossible."""
        self._left = tokens  # on a GPU it may keep more: the rest of an extent
        with contextlib.suppress(OutOfMemory, LeaseError, torch.OutOfMemoryError):
            if compact(tokens // self.pool.page_size):
                self.allocator.limit(tokens)
                try:
                    self.pool.resize(tokens)
                finally:
                    self.follow()

    def _resize(self, tokens: int) -> None:
        self.pool.resize(tokens)
        self.follow()

    def follow(self) -> None:
        """Hand out the pages that have memory."""
        self.allocator.limit(self.pool.size)

    def begin(self) -> None:
        """Hand out the pages that have memory, and take more where one sequence needs it."""
        self._resize(self.least) if self.pool.size < self.least else self.follow()

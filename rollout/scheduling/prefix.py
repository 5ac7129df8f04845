"""Block managers with a prefix cache over the same pages, and KV pools that grow and shrink."""

import contextlib
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from kvcache import BlockManager, Ledger, PrefixMatch, RadixCache, ReqHandle
from kvcache.allocators import Int64Array, PagedTokenToKVPoolAllocator
from kvcache.pools import RoutedKVPool, TokenPool
from kvcache.radix import MambaMatch, MambaRadixCache, RadixNode
from kvcache.request_tables import HybridReqToTokenPool
from kvcache.tiers import HostTransfer
from memsaver import LeaseError, MemorySaver, OutOfMemory

# A growing pool leaves this much of a GPU free for temporary tensors of the engine's steps.
_SPARE = 2**30  # bytes
_QUERY_SECONDS = 0.02  # minimum time between two queries of free memory


@dataclass(frozen=True, kw_only=True)
class Swapped:
    """Keys and values of a preempted sample that wait on the host.

    If they are `private`, the sample has all of them to itself, and goes on over them whatever
    weights are served then. Otherwise whole pages are found by their tokens, as cached ones.
    """

    tokens: int  # number of the sample's leading tokens that were saved
    version: int  # of the prefix cache, under which they were computed
    pages: tuple[int, ...]  # the sample's own host pages, with all tokens or the last ones
    private: bool = False
    format: tuple[object, ...] = ()  # of the pool's values


@dataclass(frozen=True)
class _Held:
    """The beginning of a running sequence that is locked in the cache.

    In `StatePrefixBlocks`, `branch` is the number of tokens whose pages are cached. The pages past
    `length` have no states and are not locked.
    """

    node: RadixNode  # the last locked node
    length: int  # number of locked tokens
    version: int  # of the cache, under which they were computed
    namespace: int | None  # of the sequence, see `PrefixBlocks.admit`
    branch: int = 0


class PrefixBlocks:
    """Block manager with a prefix cache, as the scheduler uses it.

    A running sequence locks the cached pages that it shares, so an eviction frees exactly the
    pages that count as evictable. The cache numbers the weights itself: it counts how often they
    were defined, because two definitions may have the same version number. Without a `cache`,
    nothing is cached.
    """

    def __init__(self, blocks: BlockManager, cache: RadixCache | MambaRadixCache | None) -> None:
        self.blocks = blocks
        self.cache = RadixCache(blocks.allocator) if cache is None else cache
        self._keeps = cache is not None
        self._held: dict[ReqHandle, _Held] = {}
        self._format = self._pool_format()
        self.loaded_tokens = 0  # cache hits on host or disk

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """Return the ledgers of the blocks; pages that the cache can evict count as available."""
        cached = self.cache.evictable_size // self.cache.page_size
        ledgers = self.blocks.ledgers
        return tuple(replace(ledger, available=ledger.available + cached) for ledger in ledgers)

    def held_pages(
        self,
        tokens: Sequence[int],
        swapped: Swapped | None = None,
        namespace: int | None = None,
    ) -> int:
        """Return the number of pages of running sequences that `admit` would share."""
        self._notice_format()
        if swapped is not None and swapped.private:
            return 0
        held = self.cache.peek(tokens[:-1], extra_key=namespace)[1]
        return held // self.cache.page_size

    def admit(
        self,
        tokens: Sequence[int],
        swapped: Swapped | None = None,
        namespace: int | None = None,
    ) -> tuple[ReqHandle, int] | None:
        """Add a sequence, and lock the cached pages that it begins with.

        `swapped` is the result of `swap_out`, which is consumed. Sequences share pages only within
        a namespace, which stands for the adapter that computes them.

        Returns:
            The handle, and the number of leading tokens that are already computed, which never
            includes the last token. None if no row is free.
        """
        self._notice_format()
        match = self._match(tokens[:-1], namespace)
        handle = self.blocks.admit(match.pages)
        if handle is None:
            return None
        self._begin(handle, match, namespace)
        return handle, match.length

    def grow(self, rows: Int64Array, new_lens: Int64Array) -> Any | None:
        """Grow sequences as `BlockManager.grow` does; evict cached pages if pages are short."""
        slots = self.blocks.grow(rows, new_lens)
        if slots is not None:
            return slots
        missing = self.blocks.pages_needed(rows, new_lens) - self.blocks.available_pages
        self.cache.evict(missing * self.cache.page_size)
        return self.blocks.grow(rows, new_lens)

    def keep_at(self, handle: ReqHandle, computed: int, length: int) -> int:
        """Return where the next chunk of a prefill must end, because `keep` follows there.

        The prefill has `length` tokens, and the first `computed` are computed.
        """
        return length

    def slide(self, rows: Int64Array) -> None:
        self.blocks.slide(rows)

    def keep(self, handle: ReqHandle, tokens: Sequence[int]) -> None:
        """Cache the whole pages of a running sequence's leading `tokens`, before its first fork.

        All of the tokens are computed. If another sequence has cached the same tokens, nothing
        happens, because this one has its own pages.
        """
        if not self._keeps:
            return
        assert isinstance(self.cache, RadixCache)
        held = self._held[handle]
        # The conversion takes longer than all operations of the cache, so it is done once.
        ids = array("i", tokens)
        own = {"extra_key": held.namespace}
        if held.version != self.cache.version or self.cache.peek(ids, **own)[0] > held.length:
            return
        self._insert(handle, ids, held)
        self._begin(handle, self.cache.match_resident(ids, **own), held.namespace)
        self.cache.dec_lock_ref(held.node)

    def fork(self, handle: ReqHandle) -> ReqHandle | None:
        child = self.blocks.fork(handle)
        if child is not None:
            self._held[child] = self._held[handle]
            self.cache.inc_lock_ref(self._held[child].node)
        return child

    def release(self, handle: ReqHandle, tokens: Sequence[int]) -> None:
        """End a sequence, and cache its leading, computed `tokens`."""
        held = self._held.pop(handle)
        try:
            if self._keeps:
                self._insert(handle, array("i", tokens), held)
        finally:
            self.cache.dec_lock_ref(held.node)  # first, because the next can fail on the device
            self.blocks.release(handle)

    def swap_out(
        self, handle: ReqHandle, tokens: Sequence[int], private: bool = False
    ) -> Swapped | None:
        """Copy keys and values of a sequence's computed `tokens` to the host, before its `release`.

        The sequence will be admitted again later; with `private`, over these keys and values even
        if new weights are served then. Without a copy (None), its tokens have to be computed again.
        """
        return None

    def forget(self, swapped: Swapped) -> None:
        """Free the result of `swap_out` for a sample that ends without being admitted again."""

    def compact(self, pages: int) -> bool:
        """Evict all unlocked pages and move the rest to the first `pages` pages.

        Return whether the rest fits; otherwise it stays where it is.
        """
        self.cache.evict(self.cache.evictable_size)
        renamed = self.blocks.compact(pages)
        if renamed is not None:
            self.cache.rename(renamed)
        return renamed is not None

    def loads(self) -> tuple[HostTransfer, ...]:
        """Return the copies to the device that are under way, for which a forward waits."""
        return ()

    def move_below(self, keep: bool) -> None:
        """Prepare for a pause of the pool.

        With `keep`, the cached pages move to a lower tier, if there is one.
        """
        self.clear()

    def swapped_pages(self) -> int:
        """Return the number of host pages that swapped samples hold."""
        return 0

    def new_weights(self) -> None:
        """Invalidate all cached prefixes; unused pages among them are the first to be evicted."""
        self.cache.raise_version(self.cache.version + 1)

    def clear(self) -> None:
        """Forget all cached pages after a loss of the pool's content.

        Pages that running sequences lock are evicted after the release of those sequences.
        """
        self.new_weights()
        self.cache.evict(self.cache.evictable_size)

    def check_integrity(self) -> None:
        """Raise an AssertionError unless ledger, sequences, cache and locks agree."""
        self.cache.check_integrity()
        pages = self.cache.pages()
        self.blocks.check_integrity(pages)
        shared = int((self.blocks.allocator.ref_counts(pages) > 1).sum())
        assert shared * self.cache.page_size == self.cache.protected_size, (
            "the pages that sequences lock differ from those that they share"
        )

    def _match(self, tokens: Sequence[int], namespace: int | None) -> PrefixMatch:
        return self.cache.match_prefix(tokens, extra_key=namespace)

    def _begin(self, handle: ReqHandle, match: PrefixMatch, namespace: int | None) -> None:
        """Lock the cached beginning of a sequence, at its start or after `keep`."""
        self.cache.inc_lock_ref(match.node)
        self._held[handle] = _Held(match.node, match.length, self.cache.version, namespace)

    def _insert(self, handle: ReqHandle, tokens: "array[int]", held: _Held) -> None:
        assert isinstance(self.cache, RadixCache)
        size, own = self.cache.page_size, held.namespace
        pages = self.blocks.pages(handle)[: len(tokens) // size]
        new = pages[self.cache.peek(tokens, extra_key=own)[0] // size :]
        if (self.blocks.allocator.ref_counts(new) > 1).any():
            # A fork still uses these pages without a lock; evicting them would free nothing.
            return
        taken = self.cache.insert(tokens, pages, version=held.version, extra_key=own) // size
        self.blocks.allocator.share(pages[taken:])

    def _notice_format(self) -> None:
        """Invalidate the cache if the scales of an fp8 pool changed, which changes its values."""
        if self._format != self._pool_format():
            self._format = self._pool_format()
            self.new_weights()

    def _pool_format(self) -> tuple[object, ...]:
        pool = self.blocks.pool
        pools = pool.pools if isinstance(pool, RoutedKVPool) else (pool,)
        return tuple(part.format() for part in pools if isinstance(part, TokenPool))


class StatePrefixBlocks(PrefixBlocks):
    """Prefix blocks for models with linear layers: a cached prefix has pages and states.

    States cannot be rewound, so a prefill stops where they are kept: at the last page boundary
    before the prompt's final token, and before that at `branch`. Up to `branch` the cache has pages
    without states, because earlier prompts began alike and continued differently.

    Answers are not cached: when a sequence ends, its states are past its last whole page. The cache
    uses at most the state slots for which the request table has no row.
    """

    def __init__(self, blocks: BlockManager) -> None:
        table = blocks.req_to_token
        assert isinstance(table, HybridReqToTokenPool), "Cache.prefix_blocks checks this"
        self._table, self._states = table, table.mamba
        self._prefixes = MambaRadixCache(blocks.allocator, table.mamba)
        super().__init__(blocks, self._prefixes)

    def keep_at(self, handle: ReqHandle, computed: int, length: int) -> int:
        page = self._prefixes.page_size
        cuts = (self._held[handle].branch, (length - 1) // page * page)
        return min((cut for cut in cuts if cut > computed), default=length)

    def keep(self, handle: ReqHandle, tokens: Sequence[int]) -> None:
        """Cache the whole pages of a running sequence with a copy of its states after `tokens`.

        Nothing is cached if the tokens end inside a page or no state slot is free.
        """
        ids, held = array("i", tokens), self._held[handle]
        if len(ids) % self._prefixes.page_size or held.version != self._prefixes.version:
            return
        # Checked again because the eviction may remove pages to which only states were to be added.
        length = held.length
        own = held.namespace
        wanted = partial(self._wanted, length, ids, own)
        if not (wanted() and self._free_slot() and wanted()):
            return
        slot = self._states.clone(self._table.mamba_slot(handle))
        assert slot is not None, "_free_slot freed one"
        pages = self.blocks.pages(handle)
        kept = self._prefixes.insert(ids, pages, slot, version=held.version, extra_key=own)
        self.blocks.allocator.share(pages[kept.length // self._prefixes.page_size :])
        if kept.length == held.length:
            super()._begin(handle, self._prefixes.match_prefix(ids, extra_key=own), own)
            self._prefixes.dec_lock_ref(held.node)

    def check_integrity(self) -> None:
        super().check_integrity()
        rows = self._table.size - self._table.available_size()
        kept = len(self._prefixes.state_slots())
        assert rows + kept == self._states.size - self._states.available_size(), (
            "states are held by neither a request nor the cache"
        )

    def _wanted(self, own: int, ids: "array[int]", namespace: int | None) -> bool:
        """Return whether the states after `ids` are missing in the cache and can be added.

        They can be added if the cache has the pages of all tokens, or only the pages of the first
        `own` tokens, which the sequence shares. Otherwise the sequence has its own copies of cached
        pages.
        """
        match = self._prefixes.match_prefix(ids, extra_key=namespace)
        return match.length < len(ids) and match.paged in (own, len(ids))

    def _free_slot(self) -> bool:
        """Free a state slot that no row needs; return False if requests use all cached states."""
        while self._states.available_size() <= self._table.available_size():
            if not self._prefixes.evict_states(1):
                return False
        return True

    def _begin(self, handle: ReqHandle, match: PrefixMatch, namespace: int | None) -> None:
        assert isinstance(match, MambaMatch)
        if match.state is not None:
            try:
                self._states.copy(self._table.mamba_slot(handle), match.state)
            except BaseException:  # for example, the device is out of memory
                self.blocks.release(handle)
                raise
        super()._begin(handle, match, namespace)
        self._held[handle] = replace(self._held[handle], branch=match.paged)

    def _insert(self, handle: ReqHandle, tokens: "array[int]", held: _Held) -> None:
        """Cache nothing when a sequence ends."""


@dataclass(eq=False)
class Elastic:
    """KV pool that grows and shrinks between steps, see `EngineConfig.elastic`.

    Only the pool's first tokens need have memory. The allocator hands out only pages with memory.
    """

    pool: TokenPool  # has all of its memory at first
    allocator: PagedTokenToKVPoolAllocator
    saver: MemorySaver
    least: int  # tokens to which the pool can shrink, enough for one sequence
    most: int  # tokens of the whole pool
    shrinking: bool = False  # whether to free memory that no request needs
    _ask_at: float = field(default=0.0, init=False)
    _left: float = field(default=math.inf, init=False)  # tokens when the pool last shrank

    def shrink(self) -> None:
        """Shrink the pool to one sequence; no page may be in use."""
        self.allocator.limit(0)
        self._resize(self.least)

    def fill(self) -> None:
        """Grow the pool to its full size; OutOfMemory changes nothing."""
        self._resize(self.most)

    def hurry(self) -> None:
        """Query the free memory at the next step, because there are new requests."""
        self._ask_at, self._left = 0.0, math.inf

    def fit(self, wanted: Callable[[], int], compact: Callable[[int], bool]) -> None:
        """Grow the pool toward the wanted tokens as far as memory is free, or shrink it to them.

        It shrinks only while `shrinking`. Both happen in steps that are large enough to be worth a
        driver call. The driver is queried only now and then, because it answers slowly while
        another process pins or maps memory.

        `wanted` returns the number of tokens that samples can use. `compact(n)` moves the pages in
        use to the first n pages, and returns whether they fit.
        """
        if (began := time.monotonic()) < self._ask_at:
            return
        tokens = max(self.pool.page_size, min(wanted(), self.most))
        if tokens > self.pool.size:
            self._take(tokens - self.pool.size)
        elif self.shrinking and min(self._left, self.pool.size) - tokens >= self.most // 16:
            self._give_back(tokens, compact)
        now = time.monotonic()
        self._ask_at = now + max(_QUERY_SECONDS, 10 * (now - began))

    def _take(self, missing: int) -> None:
        spare = _SPARE if self.saver.device.type == "cuda" else 0
        more = min((self.saver.free_bytes - spare) // self.pool.bytes_per_token, missing)
        if more >= min(missing, self.most // 16):
            with contextlib.suppress(OutOfMemory):  # another user of the device was faster
                self._resize(self.pool.size + more)

    def _give_back(self, tokens: int, compact: Callable[[int], bool]) -> None:
        """Shrink the pool, or leave it unchanged where that is impossible."""
        self._left = tokens  # the pool may stay larger on a GPU, by the rest of an extent
        with contextlib.suppress(OutOfMemory, LeaseError, torch.OutOfMemoryError):
            if compact(tokens // self.pool.page_size):
                self.allocator.limit(tokens)
                self._resize(tokens)

    def _resize(self, tokens: int) -> None:
        try:
            self.pool.resize(tokens)
        finally:
            self.follow()

    def follow(self) -> None:
        """Let the allocator hand out exactly the pages that have memory."""
        self.allocator.limit(self.pool.size)

    def begin(self) -> None:
        """Start with the present memory, or with more if one sequence needs it."""
        self._resize(self.least) if self.pool.size < self.least else self.follow()

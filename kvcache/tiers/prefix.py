"""A prefix cache over all tiers."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from kvcache.allocators.base import KVAllocator
from kvcache.radix.cache import PrefixMatch, RadixCache
from kvcache.radix.keys import Int64Array, Tokens, as_ids
from kvcache.radix.node import EMPTY, RadixNode
from kvcache.tiers.disk import DiskTier
from kvcache.tiers.host import HostKVCache, Transfer
from kvcache.tiers.keys import page_hashes
from kvcache.tiers.lower import LowerTiers

_log = logging.getLogger("kvcache")

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
# After how many hits a page is written while it is on the device; 0: when inserted; else never.
_HITS = {"write_through": 0, "write_through_selective": 2}


def check_policy(policy: str) -> None:
    """ValueError for a name that is none."""
    if policy not in get_args(WritePolicy):
        raise ValueError(
            f"no write policy {policy!r}; there are {', '.join(get_args(WritePolicy))}"
        )


@dataclass
class TieredMatch(PrefixMatch):
    """A PrefixMatch with `loaded` tokens on their way: `transfer.wait(layer)` before a layer."""

    transfer: Transfer
    loaded: int


class TieredPrefixCache(RadixCache):
    """A RadixCache whose pages go to the host, then to disk, and come back for a match.

    Pages are known below by their hash, so that a lower tier need not follow splits and evictions
    of the tree; a page is only ever found there under the version that it was inserted under.
    write_policy: `write_through` copies a page to the host when it is inserted,
    `write_through_selective` when it is hit the second time, `write_back` when it is evicted.
    `extra_key` is a str, an int or None. The rows of a page are written, as far as the current
    stream is concerned, before it is inserted.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        host: HostKVCache,
        disk: DiskTier | None = None,
        *,
        write_policy: WritePolicy = "write_through",
        eviction_policy: str = "lru",
        version: int = 0,
    ) -> None:
        check_policy(write_policy)
        super().__init__(allocator, eviction_policy, version)
        self.write_policy = write_policy
        self.lower = LowerTiers(host, disk, version)
        self._ledger = allocator
        # of device pages in the tree: version, hash
        self._hashes: dict[int, tuple[int, bytes]] = {}
        self._hits = np.zeros(allocator.total_pages + 1, dtype=np.int64)
        # the last load, and the last of all
        self._loading = self._last = Transfer(range(host.num_layers), {})

    def match_prefix(self, key: Tokens, *, extra_key: Hashable = None) -> TieredMatch:
        """The longest prefix that the tiers have one after the other; what is below the device gets
        device pages, for which others may be evicted. Nothing is reserved.
        """
        tokens = as_ids(key, "key")
        found = self.match_resident(tokens, extra_key=extra_key)
        self._count_hits(found.pages)
        loaded = 0
        if found.length + self.page_size <= len(tokens) and not self.lower.is_empty:
            loaded = self._load_rest(tokens, found, extra_key)
        if loaded:
            found = self.match_resident(tokens[: found.length + loaded], extra_key=extra_key)
        return TieredMatch(found.length, found.parts, found.node, self._loading, loaded)

    def insert(
        self,
        key: Tokens,
        pages: Tokens,
        *,
        version: int,
        extra_key: Hashable = None,
        priority: int = 0,
    ) -> int:
        tokens, ids = as_ids(key, "key"), as_ids(pages, "pages")
        hashes = page_hashes(tokens, self.page_size, extra_key)
        length = super().insert(
            tokens, ids, version=version, extra_key=extra_key, priority=priority
        )
        new = ids[length // self.page_size :]
        self._register(new, hashes[length // self.page_size :])
        if _HITS.get(self.write_policy) == 0:
            self._save(new)
        return length

    def raise_version(self, version: int) -> None:
        """Raises the version as RadixCache does, on every tier, in O(1)."""
        super().raise_version(version)
        self.lower.raise_version(version)

    def move_to_host(self) -> None:
        """Before the pool's tag is paused: copies all that can be hit to the host, as far as it has
        room, waits for it and drops the device pages. ValueError while something is locked.
        """
        if not self.protected_size:
            self._save(np.fromiter(self._hashes, dtype=np.int64))
            self._hashes.clear()
        super().reset()
        self.finish_copies()

    def save(self, hashes: Sequence[bytes], pages: Int64Array) -> bool:
        """Starts copying pages, of the present version and in the tree or not, to the host; whether
        all of them are there then. They may not be written before `wait_for_copies`.
        """
        self._last = self.lower.save(hashes, pages) or self._last
        return not self.lower.absent(hashes)

    def wait_for_copies(self) -> None:
        """Makes what is queued on the current stream from now on wait for all copies started."""
        self._last.wait()

    def finish_copies(self) -> None:
        """Waits for all copies: before the pool's tag is paused."""
        self._last.synchronize()

    def store_private(self, slots: torch.Tensor, wanted: Sequence[bytes]) -> int:
        """Starts copying at most a page of device slots, int64 `[n]`, to a host page of its own.

        Returns that page; 0 where the host has no room without dropping `wanted`. `wait_for_copies`
        before the slots are written.
        """
        page = self.lower.take_private(frozenset(wanted))
        if page:
            try:
                host_slots = self.lower.host.slots_of(np.array([page]))[: len(slots)]
                self._last = self.lower.host.backup_from_device_all_layer(host_slots, slots)
            except BaseException:
                self.lower.free_private(page)
                raise
        return page

    def load_private(self, page: int, slots: torch.Tensor) -> Transfer:
        """Starts copying what `store_private` kept to as many device slots."""
        host_slots = self.lower.host.slots_of(np.array([page]))[: len(slots)]
        self._last = self.lower.host.load_to_device(host_slots, slots)
        return self._last

    def reset(self) -> None:
        """Drops everything on every tier. ValueError while something is locked."""
        if not self.protected_size:
            self._hashes.clear()  # so that nothing is written back
        super().reset()
        self.lower.clear()

    def check_integrity(self) -> None:
        super().check_integrity()
        self.lower.check_integrity()
        held = set(self.pages().tolist())
        assert held == self._hashes.keys(), "a page of the tree has no hash, or the reverse"

    def _count_hits(self, pages: Int64Array) -> None:
        self._hits[pages] += 1
        if due := _HITS.get(self.write_policy):
            # again and again: they may have left the host since
            self._save(pages[self._hits[pages] % due == 0])

    def _load_rest(self, tokens: Int64Array, found: PrefixMatch, extra_key: Hashable) -> int:
        """Brings what follows a match to the device; how many tokens."""
        hashes = page_hashes(tokens, self.page_size, extra_key)[len(found.pages) :]
        below = next((i for i, each in enumerate(hashes) if each not in self.lower), len(hashes))
        if not below:
            return 0
        self.inc_lock_ref(found.node)
        try:
            pages = self._device_pages(below)
            try:
                count, transfer = self.lower.load(hashes[:below], pages)
            except BaseException:
                self._ledger.free_pages(pages)
                raise
            self._ledger.free_pages(pages[count:])
            if transfer is None:
                return 0
            self._loading = self._last = transfer
            loaded, end = count * self.page_size, found.length + count * self.page_size
            all_pages = np.concatenate([found.pages, pages[:count]])
            super().insert(tokens[:end], all_pages, version=self.version, extra_key=extra_key)
            self._register(pages[:count], hashes[:count])
            return loaded
        finally:
            self.dec_lock_ref(found.node)

    def _device_pages(self, count: int) -> Int64Array:
        short = count - self._ledger.available_pages
        if short > 0:
            self.evict(short * self.page_size)
        pages = self._ledger.alloc_pages(min(count, self._ledger.available_pages))
        assert pages is not None
        return pages

    def _register(self, pages: Int64Array, hashes: list[bytes]) -> None:
        for page, each in zip(pages.tolist(), hashes, strict=True):
            self._hashes[page] = self.version, each
        self._hits[pages] = 0

    def _save(self, pages: Int64Array) -> None:
        """Starts copying those of the pages that are of the present version to the host."""
        known = [(page, *self._hashes[page]) for page in pages.tolist() if page in self._hashes]
        current = [(page, each) for page, version, each in known if version == self.version]
        if current:
            device_pages = np.array([page for page, _ in current], dtype=np.int64)
            try:
                hashes = [each for _, each in current]
                self._last = self.lower.save(hashes, device_pages) or self._last
            except (RuntimeError, OSError, MemoryError) as error:
                # a copy that nobody waits for is not worth failing
                _log.warning("%d KV pages are not kept below the device: %s", len(current), error)

    def _release(self, gone: list[RadixNode]) -> None:
        """Pages leave the device: written back where the policy says so."""
        try:
            if self.write_policy == "write_back":
                self._save(np.concatenate([EMPTY, *(node.pages for node in gone)]))
            self.wait_for_copies()
        finally:
            for node in gone:
                for page in node.pages.tolist():
                    self._hashes.pop(page, None)
            super()._release(gone)

"""The prefix cache over device, host and disk, and the store of pages below the device."""

import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from kvcache.allocators import Int64Array, KVAllocator, as_int64
from kvcache.radix.cache import EvictionPolicy, PrefixMatch, RadixCache
from kvcache.radix.node import EMPTY, RadixNode, Tokens
from kvcache.tiers.disk import DiskTier
from kvcache.tiers.host import HostKVCache, HostTransfer
from kvcache.tiers.keys import VersionedLRU, page_hashes
from memsaver.errors import BackendError
from memsaver.types import check_choice

_log = logging.getLogger("kvcache")

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
# Hits after which a page is copied to the host; 0 copies it when it is inserted. Under write_back,
# pages are copied when they are evicted.
_HITS = {"write_through": 0, "write_through_selective": 2}


class LowerTiers:
    """Store of a `TieredPrefixCache`'s pages on the host and on disk, for one weight version.

    A page may be on the device, the host and the disk at the same time. Each tier evicts separately
    and drops the least recently used page. If the disk is full or fails, the pages written to it
    are lost; `lost_pages` counts them and `disk_error` is the latest error.
    """

    def __init__(self, host: HostKVCache, disk: DiskTier | None, version: int) -> None:
        matches = disk is None or (disk.version, disk.page_bytes) == (version, host.page_bytes)
        assert matches, f"the disk tier is not for version {version}, pages of {host.page_bytes}"
        self.host, self.disk = host, disk
        self.lost_pages = 0
        self.disk_error: BackendError | None = None
        self._pages: VersionedLRU[int] = VersionedLRU(version)  # hash -> host page
        self._private: Counter[int] = Counter()  # owners of host pages besides their hashes
        self._read = torch.empty(host.page_bytes, dtype=torch.uint8)

    @property
    def version(self) -> int:
        return self._pages.version

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages or (self.disk is not None and key in self.disk)

    @property
    def is_empty(self) -> bool:
        return not len(self._pages) and not (self.disk is not None and len(self.disk))

    def absent(self, keys: Sequence[bytes]) -> int:
        """Count the keys that are not on the host."""
        return sum(key not in self._pages for key in keys)

    @property
    def private_pages(self) -> int:
        """Return the pages that are owned privately; one with two owners counts twice."""
        return self._private.total()

    def take_private(self, count: int, wanted: frozenset[bytes]) -> tuple[int, ...]:
        """Allocate host pages without keys; none if that would drop `wanted` pages."""
        taken = self._take(count, wanted)
        if len(taken) < count:
            self.host.allocator.free_pages(taken)
            return ()
        self._private.update(taken.tolist())
        return tuple(taken.tolist())

    def share_private(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Own the host pages of leading keys privately, too, so that they outlive their keys."""
        pages: list[int] = []
        for key in keys:
            if (page := self._pages.use(key)) is None:
                break
            pages.append(page)
        self.host.allocator.share(pages)
        self._private.update(pages)
        return tuple(pages)

    def free_private(self, pages: Sequence[int]) -> None:
        """Free pages of `take_private` or `share_private`, even while they are being copied."""
        self._private.subtract(pages)
        assert all(self._private[page] >= 0 for page in pages), "pages are freed once"
        self.host.allocator.free_pages(pages)

    def raise_version(self, version: int) -> None:
        """Start a new weight version, which makes every page a miss, in O(1)."""
        self._pages.raise_version(version)
        if self.disk is not None:
            self.disk.raise_version(version)

    def save(self, keys: Sequence[bytes], device_pages: Int64Array) -> HostTransfer | None:
        """Start to copy device pages to the host under their hashes, as far as there is room.

        Returns:
            The transfer, or None if no page had to be copied or none had room.
        """
        new = [i for i, key in enumerate(keys) if self._pages.use(key) is None]
        pages = self._take(len(new), frozenset(keys))
        if not len(pages):
            return None
        new = new[: len(pages)]
        slots = self.host.slots_of
        source = slots(device_pages[new])
        try:
            transfer = self.host.backup_from_device_all_layer(slots(pages), source)
        except BaseException:  # for example, the device is out of memory
            self.host.allocator.free_pages(pages)
            raise
        for i, page in zip(new, pages.tolist(), strict=True):
            self._pages.add(keys[i], page)
        return transfer

    def load(
        self, keys: Sequence[bytes], device_pages: Int64Array
    ) -> tuple[int, HostTransfer | None]:
        """Start to copy pages to the device, up to the first page that is missing.

        Returns:
            The number of pages being copied, and the transfer, or None without pages.
        """
        wanted = frozenset(keys)
        pages = []
        for key in keys:
            page = self._pages.use(key) or self._from_disk(key, wanted)
            if not page:
                break
            pages.append(page)
        if not pages:
            return 0, None
        slots, target = self.host.slots_of, device_pages[: len(pages)]
        transfer = self.host.load_to_device(slots(np.array(pages)), slots(target))
        return len(pages), transfer

    def clear(self) -> None:
        """Drop all pages except private ones, in O(pages)."""
        while dropped := self._pages.drop():
            self.host.allocator.free_pages([dropped.value])
        if self.disk is not None:
            self.disk.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if the host's ledger and the entries of this store differ."""
        self.host.allocator.check_integrity()
        held = Counter(self._pages.values()) + self._private
        all_pages = range(1, self.host.allocator.total_pages + 1)
        owners = self.host.allocator.ref_counts(np.array(all_pages)).tolist()
        assert owners == [held[page] for page in all_pages], "host pages have other owners"

    def _from_disk(self, key: bytes, wanted: frozenset[bytes]) -> int:
        """Read a page from disk to a host page; return 0 if it is absent or has no room."""
        if self.disk is None or not self.disk.get(key, self._read):
            return 0
        taken = self._take(1, wanted)
        if not len(taken):
            return 0
        page = int(taken[0])
        try:
            self.host.write_page(page, self._read)
        except BaseException:
            self.host.allocator.free_pages(taken)
            raise
        self._pages.add(key, page)
        return page

    def _take(self, count: int, wanted: frozenset[bytes]) -> Int64Array:
        """Allocate up to `count` host pages, evicting pages that are not among `wanted`."""
        ledger = self.host.allocator
        while (short := count - ledger.available_pages) > 0:
            if not self._drop(short, wanted):
                break
        pages = ledger.alloc_pages(min(count, ledger.available_pages))
        assert pages is not None
        return pages

    def _drop(self, count: int, wanted: frozenset[bytes]) -> int:
        """Drop up to `count` of the least recently used pages, none of `wanted`; return how many.

        All are freed together, which takes hardly longer than to free one.
        """
        dropped: list[int] = []
        try:
            while len(dropped) < count and (oldest := self._pages.oldest()) is not None:
                present = oldest.version == self.version
                if present and oldest.key in wanted:
                    break
                self._pages.drop()
                dropped.append(oldest.value)
                if present:
                    self._to_disk(oldest.key, oldest.value)
        finally:
            self.host.allocator.free_pages(dropped)
        return len(dropped)

    def _to_disk(self, key: bytes, page: int) -> None:
        if self.disk is None or self.disk.use(key):
            return
        try:
            self.disk.put(key, self.host.read_page(page))
        except BackendError as error:
            if self.disk_error is None:  # log once, because a full disk fails for many pages
                message = "KV page not stored on disk, its tokens will be computed again: %s"
                _log.warning(message, str(error))
            self.lost_pages += 1
            self.disk_error = error


@dataclass
class TieredMatch(PrefixMatch):
    """A `PrefixMatch` some of whose pages may still be loading from a lower tier."""

    transfer: HostTransfer  # the latest load; call `wait(layer)` before a layer reads the pages
    loaded: int  # tokens that this match began to load


class TieredPrefixCache(RadixCache):
    """A `RadixCache` that copies pages to host memory and disk and loads them again for a match.

    The lower tiers identify pages by their hash, so they do not follow splits and evictions of the
    tree. A page is found only under the weight version that it was inserted under.

    `write_policy` decides when a page is copied to the host: when it is inserted ("write_through"),
    at every second hit ("write_through_selective") or when it is evicted from the device
    ("write_back"). `version` must be that of the disk tier.

    `extra_key` must be a str, an int or None. The writes of a page's rows must be queued on the
    current stream before the page is inserted.

    Raises:
        ValueError: A policy is unknown.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        host: HostKVCache,
        disk: DiskTier | None = None,
        *,
        write_policy: WritePolicy = "write_through",
        eviction_policy: EvictionPolicy = "lru",
        version: int = 0,
    ) -> None:
        check_choice("write_policy", write_policy, WritePolicy)
        super().__init__(allocator, eviction_policy, version)
        self.write_policy = write_policy
        self.lower = LowerTiers(host, disk, version)
        # (version, hash) of each device page in the tree.
        self._hashes: dict[int, tuple[int, bytes]] = {}
        self._hits = np.zeros(allocator.total_pages + 1, dtype=np.int64)
        # The latest load, and the latest transfer in either direction.
        self._loading = self._last = HostTransfer()

    def match_prefix(self, key: Tokens, *, extra_key: Hashable = None) -> TieredMatch:
        """Find the longest prefix over all tiers, and start to load its pages from lower tiers.

        Loaded pages need device pages, for which other pages may be evicted. The match reserves
        nothing. Wait for its transfer before reading its pages.

        Raises:
            ValueError: `extra_key` has another type, or the pool's fp8 scales have changed.
        """
        tokens = as_int64(key)
        match = self.match_resident(tokens, extra_key=extra_key)
        self._count_hits(match.pages)
        loaded = 0
        if match.length + self.page_size <= len(tokens) and not self.lower.is_empty:
            loaded = self._load_rest(tokens, match, extra_key)
        if loaded:
            match = self.match_resident(tokens[: match.length + loaded], extra_key=extra_key)
        return TieredMatch(match.length, match.parts, match.node, self._loading, loaded)

    def insert(
        self,
        key: Tokens,
        pages: Tokens,
        *,
        version: int,
        extra_key: Hashable = None,
        priority: int = 0,
    ) -> int:
        tokens, ids = as_int64(key), as_int64(pages)
        hashes = page_hashes(tokens, self.page_size, extra_key)
        length = super().insert(
            tokens, ids, version=version, extra_key=extra_key, priority=priority
        )
        new = ids[length // self.page_size :]
        self._register(new, hashes[length // self.page_size :], version)
        if _HITS.get(self.write_policy) == 0:
            self._save(new)
        return length

    def raise_version(self, version: int) -> None:
        """Start a new, greater weight version on every tier, in O(1)."""
        super().raise_version(version)
        self.lower.raise_version(version)

    def move_to_host(self) -> None:
        """Copy pages of the present version to the host and drop all device pages.

        The method copies as many pages as the host has room for, and waits for the copies. Call it
        before the pool's tag is paused.

        Raises:
            ValueError: Tokens are locked. Nothing has changed.
        """
        if not self.protected_size:
            self._save(np.fromiter(self._hashes, dtype=np.int64))
            self._hashes.clear()
        super().reset()
        self.finish_copies()

    def save(self, hashes: Sequence[bytes], pages: Int64Array) -> bool:
        """Start to copy pages of the present version to the host, whether cached or not.

        `hashes` are the hashes of the device pages, which must not be written to before
        `wait_for_copies`.

        Returns:
            Whether the host will have all of the pages.

        Raises:
            ValueError: The pool's fp8 scales have changed.
        """
        self._last = self.lower.save(hashes, pages) or self._last
        return not self.lower.absent(hashes)

    def wait_for_copies(self) -> None:
        """Make the current stream wait for all copies that were started."""
        self._last.wait()

    def finish_copies(self) -> None:
        """Wait on the host for all copies. Required before the pool's tag is paused."""
        self._last.synchronize()

    def store_private(self, slots: torch.Tensor, wanted: Sequence[bytes] = ()) -> tuple[int, ...]:
        """Start to copy device slots, int64 `[n]`, to separate host pages, in their order.

        Host pages with a hash in `wanted` are not dropped to make room. Call `wait_for_copies`
        before the slots are written to.

        Returns:
            The host pages; none if the host has no room.

        Raises:
            ValueError: The pool's fp8 scales have changed.
        """
        pages = self.lower.take_private(-(-len(slots) // self.page_size), frozenset(wanted))
        if pages:
            try:
                host_slots = self.lower.host.slots_of(np.array(pages))[: len(slots)]
                self._last = self.lower.host.backup_from_device_all_layer(host_slots, slots)
            except BaseException:
                self.lower.free_private(pages)
                raise
        return pages

    def share_private(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Keep the host pages of leading hashes beyond the present version, without a copy.

        Returns:
            The host pages, as many as the host has.
        """
        return self.lower.share_private(hashes)

    def load_private(self, pages: Sequence[int], slots: torch.Tensor) -> HostTransfer:
        """Start to copy pages of `share_private` and `store_private` to device slots, int64 `[n]`.

        Raises:
            ValueError: The pool's fp8 scales have changed.
        """
        host_slots = self.lower.host.slots_of(np.array(pages))[: len(slots)]
        self._last = self.lower.host.load_to_device(host_slots, slots)
        return self._last

    def reset(self) -> None:
        """Drop all pages on every tier.

        Raises:
            ValueError: Tokens are locked. Nothing has changed.
        """
        if not self.protected_size:
            self._hashes.clear()  # pages without a hash are not written back
        super().reset()
        self.lower.clear()

    def check_integrity(self) -> None:
        super().check_integrity()
        self.lower.check_integrity()
        held = set(self.pages().tolist())
        assert held == self._hashes.keys(), "the pages with a hash are not the pages of the tree"

    def _count_hits(self, pages: Int64Array) -> None:
        self._hits[pages] += 1
        if due := _HITS.get(self.write_policy):
            # Repeat at every multiple, because the pages may have left the host since.
            self._save(pages[self._hits[pages] % due == 0])

    def _load_rest(self, tokens: Int64Array, match: PrefixMatch, extra_key: Hashable) -> int:
        """Start to load the pages that follow a match; return the number of tokens loaded."""
        hashes = page_hashes(tokens, self.page_size, extra_key)[len(match.pages) :]
        below = next((i for i, name in enumerate(hashes) if name not in self.lower), len(hashes))
        if not below:
            return 0
        self.inc_lock_ref(match.node)
        try:
            pages = self._device_pages(below)
            try:
                count, transfer = self.lower.load(hashes[:below], pages)
            except BaseException:
                self.allocator.free_pages(pages)
                raise
            self.allocator.free_pages(pages[count:])
            if transfer is None:
                return 0
            self._loading = self._last = transfer
            loaded, end = count * self.page_size, match.length + count * self.page_size
            all_pages = np.concatenate([match.pages, pages[:count]])
            super().insert(tokens[:end], all_pages, version=self.version, extra_key=extra_key)
            self._register(pages[:count], hashes[:count], self.version)
            return loaded
        finally:
            self.dec_lock_ref(match.node)

    def _device_pages(self, count: int) -> Int64Array:
        short = count - self.allocator.available_pages
        if short > 0:
            self.evict(short * self.page_size)
        pages = self.allocator.alloc_pages(min(count, self.allocator.available_pages))
        assert pages is not None
        return pages

    def _register(self, pages: Int64Array, hashes: list[bytes], version: int) -> None:
        for page, page_hash in zip(pages.tolist(), hashes, strict=True):
            self._hashes[page] = version, page_hash
        self._hits[pages] = 0

    def _save(self, pages: Int64Array) -> None:
        """Start to copy pages to the host, skipping pages of older versions."""
        known = [(page, *self._hashes[page]) for page in pages.tolist() if page in self._hashes]
        current = [(page, key) for page, version, key in known if version == self.version]
        if current:
            device_pages = np.array([page for page, _ in current], dtype=np.int64)
            try:
                hashes = [key for _, key in current]
                self._last = self.lower.save(hashes, device_pages) or self._last
            except (RuntimeError, OSError, MemoryError) as error:
                # The request does not depend on this copy, so it must not fail.
                text = "%d KV pages are not kept below the device: %s"
                _log.warning(text, len(current), str(error))

    def _release(self, gone: list[RadixNode]) -> None:
        """Copy removed pages to the host under write_back, then free them."""
        try:
            if self.write_policy == "write_back":
                self._save(np.concatenate([EMPTY, *(node.pages for node in gone)]))
            self.wait_for_copies()
        finally:
            for node in gone:
                for page in node.pages.tolist():
                    self._hashes.pop(page, None)
            super()._release(gone)

"""A prefix cache over all tiers, and the store of pages below the device."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from kvcache.allocators import Int64Array, KVAllocator, as_int64
from kvcache.radix.cache import PrefixMatch, RadixCache
from kvcache.radix.node import EMPTY, RadixNode, Tokens
from kvcache.tiers.disk import DiskTier
from kvcache.tiers.host import HostKVCache, HostTransfer
from kvcache.tiers.keys import VersionedLRU, page_hashes
from memsaver.errors import BackendError

_log = logging.getLogger("kvcache")

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
# After how many hits a page is written while it is on the device; 0: when inserted; else never.
_HITS = {"write_through": 0, "write_through_selective": 2}


class LowerTiers:
    """Pages below the device, of one weight version at a time. A page may be on the device, on the
    host and on disk at once; each tier evicts on its own, least recently used first.

    A disk that is full or fails costs the pages meant for it: `lost_pages`, `disk_error`.
    """

    def __init__(self, host: HostKVCache, disk: DiskTier | None, version: int) -> None:
        matches = disk is None or (disk.version, disk.page_bytes) == (version, host.page_bytes)
        assert matches, f"the disk tier is not for version {version}, pages of {host.page_bytes}"
        self.host, self.disk = host, disk
        self.lost_pages = 0
        self.disk_error: BackendError | None = None
        self._pages: VersionedLRU[int] = VersionedLRU(version)  # hash -> host page
        self._private: set[int] = set()  # host pages that have no hash
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
        return len(self._private)

    def take_private(self, wanted: frozenset[bytes]) -> int:
        """Take a host page of no version; 0 where none can be had without dropping `wanted`."""
        taken = self._take(1, wanted)
        self._private.update(taken.tolist())
        return int(taken[0]) if len(taken) else 0

    def free_private(self, page: int) -> None:
        """Give it back, also while copies from or to it are under way."""
        self._private.remove(page)
        self.host.allocator.free_pages([page])

    def raise_version(self, version: int) -> None:
        """Make every page a miss, in O(1)."""
        self._pages.raise_version(version)
        if self.disk is not None:
            self.disk.raise_version(version)

    def save(self, keys: Sequence[bytes], device_pages: Int64Array) -> HostTransfer | None:
        """Start copying device pages to the host, as many as there is room for; None: none."""
        new = [i for i, key in enumerate(keys) if self._pages.use(key) is None]
        pages = self._take(len(new), frozenset(keys))
        if not len(pages):
            return None
        new = new[: len(pages)]
        slots = self.host.slots_of
        source = slots(device_pages[new])
        try:
            transfer = self.host.backup_from_device_all_layer(slots(pages), source)
        except BaseException:  # such as the device being out of memory
            self.host.allocator.free_pages(pages)
            raise
        for i, page in zip(new, pages.tolist(), strict=True):
            self._pages.add(keys[i], page)
        return transfer

    def load(
        self, keys: Sequence[bytes], device_pages: Int64Array
    ) -> tuple[int, HostTransfer | None]:
        """Start copying pages to the device, up to the first missing one; return how many."""
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
        """Drop everything but private pages; costs O(pages)."""
        while dropped := self._pages.drop():
            self.host.allocator.free_pages([dropped.value])
        if self.disk is not None:
            self.disk.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError when the host's ledger and the pages that are known here differ."""
        self.host.allocator.check_integrity()
        held = sorted([*self._pages.values(), *self._private])
        every = np.arange(1, self.host.allocator.total_pages + 1)
        owned = every[self.host.allocator.ref_counts(every) > 0]
        assert held == owned.tolist(), "a host page is owned and not known, or the reverse"

    def _from_disk(self, key: bytes, wanted: frozenset[bytes]) -> int:
        """Return the host page that a page on disk was read into; 0 without one."""
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
        """Take up to `count` free host pages; what goes for them is not among `wanted`."""
        ledger = self.host.allocator
        while ledger.available_pages < count:
            oldest = self._pages.oldest()
            if oldest is None or (oldest.version == self.version and oldest.key in wanted):
                break
            self._pages.drop()
            try:
                if oldest.version == self.version:
                    self._to_disk(oldest.key, oldest.value)
            finally:
                ledger.free_pages([oldest.value])
        pages = ledger.alloc_pages(min(count, ledger.available_pages))
        assert pages is not None
        return pages

    def _to_disk(self, key: bytes, page: int) -> None:
        if self.disk is None or self.disk.use(key):
            return
        try:
            self.disk.put(key, self.host.read_page(page))
        except BackendError as error:
            if self.disk_error is None:  # once: a disk that is full stays so for many pages
                message = "KV page not kept on disk, its tokens will be computed again: %s"
                _log.warning(message, error)
            self.lost_pages += 1
            self.disk_error = error


@dataclass
class TieredMatch(PrefixMatch):
    """A PrefixMatch with `loaded` tokens on their way: `transfer.wait(layer)` before a layer."""

    transfer: HostTransfer
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
        policies = get_args(WritePolicy)
        if write_policy not in policies:
            raise ValueError(f"write_policy={write_policy!r} must be one of {', '.join(policies)}")
        super().__init__(allocator, eviction_policy, version)
        self.write_policy = write_policy
        self.lower = LowerTiers(host, disk, version)
        # of device pages in the tree: version, hash
        self._hashes: dict[int, tuple[int, bytes]] = {}
        self._hits = np.zeros(allocator.total_pages + 1, dtype=np.int64)
        # the last load, and the last of all
        self._loading = self._last = HostTransfer()

    def match_prefix(self, key: Tokens, *, extra_key: Hashable = None) -> TieredMatch:
        """Return the longest prefix that the tiers have one after the other. What is below the
        device gets device pages, for which others may be evicted. Nothing is reserved.
        """
        tokens = as_int64(key)
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
        """Raise the version as RadixCache does, on every tier, in O(1)."""
        super().raise_version(version)
        self.lower.raise_version(version)

    def move_to_host(self) -> None:
        """Copy all that can be hit to the host, as far as it has room, wait for it and drop the
        device pages: before the pool's tag is paused. ValueError while something is locked.
        """
        if not self.protected_size:
            self._save(np.fromiter(self._hashes, dtype=np.int64))
            self._hashes.clear()
        super().reset()
        self.finish_copies()

    def save(self, hashes: Sequence[bytes], pages: Int64Array) -> bool:
        """Start copying pages, of the present version and in the tree or not, to the host; return
        whether all of them will be there. They may not be written before `wait_for_copies`.
        """
        self._last = self.lower.save(hashes, pages) or self._last
        return not self.lower.absent(hashes)

    def wait_for_copies(self) -> None:
        """Make what is queued on the current stream from now on wait for all copies started."""
        self._last.wait()

    def finish_copies(self) -> None:
        """Wait for all copies: before the pool's tag is paused."""
        self._last.synchronize()

    def store_private(self, slots: torch.Tensor, wanted: Sequence[bytes]) -> int:
        """Start copying at most a page of device slots, int64 `[n]`, to a host page of its own.

        Return that page; 0 where the host has no room without dropping `wanted`. `wait_for_copies`
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

    def load_private(self, page: int, slots: torch.Tensor) -> HostTransfer:
        """Start copying what `store_private` kept to as many device slots."""
        host_slots = self.lower.host.slots_of(np.array([page]))[: len(slots)]
        self._last = self.lower.host.load_to_device(host_slots, slots)
        return self._last

    def reset(self) -> None:
        """Drop everything on every tier. ValueError while something is locked."""
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
        """Bring what follows a match to the device; return how many tokens."""
        hashes = page_hashes(tokens, self.page_size, extra_key)[len(found.pages) :]
        below = next((i for i, name in enumerate(hashes) if name not in self.lower), len(hashes))
        if not below:
            return 0
        self.inc_lock_ref(found.node)
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
            loaded, end = count * self.page_size, found.length + count * self.page_size
            all_pages = np.concatenate([found.pages, pages[:count]])
            super().insert(tokens[:end], all_pages, version=self.version, extra_key=extra_key)
            self._register(pages[:count], hashes[:count], self.version)
            return loaded
        finally:
            self.dec_lock_ref(found.node)

    def _device_pages(self, count: int) -> Int64Array:
        short = count - self.allocator.available_pages
        if short > 0:
            self.evict(short * self.page_size)
        pages = self.allocator.alloc_pages(min(count, self.allocator.available_pages))
        assert pages is not None
        return pages

    def _register(self, pages: Int64Array, hashes: list[bytes], version: int) -> None:
        for page, each in zip(pages.tolist(), hashes, strict=True):
            self._hashes[page] = version, each
        self._hits[pages] = 0

    def _save(self, pages: Int64Array) -> None:
        """Start copying the pages that are of the present version to the host."""
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
        """Write pages that leave the device back where the policy says so."""
        try:
            if self.write_policy == "write_back":
                self._save(np.concatenate([EMPTY, *(node.pages for node in gone)]))
            self.wait_for_copies()
        finally:
            for node in gone:
                for page in node.pages.tolist():
                    self._hashes.pop(page, None)
            super()._release(gone)

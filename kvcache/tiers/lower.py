"""Host and disk as one store of pages by hash: what the host has no room for goes to the disk."""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from kvcache.allocators.base import Int64Array
from kvcache.tiers.disk import DiskTier
from kvcache.tiers.host import HostKVCache, Transfer
from kvcache.tiers.keys import VersionedLRU
from memsaver.errors import BackendError

_log = logging.getLogger("kvcache")


class LowerTiers:
    """Pages below the device, of one weight version at a time. A page may be on the device, on the
    host and on disk at once; each tier evicts on its own, least recently used first.

    A disk that is full or fails costs the pages meant for it: `lost_pages`, `disk_error`.
    """

    def __init__(self, host: HostKVCache, disk: DiskTier | None, version: int) -> None:
        if disk is not None and (disk.version, disk.page_bytes) != (version, host.page_bytes):
            raise ValueError(
                f"the disk tier is for version {disk.version} and pages of {disk.page_bytes} "
                f"bytes, the others for {version} and {host.page_bytes}; make it with theirs"
            )
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
        """Counts the keys that are not on the host."""
        return sum(key not in self._pages for key in keys)

    @property
    def private_pages(self) -> int:
        return len(self._private)

    def take_private(self, wanted: frozenset[bytes]) -> int:
        """A host page of no version; 0 where none can be had without dropping `wanted`."""
        taken = self._take(1, wanted)
        self._private.update(taken.tolist())
        return int(taken[0]) if len(taken) else 0

    def free_private(self, page: int) -> None:
        """Gives it back, also while copies from or to it are under way."""
        self._private.remove(page)
        self.host.allocator.free_pages([page])

    def raise_version(self, version: int) -> None:
        """Makes every page a miss, in O(1)."""
        self._pages.raise_version(version)
        if self.disk is not None:
            self.disk.raise_version(version)

    def save(self, keys: Sequence[bytes], device_pages: Int64Array) -> Transfer | None:
        """Starts copying device pages to the host, as many as there is room for; None: none."""
        new = [i for i, key in enumerate(keys) if self._pages.use(key) is None]
        pages = self._take(len(new), frozenset(keys))
        if not len(pages):
            return None
        new = new[: len(pages)]
        slots = self.host.slots_of
        try:
            transfer = self.host.backup_from_device_all_layer(
                slots(pages), slots(device_pages[new])
            )
        except BaseException:  # such as the device being out of memory
            self.host.allocator.free_pages(pages)
            raise
        for i, page in zip(new, pages.tolist(), strict=True):
            self._pages.add(keys[i], page)
        return transfer

    def load(self, keys: Sequence[bytes], device_pages: Int64Array) -> tuple[int, Transfer | None]:
        """Starts copying pages to the device, up to the first that is missing; how many."""
        wanted = frozenset(keys)
        pages = []
        for key in keys:
            page = self._pages.use(key) or self._from_disk(key, wanted)
            if not page:
                break
            pages.append(page)
        if not pages:
            return 0, None
        slots = self.host.slots_of
        found = np.array(pages, dtype=np.int64)
        return len(pages), self.host.load_to_device(slots(found), slots(device_pages[: len(pages)]))

    def clear(self) -> None:
        """Drops everything but private pages; costs O(pages)."""
        while dropped := self._pages.drop():
            self.host.allocator.free_pages([dropped.value])
        if self.disk is not None:
            self.disk.clear()

    def check_integrity(self) -> None:
        """AssertionError when the host's ledger and the pages that are known here differ."""
        self.host.allocator.check_integrity()
        held = sorted([*self._pages.values(), *self._private])
        every = np.arange(1, self.host.allocator.total_pages + 1)
        owned = every[self.host.allocator.ref_counts(every) > 0]
        assert held == owned.tolist(), "a host page is owned and not known, or the reverse"

    def _from_disk(self, key: bytes, wanted: frozenset[bytes]) -> int:
        """The host page that a page on disk was read into; 0 without one."""
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
        """Up to `count` free host pages; what has to go for them is not among `wanted`."""
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
                _log.warning(
                    "KV page not kept on disk, its tokens will be computed again: %s", error
                )
            self.lost_pages += 1
            self.disk_error = error

"""Page ledgers: which pages of a pool are free, and how many owners each used page has.

With a sliding window, a query at position p sees the keys at (p - window, p]. Pages whose keys no
later query sees are freed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]
Indices = torch.Tensor | npt.NDArray[np.integer] | Sequence[int]
_Length = TypeVar("_Length", int, Int64Array)

# From this size in bytes on, CUDA makes a copy from pageable memory wait for running kernels.
_PINNED_FROM = 1 << 16


class KVAllocator(ABC):
    """Ledger of the pages of one pool, with a reference count per page.

    Pages are numbered 1 to `total_pages`, and a token's slot is `page * page_size + offset`. Page 0
    receives the writes of padded tokens and is never allocated. An allocated page has one owner;
    `share` adds one, `free_pages` drops one, and a page without owners is free again.

    The ledger is on the CPU and outside every memsaver tag, so a pause does not change it. Methods
    do not synchronize with the device unless their docstring says so. A call that returns None or
    raises has changed nothing. Not thread-safe.

    Args:
        size: Tokens in the pool, a positive multiple of `page_size`; page 0 is not counted.
        page_size: Tokens per page.
        device: Device of the pool, where tables of token slots are kept.
    """

    def __init__(self, size: int, page_size: int, device: torch.device | str) -> None:
        whole = page_size >= 1 and size >= page_size and size % page_size == 0
        assert whole, f"size={size} is not a positive multiple of page_size={page_size}"
        self.size = size
        self.page_size = page_size
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.total_pages = size // page_size

    @property
    @abstractmethod
    def available_pages(self) -> int:
        """Return the number of pages that `alloc_pages` can allocate now."""

    @abstractmethod
    def ref_counts(self, pages: Indices) -> Int64Array:
        """Return the number of owners of each page.

        Args:
            pages: Page numbers `[n]`.

        Returns:
            int64 `[n]`; 0 for a free page.
        """

    @abstractmethod
    def alloc_pages(self, count: int) -> Int64Array | None:
        """Allocate `count` pages with one owner each.

        Args:
            count: Number of pages.

        Returns:
            Page numbers, int64 `[count]` on the CPU, or None if fewer pages are free.
        """

    @abstractmethod
    def share(self, pages: Indices) -> None:
        """Add one owner to each page.

        Args:
            pages: Page numbers `[n]` of pages in use; a page listed twice gets two owners.
        """

    @abstractmethod
    def free_pages(self, pages: Indices) -> None:
        """Drop one owner of each page.

        Args:
            pages: Page numbers `[n]`; a page listed twice loses two owners.

        Raises:
            ValueError: A page is listed more often than it has owners (double free).
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if the ledger contradicts itself.

        Valid between any two operations.
        """

    def pages_between(self, prefix: Int64Array, seq: Int64Array) -> Int64Array:
        """Compute the new pages that each request needs, ceil(seq / ps) - ceil(prefix / ps).

        Args:
            prefix: Present lengths in tokens, int64 `[n]`.
            seq: New lengths in tokens, int64 `[n]`.

        Returns:
            New pages per request, int64 `[n]`.
        """
        return -(-seq // self.page_size) + -prefix // self.page_size

    def _valid_pages(self, pages: Indices) -> Int64Array:
        ids = as_int64(pages)
        known = (ids >= 1) & (ids <= self.total_pages)
        assert known.all(), f"pages are 1..{self.total_pages}, got {ids[~known]}"
        return ids


class PagedTokenToKVPoolAllocator(KVAllocator):
    """The ledger of one pool. Allocating or freeing n pages costs O(n log n).

    Args:
        size: Tokens in the pool, a positive multiple of `page_size`; page 0 is not counted.
        page_size: Tokens per page, at least 1.
        device: Device of the pool.
    """

    def __init__(self, size: int, page_size: int, device: torch.device | str) -> None:
        super().__init__(size, page_size, device)
        # A stack of free pages with its top at the end of [:_num_free], filled so that pages are
        # allocated in ascending order.
        self._free = np.arange(self.total_pages, -1, -1, dtype=np.int64)
        self._num_free = self._open_pages = self.total_pages
        self._refs = np.zeros(self.total_pages + 1, dtype=np.int64)

    @property
    def available_pages(self) -> int:
        """Return the number of free pages."""
        return self._num_free

    def limit(self, size: int) -> None:
        """Limit allocation to the pages of the first `size` tokens.

        The owner of an elastic pool calls this when the pool has memory for those tokens only.
        `total_pages` stays the same. No page past the limit may have an owner.

        Args:
            size: Usable tokens, at most the size that the ledger was created with.
        """
        pages = size // self.page_size
        assert 0 <= pages <= self.total_pages, f"the pool was made for 0..{self.size} tokens"
        assert not self._refs[pages + 1 :].any(), "a page past the limit has an owner"
        free = self._free[: self._num_free]
        more = np.arange(pages, self._open_pages, -1, dtype=np.int64)
        left = np.concatenate([more, free[free <= pages]])  # new pages are allocated last
        self._free[: len(left)], self._num_free, self._open_pages = left, len(left), pages

    def owned_past(self, pages: int) -> Int64Array:
        """Find the pages in use after the first `pages` pages.

        Args:
            pages: Number of leading pages to skip.

        Returns:
            Page numbers, int64 `[n]`, ascending.
        """
        return pages + 1 + np.flatnonzero(self._refs[pages + 1 :])

    def lowest_free(self, count: int) -> Int64Array:
        """Find the lowest free pages, without allocating them.

        Args:
            count: Number of pages.

        Returns:
            Page numbers, int64 `[n]`, ascending; fewer than `count` if fewer are free.
        """
        return np.sort(self._free[: self._num_free])[:count]

    def trade(self, owned: Int64Array, free: Int64Array) -> None:
        """Transfer the owners of each page `owned[i]` to page `free[i]`.

        The pages that become free are allocated last.

        Args:
            owned: Pages in use, int64 `[n]`.
            free: Free pages, int64 `[n]`.
        """
        self._refs[free], self._refs[owned] = self._refs[owned], 0
        kept = self._free[: self._num_free]
        left = kept[~np.isin(kept, free)]
        self._free[: self._num_free] = np.concatenate([np.sort(owned)[::-1], left])

    def ref_counts(self, pages: Indices) -> Int64Array:
        """Return the number of owners of each page.

        Args:
            pages: Page numbers `[n]`.

        Returns:
            int64 `[n]`; 0 for a free page.
        """
        return self._refs[self._valid_pages(pages)]

    def next_pages(self, count: int) -> Int64Array | None:
        """Find the pages that `alloc_pages` would allocate, without allocating them.

        Args:
            count: Number of pages.

        Returns:
            Page numbers, int64 `[count]`, or None if fewer pages are free.
        """
        assert count >= 0
        if count > self._num_free:
            return None
        return self._free[self._num_free - count : self._num_free][::-1].copy()

    def alloc_pages(self, count: int) -> Int64Array | None:
        """Allocate `count` pages with one owner each.

        Args:
            count: Number of pages.

        Returns:
            Page numbers, int64 `[count]` on the CPU, or None if fewer pages are free.
        """
        pages = self.next_pages(count)
        if pages is not None:
            self._num_free -= count
            self._refs[pages] = 1
        return pages

    def share(self, pages: Indices) -> None:
        """Add one owner to each page.

        Args:
            pages: Page numbers `[n]` of pages in use; a page listed twice gets two owners.
        """
        ids = self._valid_pages(pages)
        assert self._refs[ids].all(), f"pages {ids[self._refs[ids] == 0]} are free"
        np.add.at(self._refs, ids, 1)

    def free_pages(self, pages: Indices) -> None:
        """Drop one owner of each page.

        Args:
            pages: Page numbers `[n]`; a page listed twice loses two owners.

        Raises:
            ValueError: A page is listed more often than it has owners (double free).
        """
        self.drop(*self.checked_drops(pages))

    def checked_drops(self, pages: Indices) -> tuple[Int64Array, Int64Array]:
        """Count how often each page is listed, and check that it has as many owners.

        Args:
            pages: Page numbers `[n]`.

        Returns:
            The distinct pages, ascending, and how often each is listed, both int64.

        Raises:
            ValueError: A page is listed more often than it has owners (double free).
        """
        distinct, times = np.unique(self._valid_pages(pages), return_counts=True)
        if (short := self._refs[distinct] < times).any():
            raise ValueError(f"double free of pages {distinct[short]}; release each sequence once")
        return distinct, times.astype(np.int64, copy=False)

    def drop(self, pages: Int64Array, times: Int64Array) -> None:
        """Drop owners of pages; never fails for results of `checked_drops`.

        Args:
            pages: Distinct page numbers, int64 `[n]`.
            times: Owners to drop of each page, int64 `[n]`.
        """
        left = self._refs[pages] - times
        self._refs[pages] = left
        freed = pages[left == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)

    def check_integrity(self) -> None:
        """Raise AssertionError if a page is lost, free twice, or free while owned."""
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == len(free), "a page is in the free list twice"
        assert ((free >= 1) & (free <= self._open_pages)).all(), "a free page is outside the pool"
        assert (self._refs >= 0).all(), "a page has a negative number of owners"
        assert self._refs[0] == 0, "the padding page is owned"
        assert (self._refs[free] == 0).all(), "an owned page is in the free list"
        assert int((self._refs > 0).sum()) + len(free) == self._open_pages, "pages were lost"


class SWATokenToKVPoolAllocator(KVAllocator):
    """Ledger of a full pool and a smaller window pool.

    Every allocated page of the full pool has a page of the window pool until its tokens have left
    the window of all of its owners. All page numbers and slots in arguments and results are those
    of the full pool. `full_to_swa_index_mapping[slot]` (int64 `[size + page_size]` on the device, 0
    if unmapped) is the token's slot in the window pool. Operations are atomic over both pools.

    A page never has more window owners than owners. `free_pages` is not told which sequence frees a
    page, so it assumes an owner whose window has passed the page if there is one. A window page can
    thus be kept too long but is never freed too early. A caller whose window still covers the page
    calls `free_swa_pages` first.

    `size` and `size_swa` are the tokens of the full and of the window pool, positive multiples of
    `page_size`. The pools and the mapping are on `device`.
    """

    def __init__(
        self, size: int, size_swa: int, page_size: int, device: torch.device | str
    ) -> None:
        super().__init__(size, page_size, device)
        self.full = PagedTokenToKVPoolAllocator(size, page_size, device)
        self.swa = PagedTokenToKVPoolAllocator(size_swa, page_size, device)
        self.full_to_swa_index_mapping = torch.zeros(
            size + page_size, dtype=torch.int64, device=self.device
        )
        self._slots_by_page = self.full_to_swa_index_mapping.view(-1, page_size)
        self._offsets = torch.arange(page_size, device=self.device)
        # Window page of each full page; 0 if unmapped.
        self._swa_page = np.zeros(self.total_pages + 1, dtype=np.int64)

    @property
    def available_pages(self) -> int:
        return min(self.full.available_pages, self.swa.available_pages)

    def ref_counts(self, pages: Indices) -> Int64Array:
        return self.full.ref_counts(pages)

    def swa_ref_counts(self, pages: Indices) -> Int64Array:
        """Count the window owners of each page; 0 for a page without a window page."""
        window_pages = self._swa_page[self._valid_pages(pages)]
        owners = np.zeros(len(window_pages), dtype=np.int64)
        owners[window_pages > 0] = self.swa.ref_counts(window_pages[window_pages > 0])
        return owners

    def alloc_pages(self, count: int) -> Int64Array | None:
        full, swa = self.full.next_pages(count), self.swa.next_pages(count)
        if full is None or swa is None:
            return None
        if count:  # the device write comes first because only it can fail
            rows, window_pages = to_device(np.stack([full, swa]), self.device)
            slots = window_pages[:, None] * self.page_size + self._offsets
            self._slots_by_page.index_copy_(0, rows, slots)
        self.full.alloc_pages(count)
        self.swa.alloc_pages(count)
        self._swa_page[full] = swa
        return full

    def share(self, pages: Indices) -> None:
        ids = as_int64(pages)
        self.full.share(ids)
        window_pages = self._swa_page[ids]
        self.swa.share(window_pages[window_pages > 0])

    def free_pages(self, pages: Indices) -> None:
        distinct, times = self.full.checked_drops(pages)
        surplus = self.swa_ref_counts(distinct) - (self.full.ref_counts(distinct) - times)
        self._drop_window(distinct, np.maximum(surplus, 0))
        self.full.drop(distinct, times)

    def free_swa_pages(self, pages: Indices) -> None:
        """Drop one window owner of each page; the owners of the full pages stay.

        A page listed twice loses two window owners.
        """
        distinct, times = np.unique(self._valid_pages(pages), return_counts=True)
        assert (self.swa_ref_counts(distinct) >= times).all(), "double free of window slots"
        self._drop_window(distinct, times.astype(np.int64, copy=False))

    def check_integrity(self) -> None:
        """Raise AssertionError unless both ledgers and the mapping agree; synchronizes."""
        self.full.check_integrity()
        self.swa.check_integrity()
        mapped = np.flatnonzero(self._swa_page)
        window_pages = self._swa_page[mapped]
        unique = len(np.unique(window_pages)) == len(window_pages)
        assert unique, "two full pages share a window page"
        all_pages = np.arange(1, self.swa.total_pages + 1)
        owned = all_pages[self.swa.ref_counts(all_pages) > 0]
        same = np.array_equal(np.sort(window_pages), owned)
        assert same, "the owned window pages are not the mapped ones"
        surplus = self.swa.ref_counts(window_pages) - self.full.ref_counts(mapped)
        assert (surplus <= 0).all(), "more window owners than owners"
        expected = np.zeros((self.total_pages + 1, self.page_size), dtype=np.int64)
        expected[mapped] = window_pages[:, None] * self.page_size + np.arange(self.page_size)
        actual = self.full_to_swa_index_mapping.cpu().numpy().reshape(expected.shape)
        assert np.array_equal(actual, expected), "full_to_swa_index_mapping differs from the ledger"

    def _drop_window(self, pages: Int64Array, times: Int64Array) -> None:
        """Drop `times` window owners of each page."""
        pages, times = pages[times > 0], times[times > 0]
        unmapped = pages[self.swa_ref_counts(pages) == times]
        if len(unmapped):  # the device write comes first because only it can fail
            self._slots_by_page.index_fill_(0, to_device(unmapped, self.device), 0)
        self.swa.drop(self._swa_page[pages], times)
        self._swa_page[unmapped] = 0


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The state of one pool's page ledger at a point in time.

    Attributes:
        name: "kv", or "window" for the pool of sliding layers in a model that also has full ones.
        total: Pages of the pool, without the padding page.
        available: Free pages.
        window: Keys that a query of the pool's layers sees; sequences free the pages before them.
            None if sequences keep all their pages until they end.
    """

    name: Literal["kv", "window"]
    total: int
    available: int
    window: int | None


def pages_behind(length: _Length, window: int, page_size: int) -> _Length:
    """Return how many leading pages of `length` computed tokens no later query sees."""
    seen_from = length - window + 1
    return seen_from * (seen_from > 0) // page_size


def pages_across(tokens: int, page_size: int) -> int:
    """Return the largest number of pages over which consecutive tokens can be spread.

    Args:
        tokens: Number of consecutive tokens, at least 1.
        page_size: Tokens per page.

    Returns:
        The number of pages, which is reached if the first token is the last of its page.
    """
    return (tokens + page_size - 2) // page_size + 1


class WindowShares:
    """The pages that each sequence of a `BlockManager` owns, under a sliding window.

    `behind[row]` counts the leading pages that have left the sequence's window; it stays 0 without
    a window. With one ledger, the sequence owns the pages from `behind[row]` on. With two ledgers,
    it owns all its full pages and the window pages from `behind[row]` on.
    """

    def __init__(self, allocator: KVAllocator, rows: int, window: int | None) -> None:
        self._two = allocator if isinstance(allocator, SWATokenToKVPoolAllocator) else None
        assert window or not self._two, "two ledgers need a window"
        self.allocator = allocator
        self.window = window
        self.behind = np.zeros(rows, dtype=np.int64)

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        if not self._two:
            return (self._ledger("kv", self.allocator, self.window),)
        full, swa = self._two.full, self._two.swa
        return (self._ledger("kv", full, None), self._ledger("window", swa, self.window))

    @staticmethod
    def _ledger(name: Literal["kv", "window"], pages: KVAllocator, window: int | None) -> Ledger:
        total, available = pages.total_pages, pages.available_pages
        return Ledger(name=name, total=total, available=available, window=window)

    def first_held(self, row: int) -> int:
        """Return the index of a sequence's first page in the (full) pool that it still owns."""
        return 0 if self._two else int(self.behind[row])

    def fork(self, parent: int, child: int, pages: Int64Array) -> None:
        """Add `child` as an owner of all pages that `parent` owns."""
        self.allocator.share(pages[self.first_held(parent) :])
        # Sharing a page also shares its window page if a third sequence still sees it; the child
        # does not see it.
        if self._two:
            gone = pages[: self.behind[parent]]
            self._two.free_swa_pages(gone[self._two.swa_ref_counts(gone) > 0])
        self.behind[child] = self.behind[parent]

    def free(self, row: int, pages: Int64Array) -> None:
        """Drop a sequence from the owners of `pages`, all the pages of its tokens."""
        behind = self.behind[row]
        self.free_seen(pages[behind:])
        if self._two:
            self.allocator.free_pages(pages[:behind])

    def free_seen(self, pages: Int64Array) -> None:
        """Drop one owner of each page, an owner whose window covers the pages."""
        if not len(pages):
            return
        if self._two:
            # free_pages alone would assume an owner whose window has passed the page.
            self._two.free_swa_pages(pages)
        self.allocator.free_pages(pages)

    def leave(self, rows: Int64Array, until: Int64Array, table: Int64Array) -> None:
        """Drop sequences from the (window) owners of `table[rows, :until]`, their first pages."""
        moved = until > self.behind[rows]
        if not moved.any():
            return
        rows, until = rows[moved], until[moved]
        spans = zip(rows, self.behind[rows], until, strict=True)
        pages = np.concatenate([table[row, start:stop] for row, start, stop in spans])
        (self._two.free_swa_pages if self._two else self.allocator.free_pages)(pages)
        self.behind[rows] = until

    def check_integrity(self, tables: Sequence[tuple[int, Int64Array]], cached: Int64Array) -> None:
        """Raise AssertionError unless the ledger counts exactly the owners of each page.

        `tables` lists the row and the pages of every sequence. A prefix cache owns the pages
        `cached`.
        """
        owners, window_owners = np.zeros((2, self.allocator.total_pages + 1), dtype=np.int64)
        owners[cached] += 1
        for row, pages in tables:
            owners[pages[self.first_held(row) :]] += 1
            window_owners[pages[self.behind[row] :]] += 1
        all_pages = np.arange(1, self.allocator.total_pages + 1)
        same = owners[1:] == self.allocator.ref_counts(all_pages)
        assert same.all(), "the ledger counts other owners than there are"
        if self._two:
            same = window_owners[1:] == self._two.swa_ref_counts(all_pages)
            assert same.all(), "the ledger counts other window owners than there are"
        idle = np.setdiff1d(np.arange(len(self.behind)), [row for row, _ in tables])
        assert not self.behind[idle].any(), "a row without tokens has pages behind its window"


def as_int64(values: Indices) -> Int64Array:
    """Convert indices on the CPU to an int64 array `[n]`."""
    array = values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    integers = array.ndim == 1 and (not array.size or np.issubdtype(array.dtype, np.integer))
    assert integers, f"indices are integers [n], got {array.dtype} {array.shape}"
    return array.astype(np.int64, copy=False)


def to_device(array: Int64Array, device: torch.device) -> torch.Tensor:
    """Copy an array to the device without waiting.

    On a GPU, the caller may change the array right away. On the CPU, the tensor shares its memory.
    """
    host = torch.from_numpy(array)
    if device.type == "cuda" and array.nbytes >= _PINNED_FROM:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)

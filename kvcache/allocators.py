"""Ledgers of a pool's pages: which are free, which a request gets next, and who holds which.

With sliding windows a query at p sees keys at (p - window, p]; the pages before are given back.
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

# bytes: from here on a copy from pageable memory waits for the kernels under way
_PINNED_FROM = 1 << 16


class KVAllocator(ABC):
    """Decides who holds which page of a pool; token id = page * page_size + offset.

    Pages are 1 .. total_pages; page 0 takes the writes of padded tokens and is never issued. Every
    issued page has a count of owners: 1 when issued, +1 for each `share`, -1 for each
    `free_pages`, available again at 0. The ledger is on the CPU and outside every memsaver tag:
    nothing here synchronizes unless it says so, and a pause changes nothing.

    A call that returns None (pages are short) or raises has changed nothing.
    """

    def __init__(self, size: int, page_size: int, device: torch.device | str) -> None:
        whole = page_size >= 1 and size >= page_size and size % page_size == 0
        assert whole, f"size={size} is no positive multiple of page_size={page_size}"
        self.size = size
        self.page_size = page_size
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.total_pages = size // page_size

    @property
    @abstractmethod
    def available_pages(self) -> int:
        """Return how many pages `alloc_pages` can hand out now."""

    @abstractmethod
    def ref_counts(self, pages: Indices) -> Int64Array:
        """Return the number of owners of each page, int64 `[n]`; 0: free."""

    @abstractmethod
    def alloc_pages(self, count: int) -> Int64Array | None:
        """Take `count` pages with one owner each, int64 on the CPU; None if there are fewer."""

    @abstractmethod
    def share(self, pages: Indices) -> None:
        """Add an owner to each page, two if it is named twice; no page may be free."""

    @abstractmethod
    def free_pages(self, pages: Indices) -> None:
        """Drop one owner of each page named; ValueError (double free) leaves all as it was."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError when the ledger contradicts itself, between any operations."""

    def pages_between(self, prefix: Int64Array, seq: Int64Array) -> Int64Array:
        """Return the new pages of a request that grows: ceil(seq / ps) - ceil(prefix / ps)."""
        return -(-seq // self.page_size) + -prefix // self.page_size

    def _valid_pages(self, pages: Indices) -> Int64Array:
        ids = as_int64(pages)
        known = (ids >= 1) & (ids <= self.total_pages)
        assert known.all(), f"pages are 1..{self.total_pages}, got {ids[~known]}"
        return ids


class PagedTokenToKVPoolAllocator(KVAllocator):
    """Pages of any size >= 1 of one pool. Taking and freeing n of them costs O(n log n)."""

    def __init__(self, size: int, page_size: int, device: torch.device | str) -> None:
        super().__init__(size, page_size, device)
        # a stack of free pages, its top is the end of [:_num_free]; filled so that pages go out in
        # ascending order
        self._free = np.arange(self.total_pages, -1, -1, dtype=np.int64)
        self._num_free = self._open_pages = self.total_pages
        self._refs = np.zeros(self.total_pages + 1, dtype=np.int64)

    @property
    def available_pages(self) -> int:
        return self._num_free

    def limit(self, size: int) -> None:
        """Hand out pages of the first `size` tokens only, all that an elastic pool has memory
        behind now; `total_pages` stays. No later page may have an owner.
        """
        pages = size // self.page_size
        assert 0 <= pages <= self.total_pages, f"the pool was made for 0..{self.size} tokens"
        assert not self._refs[pages + 1 :].any(), "a page past the limit has an owner"
        free = self._free[: self._num_free]
        more = np.arange(pages, self._open_pages, -1, dtype=np.int64)
        left = np.concatenate([more, free[free <= pages]])  # new ones go out last
        self._free[: len(left)], self._num_free, self._open_pages = left, len(left), pages

    def owned_past(self, pages: int) -> Int64Array:
        """Return the pages that have an owner and come after the first `pages`, ascending."""
        return pages + 1 + np.flatnonzero(self._refs[pages + 1 :])

    def lowest_free(self, count: int) -> Int64Array:
        """Return the `count` first of the free pages, or all there are, ascending; takes none."""
        return np.sort(self._free[: self._num_free])[:count]

    def trade(self, owned: Int64Array, free: Int64Array) -> None:
        """Give the owners of some pages as many free ones; the pages left go out last."""
        self._refs[free], self._refs[owned] = self._refs[owned], 0
        kept = self._free[: self._num_free]
        left = kept[~np.isin(kept, free)]
        self._free[: self._num_free] = np.concatenate([np.sort(owned)[::-1], left])

    def ref_counts(self, pages: Indices) -> Int64Array:
        return self._refs[self._valid_pages(pages)]

    def next_pages(self, count: int) -> Int64Array | None:
        """Return the pages that `alloc_pages(count)` would give, or None."""
        assert count >= 0
        if count > self._num_free:
            return None
        return self._free[self._num_free - count : self._num_free][::-1].copy()

    def alloc_pages(self, count: int) -> Int64Array | None:
        pages = self.next_pages(count)
        if pages is not None:
            self._num_free -= count
            self._refs[pages] = 1
        return pages

    def share(self, pages: Indices) -> None:
        ids = self._valid_pages(pages)
        assert self._refs[ids].all(), f"pages {ids[self._refs[ids] == 0]} are free"
        np.add.at(self._refs, ids, 1)

    def free_pages(self, pages: Indices) -> None:
        self.drop(*self.checked_drops(pages))

    def checked_drops(self, pages: Indices) -> tuple[Int64Array, Int64Array]:
        """Return the distinct pages, ascending, and how often each is named; ValueError: double
        free.
        """
        distinct, times = np.unique(self._valid_pages(pages), return_counts=True)
        if (short := self._refs[distinct] < times).any():
            raise ValueError(f"double free of pages {distinct[short]}; release each sequence once")
        return distinct, times.astype(np.int64, copy=False)

    def drop(self, pages: Int64Array, times: Int64Array) -> None:
        """Take `times` owners from each page, as `checked_drops` found them; can't fail."""
        left = self._refs[pages] - times
        self._refs[pages] = left
        freed = pages[left == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)

    def check_integrity(self) -> None:
        """Raise AssertionError when a page is lost, twice free, or free while owned."""
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == len(free), "a page is twice in the free list"
        assert ((free >= 1) & (free <= self._open_pages)).all(), "a free page is outside the pool"
        assert (self._refs >= 0).all(), "a page has a negative number of owners"
        assert self._refs[0] == 0, "the padding page is owned"
        assert (self._refs[free] == 0).all(), "an owned page is in the free list"
        assert int((self._refs > 0).sum()) + len(free) == self._open_pages, "pages were lost"


class SWATokenToKVPoolAllocator(KVAllocator):
    """Pages of the full pool, each with a page of the smaller window pool until its tokens have
    left the window.

    All page and token ids that go in and come out are the full pool's.
    `full_to_swa_index_mapping[id]` (int64 `[size + page_size]` on the device, 0 = unmapped) is the
    token's slot in the window pool; the ledger behind it is on the CPU. Every operation is atomic
    over both pools: what one of them can't do leaves the other untouched.

    Window owners never exceed full owners. `free_pages` drops a share that has left the window,
    where there is one, before one that has not: without knowing which sequence asks, a window slot
    may so be kept too long, never too short. A caller that knows calls `free_swa_pages` first.
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
        # window page of each full page, 0 without
        self._swa_page = np.zeros(self.total_pages + 1, dtype=np.int64)

    @property
    def available_pages(self) -> int:
        return min(self.full.available_pages, self.swa.available_pages)

    def ref_counts(self, pages: Indices) -> Int64Array:
        return self.full.ref_counts(pages)

    def swa_ref_counts(self, pages: Indices) -> Int64Array:
        """Return the owners that have each page in their window, int64 `[n]`; 0: no window half."""
        halves = self._swa_page[self._valid_pages(pages)]
        owners = np.zeros(len(halves), dtype=np.int64)
        owners[halves > 0] = self.swa.ref_counts(halves[halves > 0])
        return owners

    def alloc_pages(self, count: int) -> Int64Array | None:
        full, swa = self.full.next_pages(count), self.swa.next_pages(count)
        if full is None or swa is None:
            return None
        if count:  # the device comes first: it alone can fail
            rows, halves = to_device(np.stack([full, swa]), self.device)
            slots = halves[:, None] * self.page_size + self._offsets
            self._slots_by_page.index_copy_(0, rows, slots)
        self.full.alloc_pages(count)
        self.swa.alloc_pages(count)
        self._swa_page[full] = swa
        return full

    def share(self, pages: Indices) -> None:
        ids = as_int64(pages)
        self.full.share(ids)
        halves = self._swa_page[ids]
        self.swa.share(halves[halves > 0])

    def free_pages(self, pages: Indices) -> None:
        distinct, times = self.full.checked_drops(pages)
        surplus = self.swa_ref_counts(distinct) - (self.full.ref_counts(distinct) - times)
        self._drop_window(distinct, np.maximum(surplus, 0))
        self.full.drop(distinct, times)

    def free_swa_pages(self, pages: Indices) -> None:
        """Drop a share of the window half of pages that have left the window of one owner, two of
        a page named twice; the full pages stay.
        """
        distinct, times = np.unique(self._valid_pages(pages), return_counts=True)
        assert (self.swa_ref_counts(distinct) >= times).all(), "double free of window slots"
        self._drop_window(distinct, times.astype(np.int64, copy=False))

    def check_integrity(self) -> None:
        """Raise AssertionError unless ledgers, halves of pages and mapping agree; waits."""
        self.full.check_integrity()
        self.swa.check_integrity()
        mapped = np.flatnonzero(self._swa_page)
        halves = self._swa_page[mapped]
        assert len(np.unique(halves)) == len(halves), "two full pages share a window page"
        every = np.arange(1, self.swa.total_pages + 1)
        owned = every[self.swa.ref_counts(every) > 0]
        assert np.array_equal(np.sort(halves), owned), "owned window pages are not the mapped ones"
        surplus = self.swa.ref_counts(halves) - self.full.ref_counts(mapped)
        assert (surplus <= 0).all(), "more window owners than owners"
        expected = np.zeros((self.total_pages + 1, self.page_size), dtype=np.int64)
        expected[mapped] = halves[:, None] * self.page_size + np.arange(self.page_size)
        actual = self.full_to_swa_index_mapping.cpu().numpy().reshape(expected.shape)
        assert np.array_equal(actual, expected), "full_to_swa_index_mapping differs from the ledger"

    def _drop_window(self, pages: Int64Array, times: Int64Array) -> None:
        """Take `times` window owners from each page; the device write, which may fail, first."""
        pages, times = pages[times > 0], times[times > 0]
        unmapped = pages[self.swa_ref_counts(pages) == times]
        if len(unmapped):
            self._slots_by_page.index_fill_(0, to_device(unmapped, self.device), 0)
        self.swa.drop(self._swa_page[pages], times)
        self._swa_page[unmapped] = 0


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Pages of one pool. window: keys that its layers see at a time, so that sequences give back
    what lies behind; None: a sequence holds all its pages as long as it lives.
    """

    name: Literal["kv", "window"]
    total: int
    available: int
    window: int | None


def pages_behind(length: _Length, window: int, page_size: int) -> _Length:
    """Count the leading pages of `length` computed tokens that no later query sees."""
    seen_from = length - window + 1
    return seen_from * (seen_from > 0) // page_size


def pages_across(tokens: int, page_size: int) -> int:
    """Return the most pages that `tokens` (at least one) neighbouring tokens touch."""
    return (tokens + page_size - 2) // page_size + 1


class WindowShares:
    """Tracks which pages each sequence holds. `behind[row]` counts those that left its window.

    With two ledgers a sequence holds the window half of the pages from there on, and the full half
    of every page; with one it holds the pages from there on. Without a window `behind` stays 0.
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
        """Return the first page of a sequence whose slots it holds, in the full pool of two."""
        return 0 if self._two else int(self.behind[row])

    def fork(self, parent: int, child: int, pages: Int64Array) -> None:
        """Let `child` share what `parent` holds of its pages."""
        self.allocator.share(pages[self.first_held(parent) :])
        # who shares a page gets a share of its window half, too, if a third sequence still sees it
        if self._two:
            gone = pages[: self.behind[parent]]
            self._two.free_swa_pages(gone[self._two.swa_ref_counts(gone) > 0])
        self.behind[child] = self.behind[parent]

    def free(self, row: int, pages: Int64Array) -> None:
        """Drop what a sequence holds of `pages`, all its pages."""
        seen = pages[self.behind[row] :]
        self.free_seen(seen)
        if self._two:
            self.allocator.free_pages(pages[: len(pages) - len(seen)])

    def free_seen(self, pages: Int64Array) -> None:
        """Drop one share of each page, all in the window of the sequence that leaves."""
        if not len(pages):
            return
        if self._two:
            # the ledger can't know whose window it is in: see its docstring
            self._two.free_swa_pages(pages)
        self.allocator.free_pages(pages)

    def leave(self, rows: Int64Array, until: Int64Array, table: Int64Array) -> None:
        """Drop what sequences hold of their first `until` pages, found in `table[rows]`."""
        moved = until > self.behind[rows]
        if not moved.any():
            return
        rows, until = rows[moved], until[moved]
        spans = zip(rows, self.behind[rows], until, strict=True)
        pages = np.concatenate([table[row, start:stop] for row, start, stop in spans])
        (self._two.free_swa_pages if self._two else self.allocator.free_pages)(pages)
        self.behind[rows] = until

    def check_integrity(self, tables: Sequence[tuple[int, Int64Array]], cached: Int64Array) -> None:
        """Raise AssertionError unless each page's owners are the sequences (row, pages) and the
        cache that hold it.
        """
        owners, seen = np.zeros((2, self.allocator.total_pages + 1), dtype=np.int64)
        owners[cached] += 1
        for row, pages in tables:
            owners[pages[self.first_held(row) :]] += 1
            seen[pages[self.behind[row] :]] += 1
        every = np.arange(1, self.allocator.total_pages + 1)
        assert (owners[1:] == self.allocator.ref_counts(every)).all(), "owners hold other pages"
        if self._two:
            assert (seen[1:] == self._two.swa_ref_counts(every)).all(), "owners see other pages"
        idle = np.setdiff1d(np.arange(len(self.behind)), [row for row, _ in tables])
        assert not self.behind[idle].any(), "a row without tokens has pages behind its window"


def as_int64(values: Indices) -> Int64Array:
    """Return indices on the CPU as int64 `[n]`."""
    array = values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    integers = array.ndim == 1 and (not array.size or np.issubdtype(array.dtype, np.integer))
    assert integers, f"indices are integers [n], got {array.dtype} {array.shape}"
    return array.astype(np.int64, copy=False)


def to_device(array: Int64Array, device: torch.device) -> torch.Tensor:
    """Copy the array to the device without a wait; the caller may change it immediately."""
    host = torch.from_numpy(array)
    if device.type == "cuda" and array.nbytes >= _PINNED_FROM:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)

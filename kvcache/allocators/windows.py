"""Sliding windows: a query at p sees keys at (p - window, p]; the rest is given back.

The ledger of a full and a window pool, and who holds which pages of one ledger or of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

from kvcache.allocators.paged import (
    Indices,
    Int64Array,
    KVAllocator,
    PagedTokenToKVPoolAllocator,
    as_int64,
    to_device,
)

_Length = TypeVar("_Length", int, Int64Array)


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
        self._offsets = torch.arange(page_size, device=self.device)
        # window page of each full page, 0 without
        self._swa_page = np.zeros(self.total_pages + 1, dtype=np.int64)

    @property
    def available_pages(self) -> int:
        return min(self.full.available_pages, self.swa.available_pages)

    def ref_counts(self, pages: Indices) -> Int64Array:
        return self.full.ref_counts(pages)

    def swa_ref_counts(self, pages: Indices) -> Int64Array:
        """Owners of pages that have them in their window, int64 `[n]`; 0: no window half."""
        return self._window_owners(self._valid_pages(pages))

    def alloc_pages(self, count: int) -> Int64Array | None:
        full, swa = self.full.next_pages(count), self.swa.next_pages(count)
        if full is None or swa is None:
            return None
        self._map(full, swa)  # first, because the device alone can fail
        self.full.alloc_pages(count)
        self.swa.alloc_pages(count)
        self._swa_page[full] = swa
        return full

    def share(self, pages: Indices) -> None:
        ids = as_int64(pages, "pages")
        self.full.share(ids)
        halves = self._swa_page[ids]
        self.swa.share(halves[halves > 0])

    def free_pages(self, pages: Indices) -> None:
        distinct, times = self.full.checked_drops(pages)
        surplus = self._window_owners(distinct) - (self.full.ref_counts(distinct) - times)
        self._drop_window(distinct, np.maximum(surplus, 0))
        self.full.drop(distinct, times)

    def free_swa_pages(self, pages: Indices) -> None:
        """Pages have left the window of one owner: drops its share of their window halves, two of a
        page named twice; the full pages stay. ValueError (double free) leaves all as it was.
        """
        distinct, times = np.unique(self._valid_pages(pages), return_counts=True)
        owners = self._window_owners(distinct)
        if (owners < times).any():
            i = int((owners < times).argmax())
            raise ValueError(
                f"double free of the window slots of page {distinct[i]}: "
                f"{owners[i]} owner(s) have it in their window, fewer than are dropped; "
                "free each page once after it left the window"
            )
        self._drop_window(distinct, times.astype(np.int64, copy=False))

    def check_integrity(self) -> None:
        """Raises AssertionError unless ledgers, halves of pages and mapping agree; waits."""
        self.full.check_integrity()
        self.swa.check_integrity()
        mapped = np.flatnonzero(self._swa_page)
        halves = self._swa_page[mapped]
        assert len(np.unique(halves)) == len(halves), "two full pages share a window page"
        every = np.arange(1, self.swa.total_pages + 1)
        owned = every[self.swa.ref_counts(every) > 0]
        assert np.array_equal(np.sort(halves), owned), (
            "a window page is owned without a full page, or the reverse"
        )
        assert (self.swa.ref_counts(halves) <= self.full.ref_counts(mapped)).all(), (
            "more window owners than owners"
        )
        expected = np.zeros((self.total_pages + 1, self.page_size), dtype=np.int64)
        expected[mapped] = halves[:, None] * self.page_size + np.arange(self.page_size)
        actual = self.full_to_swa_index_mapping.cpu().numpy().reshape(expected.shape)
        assert np.array_equal(actual, expected), "full_to_swa_index_mapping differs from the ledger"

    def _window_owners(self, pages: Int64Array) -> Int64Array:
        halves = self._swa_page[pages]
        owners = np.zeros(len(pages), dtype=np.int64)
        owners[halves > 0] = self.swa.ref_counts(halves[halves > 0])
        return owners

    def _drop_window(self, pages: Int64Array, times: Int64Array) -> None:
        """Takes `times` window owners from each page; the device write, which may fail, first."""
        pages, times = pages[times > 0], times[times > 0]
        unmapped = pages[self._window_owners(pages) == times]
        self._unmap(unmapped)
        self.swa.drop(self._swa_page[pages], times)
        self._swa_page[unmapped] = 0

    def _map(self, full: Int64Array, swa: Int64Array) -> None:
        if len(full):
            rows, halves = to_device(np.stack([full, swa]), self.device)
            slots = halves[:, None] * self.page_size + self._offsets
            self.full_to_swa_index_mapping.view(-1, self.page_size).index_copy_(0, rows, slots)

    def _unmap(self, pages: Int64Array) -> None:
        """Clear the mapping of pages without a window half."""
        if len(pages):
            rows = to_device(pages, self.device)
            self.full_to_swa_index_mapping.view(-1, self.page_size).index_fill_(0, rows, 0)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Pages of one pool. window: keys that its layers see at a time, so that sequences give back
    what lies behind;
    None: a sequence holds all its pages as long as it lives.
    """

    name: Literal["kv", "window"]
    total: int
    available: int
    window: int | None


def pages_behind(length: _Length, window: int, page_size: int) -> _Length:
    """Leading pages of a sequence of `length` computed tokens that no later query sees."""
    seen_from = length - window + 1
    return seen_from * (seen_from > 0) // page_size


def pages_across(tokens: int, page_size: int) -> int:
    """Pages that so many (at least one) neighbouring tokens touch at most."""
    return (tokens + page_size - 2) // page_size + 1


class WindowShares:
    """Tracks which pages each sequence holds. `behind[row]` counts those that left its window.

    With two ledgers a sequence holds the window half of the pages from there on, and the full half
    of every page; with one it holds the pages from there on. Without a window `behind` stays 0, and
    a caller of an allocator with two ledgers frees window halves itself.
    """

    def __init__(self, allocator: KVAllocator, rows: int, window: int | None) -> None:
        assert window is None or window >= 1
        self.allocator = allocator
        self.window = window
        self.behind = np.zeros(rows, dtype=np.int64)
        self._two: SWATokenToKVPoolAllocator | None = None
        if window is not None and isinstance(allocator, SWATokenToKVPoolAllocator):
            self._two = allocator

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        if isinstance(self.allocator, SWATokenToKVPoolAllocator):
            full, swa = self.allocator.full, self.allocator.swa
            return (_ledger("kv", full, None), _ledger("window", swa, self.window))
        return (_ledger("kv", self.allocator, self.window),)

    def first_held(self, row: int) -> int:
        """The first page of a sequence whose slots it holds, in the full pool of two."""
        return 0 if self._two else int(self.behind[row])

    def fork(self, parent: int, child: int, pages: Int64Array) -> None:
        """`child` shares what `parent` holds of its pages."""
        self.allocator.share(pages[self.first_held(parent) :])
        # who shares a page gets a share of its window half, too, if a third sequence still sees it
        if self._two:
            gone = pages[: self.behind[parent]]
            self._two.free_swa_pages(gone[self._two.swa_ref_counts(gone) > 0])
        self.behind[child] = self.behind[parent]

    def free(self, row: int, pages: Int64Array) -> None:
        """Drops what a sequence holds of `pages`, all its pages."""
        seen = pages[self.behind[row] :]
        self.free_seen(seen)
        if self._two:
            self.allocator.free_pages(pages[: len(pages) - len(seen)])

    def free_seen(self, pages: Int64Array) -> None:
        """Drops one share of each page, all in the window of the sequence that leaves."""
        if not len(pages):
            return
        if self._two:
            # the ledger can't know whose window it is in: see its docstring
            self._two.free_swa_pages(pages)
        self.allocator.free_pages(pages)

    def leave(self, rows: Int64Array, until: Int64Array, table: Int64Array) -> None:
        """Drops what sequences hold of their first `until` pages, found in `table[rows]`."""
        moved = until > self.behind[rows]
        if not moved.any():
            return
        rows, until = rows[moved], until[moved]
        pages = np.concatenate(
            [table[row, self.behind[row] : stop] for row, stop in zip(rows, until, strict=True)]
        )
        if self._two:
            self._two.free_swa_pages(pages)
        else:
            self.allocator.free_pages(pages)
        self.behind[rows] = until

    def check_integrity(self, tables: Sequence[tuple[int, Int64Array]], cached: Int64Array) -> None:
        """AssertionError unless owners are counted as sequences (row, pages) and a cache hold."""
        owners, seen = np.zeros((2, self.allocator.total_pages + 1), dtype=np.int64)
        owners[cached] += 1
        for row, pages in tables:
            owners[pages[self.first_held(row) :]] += 1
            seen[pages[self.behind[row] :]] += 1
        every = np.arange(1, self.allocator.total_pages + 1)
        counts = self.allocator.ref_counts(every)
        assert (owners[1:] == counts).all(), (
            "reference counts differ from the sequences that hold the pages"
        )
        if self._two:
            halves = self._two.swa_ref_counts(every)
            assert (seen[1:] == halves).all(), (
                "window owners differ from the sequences that see the pages"
            )
        idle = np.setdiff1d(np.arange(len(self.behind)), [row for row, _ in tables])
        assert not self.behind[idle].any(), "a row without tokens has pages behind its window"


def _ledger(name: Literal["kv", "window"], allocator: KVAllocator, window: int | None) -> Ledger:
    return Ledger(
        name=name, total=allocator.total_pages, available=allocator.available_pages, window=window
    )

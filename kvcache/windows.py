"""Sliding windows: a query at p sees keys at (p - window, p]; the rest is given back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from kvcache.allocators.base import Int64Array, KVAllocator
from kvcache.allocators.paged import SWATokenToKVPoolAllocator

_Length = TypeVar("_Length", int, Int64Array)


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
        if window is not None and window < 1:
            raise ValueError(f"window={window} must be at least 1 token, or None for no window")
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

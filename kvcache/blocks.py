"""Block tables: sequences as lists of pages, with sharing, forks and copy-on-write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvcache.allocators import (
    Int64Array,
    KVAllocator,
    Ledger,
    PagedTokenToKVPoolAllocator,
    WindowShares,
    as_int64,
    pages_behind,
    to_device,
)
from kvcache.pools import KVPool
from kvcache.request_tables import ReqHandle, ReqToTokenPool

NO_PAGES: Int64Array = np.empty(0, dtype=np.int64)
_MOVED = 32  # pages per copy of `compact`, which bounds the temporary memory of a copy


@dataclass(frozen=True, kw_only=True)
class _Growth:
    """A planned `extend` of n sequences. All fields but `copied` are `[n]`."""

    rows: Int64Array  # rows of the request table
    old: Int64Array  # present lengths in tokens
    new: Int64Array  # new lengths in tokens
    # Position of the first new slot: the old length, or the start of the last page if that page is
    # shared and has to be copied. The copy thus counts as a new page.
    start: Int64Array
    copied: Int64Array  # shared pages to copy, in the order of the sequences


class BlockManager:
    """Block tables of the sequences in one pool.

    The manager computes everything on the CPU, down to the slot of each token. An `extend` issues
    one transfer and one table write on the device. If it writes to shared pages, it issues one
    further transfer and one copy.

    A page may belong to several sequences (`fork`). Writing to a page with more than one owner
    copies that page first; the last owner writes in place. Only the last, partial page of a
    sequence is ever written to. The manager must be the only one to allocate sequences' pages from
    its ledger and rows from its request table. Not thread-safe.

    Args:
        req_to_token: Request table, on the same device as `allocator`.
        allocator: Page ledger of the pool.
        pool: Pool whose rows are copied when a shared page is written to.
        window: Keys that a sliding layer sees, or None. With a window, `slide` frees the pages that
            no later query sees, or only their window pages if the allocator has two ledgers.
            Required for an allocator with two ledgers.
    """

    def __init__(
        self,
        req_to_token: ReqToTokenPool,
        allocator: KVAllocator,
        pool: KVPool,
        window: int | None = None,
    ) -> None:
        here, there = allocator.device, req_to_token.device
        assert here == there, f"the ledger is for {here}, req_to_token on {there}"
        self.req_to_token = req_to_token
        self.allocator = allocator
        self.pool = pool
        self.page_size = allocator.page_size
        max_pages = -(-req_to_token.max_context_len // self.page_size)
        self._pages = np.zeros((req_to_token.size + 1, max_pages), dtype=np.int64)
        self._lens = np.zeros(req_to_token.size + 1, dtype=np.int64)
        # Whether a row's partial page may have other owners.
        self._forked = np.zeros(req_to_token.size + 1, dtype=np.bool_)
        self._shares = WindowShares(allocator, req_to_token.size + 1, window)

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """Return the number of pages, total and free, of each pool."""
        return self._shares.ledgers

    @property
    def total_pages(self) -> int:
        """Return the number of pages of the pool."""
        return self.allocator.total_pages

    @property
    def available_pages(self) -> int:
        """Return the number of pages that can be allocated."""
        return self.allocator.available_pages

    def seq_len(self, handle: ReqHandle) -> int:
        """Return the number of tokens of a sequence.

        Args:
            handle: A live sequence.

        Returns:
            Its length in tokens.

        Raises:
            ValueError: The handle is stale.
        """
        return int(self._lens[self.req_to_token.row(handle)])

    def admit(self, pages: Int64Array = NO_PAGES) -> ReqHandle | None:
        """Start a sequence, empty or with the tokens of whole pages.

        Args:
            pages: Pages that the sequence begins with and shares, in order, for example
                `PrefixMatch.pages`. Must be empty if the manager has a window.

        Returns:
            The handle of the sequence, or None if the request table can't allocate a row.
        """
        assert not len(pages) or self._shares.window is None, "a windowed sequence begins empty"
        handle = self.req_to_token.alloc()
        if handle is None:
            return None
        try:
            self._begin_with(handle.row, pages)
        except BaseException:  # for example, the device is out of memory
            self.req_to_token.free(handle)
            raise
        return handle

    def fork(self, handle: ReqHandle) -> ReqHandle | None:
        """Start a sequence with the tokens of another, sharing all of its pages.

        Recurrent states in the request table are copied and must be those after the last token.

        Args:
            handle: The sequence to fork.

        Returns:
            The handle of the new sequence, or None if the request table can't allocate a row.

        Raises:
            ValueError: The handle is stale.
        """
        parent = self.req_to_token.row(handle)
        child = self.admit()
        if child is None:
            return None
        length, table = int(self._lens[parent]), self.req_to_token
        try:
            table.copy_states(child, handle)
            table.write((child.row, slice(0, length)), table.req_to_token[parent, :length])
        except BaseException:  # for example, the device is out of memory
            table.free(child)
            raise
        pages = self._row_pages(parent)
        self._shares.fork(parent, child.row, pages)
        self._pages[child.row, : len(pages)] = pages
        self._lens[child.row] = length
        self._forked[[parent, child.row]] = True
        return child

    def pages(self, handle: ReqHandle) -> Int64Array:
        """Return the pages of a sequence, including a partial last page.

        With a window, the leading pages may have been freed already.

        Args:
            handle: A live sequence.

        Returns:
            Page numbers, int64 `[ceil(length / page_size)]`, a copy.

        Raises:
            ValueError: The handle is stale.
        """
        return self._row_pages(self.req_to_token.row(handle)).copy()

    def release(self, handle: ReqHandle) -> None:
        """End a sequence: drop it from the owners of its pages and make the handle stale.

        Args:
            handle: The sequence to end.

        Raises:
            ValueError: The handle is stale.
        """
        row = self.req_to_token.row(handle)
        self._shares.free(row, self._row_pages(row))
        self._lens[row] = self._shares.behind[row] = 0
        self.req_to_token.free(handle)

    def slide(self, rows: Int64Array) -> None:
        """Free pages that have left the window of each sequence; do nothing without a window.

        Args:
            rows: Rows of live sequences whose tokens have all been computed, int64 `[n]`.
        """
        window = self._shares.window
        if window is not None:
            behind = pages_behind(self._lens[rows], window, self.page_size)
            self._shares.leave(rows, behind, self._pages)

    def token_ids(self, handle: ReqHandle, start: int, stop: int) -> Int64Array:
        """Return the slots of positions [start, stop) of a sequence.

        Args:
            handle: A live sequence.
            start: First position. With a window, its page must not have been freed.
            stop: Position after the last, at most the sequence's length.

        Returns:
            Slots, int64 `[stop - start]` on the CPU.

        Raises:
            ValueError: The handle is stale.
        """
        row = self.req_to_token.row(handle)
        first = self._shares.first_held(row) * self.page_size
        held = start == stop or start >= first
        inside = held and 0 <= start <= stop <= self._lens[row]
        assert inside, f"{handle} holds [{first}, {self._lens[row]}), asked for [{start}, {stop})"
        return self._slots(row, np.arange(start, stop))

    def pages_needed(self, rows: Int64Array, new_lens: Int64Array) -> int:
        """Return the number of pages that `grow` with the same arguments would allocate.

        Args:
            rows: Rows of live sequences to grow, int64 `[n]`.
            new_lens: New length of each sequence in tokens, int64 `[n]`.

        Returns:
            The number of pages, including copies of shared pages.
        """
        growth = self._plan(rows, new_lens)
        return int(self.allocator.pages_between(growth.start, growth.new).sum())

    def extend(self, handles: Sequence[ReqHandle], new_lens: Sequence[int]) -> Tensor | None:
        """Grow sequences by prefill chunks or decode steps and write their slots to the table.

        Args:
            handles: Sequences to grow, each at most once.
            new_lens: New length of each sequence in tokens, at least the present length and at most
                the table's `max_context_len`.

        Returns:
            Slots of the new tokens in the order of `handles`, int64 `[sum(new - old)]` on the
            device; also written to `req_to_token`. None if too few pages are free; nothing has
            changed.

        Raises:
            ValueError: A handle is stale.
        """
        rows = self.req_to_token.rows(handles)
        in_order = np.sort(rows)
        assert (in_order[1:] != in_order[:-1]).all(), "a handle is in the batch twice"
        return self.grow(rows, as_int64(new_lens))

    def grow(self, rows: Int64Array, new_lens: Int64Array) -> Tensor | None:
        """Grow sequences as `extend` does, for a caller that keeps the rows of live handles.

        Args:
            rows: Distinct rows of live sequences, int64 `[n]`.
            new_lens: New length of each sequence in tokens, int64 `[n]`.

        Returns:
            As `extend`.
        """
        growth = self._plan(rows, new_lens)
        counts = self.allocator.pages_between(growth.start, growth.new)
        pages = self.allocator.alloc_pages(int(counts.sum()))
        if pages is None:
            return None
        sequence, number = _expand(counts)
        # Rows and columns of the page table that receive the new pages.
        at = growth.rows[sequence], -(-growth.start[sequence] // self.page_size) + number
        before = self._pages[at]
        self._pages[at] = pages
        try:
            loc = self._fill_device(growth)
        except BaseException:
            # For example, the device is out of memory. Restore the sequences.
            self._pages[at] = before
            self.allocator.free_pages(pages)
            raise
        self._lens[growth.rows] = growth.new
        self._shares.free_seen(growth.copied)
        return loc

    def compact(self, pages: int) -> Int64Array | None:
        """Move all pages in use to the first `pages` pages, so that the pool can shrink to them.

        Needs an allocator with one ledger and no window. No kernel that writes to the sequences'
        slots may be pending.

        Args:
            pages: Number of pages to keep.

        Returns:
            The new number of every page, int64 `[total_pages + 1]`, for `RadixCache.rename`. None
            if the pages in use do not fit; nothing has changed.
        """
        ledger = self.allocator
        assert isinstance(ledger, PagedTokenToKVPoolAllocator) and self._shares.window is None
        renamed, high = np.arange(self.total_pages + 1), ledger.owned_past(pages)
        low = ledger.lowest_free(len(high))
        if len(low) < len(high) or (len(low) and low[-1] > pages):
            return None
        if not len(high):
            return renamed
        renamed[high] = low
        for part in np.array_split(np.stack([low, high]), -(-high.size // _MOVED), axis=1):
            slots = part[..., None] * self.page_size + np.arange(self.page_size)
            self.pool.move_kv_cache(*to_device(slots.reshape(2, -1), ledger.device))
        rows = np.flatnonzero(self._lens)
        lengths, pages_of = self._lens[rows], renamed[self._pages[rows]]
        sequence, positions = _expand(lengths)
        numbers, offsets = np.divmod(positions, self.page_size)
        flat = rows[sequence] * self.req_to_token.max_context_len + positions
        self._write_table(flat, pages_of[sequence, numbers] * self.page_size + offsets)
        self._pages[rows] = pages_of
        ledger.trade(high, low)
        return renamed

    def check_integrity(self, cached: Int64Array = NO_PAGES) -> None:
        """Raise AssertionError unless page tables, reference counts and `req_to_token` agree.

        Valid between any two operations. Copies `req_to_token` to the CPU, which synchronizes.

        Args:
            cached: Pages that a prefix cache owns.
        """
        self.allocator.check_integrity()
        self.req_to_token.check_integrity()
        table = self.req_to_token.req_to_token.cpu().numpy()
        rows = [int(row) for row in np.flatnonzero(self._lens)]
        for row in rows:
            first = self._shares.first_held(row)
            pages = self._row_pages(row)[first:]
            assert (np.diff(np.sort(pages)) > 0).all(), f"row {row} has a page twice: {pages}"
            positions = np.arange(first * self.page_size, self._lens[row])
            if self._lens[row] % self.page_size and not self._forked[row]:
                owners = self.allocator.ref_counts(pages[-1:])[0]
                assert owners == 1, f"row {row} would write to a shared page"
            same = table[row, positions] == self._slots(row, positions)
            assert same.all(), f"req_to_token row {row} differs from its page table"
        self._shares.check_integrity([(row, self._row_pages(row)) for row in rows], cached)

    def _begin_with(self, row: int, pages: Int64Array) -> None:
        """Start an empty sequence with the tokens of whole pages."""
        length = len(pages) * self.page_size
        if length == 0:
            return
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        self.req_to_token.write((row, slice(0, length)), to_device(slots, self.allocator.device))
        self.allocator.share(pages)
        self._pages[row, : len(pages)] = pages
        self._lens[row] = length

    def _row_pages(self, row: int) -> Int64Array:
        return self._pages[row, : -(-int(self._lens[row]) // self.page_size)]

    def _slots(self, rows: int | np.integer | Int64Array, positions: Int64Array) -> Int64Array:
        """Look up the slots of positions in the page table; return int64 of the same shape."""
        pages, offsets = np.divmod(positions, self.page_size)
        return self._pages[rows, pages] * self.page_size + offsets

    def _plan(self, rows: Int64Array, new: Int64Array) -> _Growth:
        assert len(rows) == len(new), "pass one length per sequence"
        old = self._lens[rows]
        grows = (old <= new) & (new <= self.req_to_token.max_context_len)
        assert grows.all(), f"lengths can't go from {old[~grows]} to {new[~grows]}"
        start, copied = self._fresh_start(rows, old, new)
        return _Growth(rows=rows, old=old, new=new, start=start, copied=copied)

    def _fresh_start(
        self, rows: Int64Array, old: Int64Array, new: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return `start` and `copied` of a `_Growth`."""
        if not self._forked[rows].any():  # true in nearly every decode step
            return old, np.empty(0, dtype=np.int64)
        offset = old % self.page_size
        start = old.copy()
        writers = np.flatnonzero((new > old) & (offset > 0))
        pages = self._pages[rows[writers], old[writers] // self.page_size]
        owners = self.allocator.ref_counts(pages)
        self._forked[rows[writers[owners == 1]]] = False
        owners_left: dict[int, int] = {}
        shared = (a[owners > 1].tolist() for a in (writers, pages, owners))
        for i, page, count in zip(*shared, strict=True):
            remaining = owners_left.get(page, count)
            # If this batch holds all owners of a page, the last of them writes in place.
            if remaining > 1:
                start[i] -= offset[i]
                owners_left[page] = remaining - 1
        copying = np.flatnonzero(start < old)
        return start, self._pages[rows[copying], start[copying] // self.page_size]

    def _fill_device(self, growth: _Growth) -> Tensor:
        """Copy shared pages, write new slots to the table and return the new tokens' slots.

        The table write comes last, so that a failure leaves every sequence readable.
        """
        sequence, number = _expand(growth.new - growth.start)
        rows, positions, copies = growth.rows[sequence], growth.start[sequence] + number, 0
        # Slots of copied tokens come first, so that the result is a view of the sent array.
        if len(growth.copied):
            moved = positions < growth.old[sequence]
            order, copies = np.argsort(~moved, kind="stable"), int(moved.sum())
            rows, positions = rows[order], positions[order]
        loc = self._slots(rows, positions)
        if copies:
            # The copied tokens of a sequence begin at offset 0 of a page, so an offset of 0 marks
            # the next sequence.
            offset = positions[:copies] % self.page_size
            source = growth.copied[np.cumsum(offset == 0) - 1] * self.page_size + offset
            target, source = to_device(np.stack([loc[:copies], source]), self.allocator.device)
            self.pool.move_kv_cache(target, source)
        flat = rows * self.req_to_token.max_context_len + positions
        return self._write_table(flat, loc)[copies:]

    def _write_table(self, flat: Int64Array, loc: Int64Array) -> Tensor:
        """Write slots `loc` to flat positions of the table in one launch; return them as int64."""
        n = len(loc)
        if not n:
            return torch.empty(0, dtype=torch.int64, device=self.allocator.device)
        packed = np.empty(2 * n + -(-n // 2), dtype=np.int64)
        packed[:n], packed[n : 2 * n] = flat, loc
        # The table is int32. Converting on the CPU saves a kernel launch.
        packed[2 * n :].view(np.int32)[:n] = loc
        sent = to_device(packed, self.allocator.device)
        self.req_to_token.write_flat(sent[:n], sent[2 * n :].view(torch.int32)[:n])
        return sent[n : 2 * n]


def _expand(counts: Int64Array) -> tuple[Int64Array | slice, Int64Array | Literal[0]]:
    """Expand counts per sequence to two index arrays: the sequence, and the number within it."""
    if (counts <= 1).all():  # true in nearly every decode step
        return slice(None) if counts.all() else np.flatnonzero(counts), 0
    sequence = np.repeat(np.arange(len(counts)), counts)
    return sequence, np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]

"""Block tables with sharing: sequences as lists of pages, forks, copy on write."""

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
from kvcache.requests import ReqHandle, ReqToTokenPool

NO_PAGES: Int64Array = np.empty(0, dtype=np.int64)
_MOVED = 32  # pages that `compact` copies at once: a copy has memory of its own in between


@dataclass(frozen=True, kw_only=True)
class _Growth:
    """A batch that is to grow. `start` is where its fresh token ids begin: the old length, or the
    beginning of the last page where that page is shared and gets copied, so that the copy counts as
    a new page like any other. `left` are the shared pages that are copied, in request order.
    """

    rows: Int64Array
    old: Int64Array
    new: Int64Array
    start: Int64Array
    left: Int64Array


class BlockManager:
    """Sequences over one pool. All decisions are made on the CPU, token ids included; the device
    sees one transfer and one table write and perhaps one page copy an `extend`.

    A page may belong to several sequences (`fork`). Writing into a page with more than one owner
    copies exactly that page first; the last owner writes in place. Only the last, partial page of a
    sequence can ever be written to. Nobody else allocates from its ledger and table.

    window: keys that a sliding layer sees; `slide` frees pages that no later query sees, or their
    window halves where the allocator has two ledgers, which need a window.
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
        # its partial page may have other owners
        self._forked = np.zeros(req_to_token.size + 1, dtype=np.bool_)
        self._shares = WindowShares(allocator, req_to_token.size + 1, window)

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """Return the pages that there are and that are free, of each pool."""
        return self._shares.ledgers

    @property
    def total_pages(self) -> int:
        return self.allocator.total_pages

    @property
    def available_pages(self) -> int:
        return self.allocator.available_pages

    def seq_len(self, handle: ReqHandle) -> int:
        return int(self._lens[self.req_to_token.row(handle)])

    def admit(self, pages: Int64Array = NO_PAGES) -> ReqHandle | None:
        """Begin a sequence, empty or with the tokens of whole `pages`, which it shares; None when
        all rows of the request table are taken. Sequences with a window begin empty.
        """
        assert not len(pages) or self._shares.window is None, "a window gives pages back"
        handle = self.req_to_token.alloc()
        if handle is None:
            return None
        try:
            self._begin_with(handle.row, pages)
        except BaseException:  # such as the device being out of memory
            self.req_to_token.free(handle)
            raise
        return handle

    def fork(self, handle: ReqHandle) -> ReqHandle | None:
        """Begin a sequence with the same tokens that shares every page; None without a row.

        States in the request table are copied: they must be those after the last token.
        """
        parent = self.req_to_token.row(handle)
        child = self.admit()
        if child is None:
            return None
        length, table = int(self._lens[parent]), self.req_to_token
        try:
            table.copy_states(child, handle)
            table.write((child.row, slice(0, length)), table.req_to_token[parent, :length])
        except BaseException:  # such as the device being out of memory
            table.free(child)
            raise
        pages = self._row_pages(parent)
        self._shares.fork(parent, child.row, pages)
        self._pages[child.row, : len(pages)] = pages
        self._lens[child.row] = length
        self._forked[[parent, child.row]] = True
        return child

    def pages(self, handle: ReqHandle) -> Int64Array:
        """Return the pages of a sequence, a partial last one included; not all are its own."""
        return self._row_pages(self.req_to_token.row(handle)).copy()

    def release(self, handle: ReqHandle) -> None:
        """End a sequence: drop its share of each page and make the handle stale."""
        row = self.req_to_token.row(handle)
        self._shares.free(row, self._row_pages(row))
        self._lens[row] = self._shares.behind[row] = 0
        self.req_to_token.free(handle)

    def slide(self, handles: Sequence[ReqHandle]) -> None:
        """Drop the sequences' shares of what left the window; all their tokens are computed."""
        window = self._shares.window
        if window is not None:
            rows = self.req_to_token.rows(handles)
            behind = pages_behind(self._lens[rows], window, self.page_size)
            self._shares.leave(rows, behind, self._pages)

    def token_ids(self, handle: ReqHandle, start: int, stop: int) -> Int64Array:
        """Return the slots of positions [start, stop) of a sequence, int64 on the CPU. It has these
        positions, and has not given them back.
        """
        row = self.req_to_token.row(handle)
        first = self._shares.first_held(row) * self.page_size
        held = start == stop or start >= first
        inside = held and 0 <= start <= stop <= self._lens[row]
        assert inside, f"{handle} holds [{first}, {self._lens[row]}), asked for [{start}, {stop})"
        return self._slots(row, np.arange(start, stop))

    def pages_needed(self, handles: Sequence[ReqHandle], new_lens: Sequence[int]) -> int:
        """Return the pages that this `extend` would take, copies of shared pages included."""
        growth = self._plan(handles, new_lens)
        return int(self.allocator.pages_between(growth.start, growth.new).sum())

    def extend(self, handles: Sequence[ReqHandle], new_lens: Sequence[int]) -> Tensor | None:
        """Grow sequences, by prefill chunks and decode steps alike, to `new_lens` tokens.

        Return the pool slots of the new tokens, int64 `[sum(new - old)]` on the device in the order
        of `handles`, and write them to `req_to_token`. None when pages are short: nothing changed.
        Raise ValueError for a stale handle. Each handle is named once, lengths only grow, to
        `max_context_len` at most.
        """
        growth = self._plan(handles, new_lens)
        counts = self.allocator.pages_between(growth.start, growth.new)
        pages = self.allocator.alloc_pages(int(counts.sum()))
        if pages is None:
            return None
        which, nth = _spread(counts)
        # where the new pages go: rows and columns of the page table
        at = growth.rows[which], -(-growth.start[which] // self.page_size) + nth
        before = self._pages[at]
        self._pages[at] = pages
        try:
            loc = self._fill_device(growth)
        except BaseException:
            # such as the device being out of memory: the sequences stay as they were
            self._pages[at] = before
            self.allocator.free_pages(pages)
            raise
        self._lens[growth.rows] = growth.new
        self._shares.free_seen(growth.left)
        return loc

    def compact(self, pages: int) -> Int64Array | None:
        """Move all that has an owner to the first `pages` pages, tokens included, so that none
        after them has one: for a pool that is to end there.

        Return the new number of every page, int64 `[total_pages + 1]`, by which a prefix cache
        renames its own; None, with nothing changed, where there is no room. For one ledger, and
        sequences without a window; nothing may be about to write to their slots.
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
        which = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        numbers, offsets = np.divmod(positions, self.page_size)
        flat = rows[which] * self.req_to_token.max_context_len + positions
        self._write_table(flat, pages_of[which, numbers] * self.page_size + offsets)
        self._pages[rows] = pages_of
        ledger.trade(high, low)
        return renamed

    def check_integrity(self, cached: Int64Array = NO_PAGES) -> None:
        """Raise AssertionError unless page tables, reference counts and `req_to_token` agree.

        cached: pages that a prefix cache owns besides. Reads `req_to_token` back, so it
        synchronises. May be called between any two operations.
        """
        self.allocator.check_integrity()
        self.req_to_token.check_integrity()
        table = self.req_to_token.req_to_token.cpu().numpy()
        rows = [int(row) for row in np.flatnonzero(self._lens)]
        for row in rows:
            first = self._shares.first_held(row)
            pages = self._row_pages(row)[first:]
            assert (np.diff(np.sort(pages)) > 0).all(), f"row {row} holds a page twice: {pages}"
            positions = np.arange(first * self.page_size, self._lens[row])
            if self._lens[row] % self.page_size and not self._forked[row]:
                owners = self.allocator.ref_counts(pages[-1:])[0]
                assert owners == 1, f"row {row} would write to a shared page"
            same = table[row, positions] == self._slots(row, positions)
            assert same.all(), f"req_to_token row {row} differs from its page table"
        self._shares.check_integrity([(row, self._row_pages(row)) for row in rows], cached)

    def _begin_with(self, row: int, pages: Int64Array) -> None:
        """Make whole pages the beginning of an empty sequence."""
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
        """Return the token ids of positions by the page table, int64 of their shape."""
        pages, offsets = np.divmod(positions, self.page_size)
        return self._pages[rows, pages] * self.page_size + offsets

    def _plan(self, handles: Sequence[ReqHandle], new_lens: Sequence[int]) -> _Growth:
        rows = self.req_to_token.rows(handles)
        new = as_int64(new_lens)
        in_order, old = np.sort(rows), self._lens[rows]
        assert len(rows) == len(new), "pass one length a handle"
        assert (in_order[1:] != in_order[:-1]).all(), "a handle is twice in one batch"
        grows = (old <= new) & (new <= self.req_to_token.max_context_len)
        assert grows.all(), f"lengths can't go from {old[~grows]} to {new[~grows]}"
        start, left = self._fresh_start(rows, old, new)
        return _Growth(rows=rows, old=old, new=new, start=start, left=left)

    def _fresh_start(
        self, rows: Int64Array, old: Int64Array, new: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the old lengths, or the start of a last page that has to be copied; such pages."""
        if not self._forked[rows].any():  # as in nearly every step of decoding
            return old, np.empty(0, dtype=np.int64)
        offset = old % self.page_size
        start = old.copy()
        writers = np.flatnonzero((new > old) & (offset > 0))
        pages = self._pages[rows[writers], old[writers] // self.page_size]
        owners = self.allocator.ref_counts(pages)
        self._forked[rows[writers[owners == 1]]] = False
        left: dict[int, int] = {}
        shared = (a[owners > 1].tolist() for a in (writers, pages, owners))
        for i, page, count in zip(*shared, strict=True):
            remaining = left.get(page, count)
            # several writers of one page in this batch: the last of its owners keeps it
            if remaining > 1:
                start[i] -= offset[i]
                left[page] = remaining - 1
        copying = np.flatnonzero(start < old)
        return start, self._pages[rows[copying], start[copying] // self.page_size]

    def _fill_device(self, growth: _Growth) -> Tensor:
        """Copy shared pages, then write fresh ids to the table; return the new tokens'.

        The table write comes last: whatever fails before it leaves every sequence readable.
        """
        which, nth = _spread(growth.new - growth.start)
        rows, positions, copies = growth.rows[which], growth.start[which] + nth, 0
        # copies come first, so that the new tokens' ids are a view of what is sent
        if len(growth.left):
            moved = positions < growth.old[which]
            order, copies = np.argsort(~moved, kind="stable"), int(moved.sum())
            rows, positions = rows[order], positions[order]
        loc = self._slots(rows, positions)
        if copies:
            # a request's moved tokens begin at offset 0 of its page: each such offset starts the
            # next request
            offset = positions[:copies] % self.page_size
            source = growth.left[np.cumsum(offset == 0) - 1] * self.page_size + offset
            target, source = to_device(np.stack([loc[:copies], source]), self.allocator.device)
            self.pool.move_kv_cache(target, source)
        flat = rows * self.req_to_token.max_context_len + positions
        return self._write_table(flat, loc)[copies:]

    def _write_table(self, flat: Int64Array, loc: Int64Array) -> Tensor:
        """Write slots to the table at these places, by one launch; return them."""
        n = len(loc)
        if not n:
            return torch.empty(0, dtype=torch.int64, device=self.allocator.device)
        packed = np.empty(2 * n + -(-n // 2), dtype=np.int64)
        packed[:n], packed[n : 2 * n] = flat, loc
        # as the table holds them: converting there takes a launch more
        packed[2 * n :].view(np.int32)[:n] = loc
        sent = to_device(packed, self.allocator.device)
        self.req_to_token.write_flat(sent[:n], sent[2 * n :].view(torch.int32)[:n])
        return sent[n : 2 * n]


def _spread(counts: Int64Array) -> tuple[Int64Array | slice, Int64Array | Literal[0]]:
    """Expand per-request counts to (request, number within the request) index arrays."""
    if (counts <= 1).all():  # as in nearly every step of decoding
        return slice(None) if counts.all() else np.flatnonzero(counts), 0
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]

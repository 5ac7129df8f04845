"""Page ledgers: of one pool, for pages or single tokens, and of a full and a window pool."""

import numpy as np
import torch

from kvcache.allocators.base import Indices, Int64Array, KVAllocator, as_int64, to_device


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
        """Hands out pages of the first `size` tokens only, all that an elastic pool has memory
        behind now; `total_pages` stays. ValueError, with nothing changed, where a later page has an
        owner, or the pool never was so large.
        """
        pages = size // self.page_size
        if not 0 <= pages <= self.total_pages:
            raise ValueError(f"limit({size}): the pool was made for 0..{self.size} tokens")
        owned = np.concatenate([np.flatnonzero(self._refs), self._deferred_pages()])
        if (owned > pages).any():
            raise ValueError(
                f"limit({size}): page {int(owned[owned > pages][0])} has an owner; "
                "release its sequence first"
            )
        free = self._free[: self._num_free]
        more = np.arange(pages, self._open_pages, -1, dtype=np.int64)
        left = np.concatenate([more, free[free <= pages]])  # new ones go out last
        self._free[: len(left)], self._num_free, self._open_pages = left, len(left), pages

    def owned_past(self, pages: int) -> Int64Array:
        """Returns the pages that have an owner and come after the first `pages`, ascending."""
        return pages + 1 + np.flatnonzero(self._refs[pages + 1 :])

    def lowest_free(self, count: int) -> Int64Array:
        """Returns the `count` first of the free pages, or all there are, ascending; takes none."""
        return np.sort(self._free[: self._num_free])[:count]

    def trade(self, owned: Int64Array, free: Int64Array) -> None:
        """Gives the owners of some pages as many free ones; the pages left go out last."""
        self._refs[free], self._refs[owned] = self._refs[owned], 0
        kept = self._free[: self._num_free]
        left = kept[~np.isin(kept, free)]
        self._free[: self._num_free] = np.concatenate([np.sort(owned)[::-1], left])

    def ref_counts(self, pages: Indices) -> Int64Array:
        return self._refs[self._valid_pages(as_int64(pages, "pages"))]

    def next_pages(self, count: int) -> Int64Array | None:
        if count < 0:
            raise ValueError(f"can't allocate {count} pages; pass a count >= 0")
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
        ids = self._valid_pages(as_int64(pages, "pages"))
        if (self._refs[ids] == 0).any():
            raise ValueError(
                f"page {int(ids[self._refs[ids] == 0][0])} is free and can't be shared; "
                "allocate it first"
            )
        np.add.at(self._refs, ids, 1)

    def free_pages(self, pages: Indices) -> None:
        self.drop(*self.checked_drops(pages))

    def checked_drops(self, pages: Indices) -> tuple[Int64Array, Int64Array]:
        """The distinct pages, ascending, and how often each is named; ValueError: double free."""
        distinct, times = np.unique(self._valid_pages(as_int64(pages, "pages")), return_counts=True)
        short = self._refs[distinct] < times
        if short.any():
            page = int(distinct[short][0])
            raise ValueError(
                f"double free of page {page}: it has {int(self._refs[page])} owner(s), "
                "fewer than are dropped; release each sequence once"
            )
        return distinct, times.astype(np.int64, copy=False)

    def drop(self, pages: Int64Array, times: Int64Array) -> None:
        """Takes `times` owners from each page, as `checked_drops` found them; can't fail."""
        left = self._refs[pages] - times
        self._refs[pages] = left
        self._retire(pages[left == 0])

    def check_integrity(self) -> None:
        """Raises AssertionError when a page is lost, twice free, or free while owned."""
        free = np.concatenate([self._free[: self._num_free], self._deferred_pages()])
        assert len(np.unique(free)) == len(free), "a page is twice in the free list"
        assert ((free >= 1) & (free <= self._open_pages)).all(), (
            "the free list names a page outside the pool"
        )
        assert (self._refs >= 0).all() and self._refs[0] == 0, (
            "negative reference count, or the padding page is owned"
        )
        assert (self._refs[free] == 0).all(), "an owned page is in the free list"
        assert int((self._refs > 0).sum()) + len(free) == self._open_pages, "pages were lost"

    def _give_back(self, pages: Int64Array) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._num_free += len(pages)

    def _check_open(self, pages: Int64Array) -> None:
        free = self.ref_counts(pages) == 0
        if free.any():
            raise ValueError(
                f"last_loc is in page {int(pages[free][0])}, which is free; "
                "its sequence was released"
            )


class TokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """Token ids 1 .. size, each a page of its own: any free ones, in any order."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        super().__init__(size, 1, device)


class SWATokenToKVPoolAllocator(KVAllocator):
    """Pages of the full pool, each with a page of the smaller window pool until its tokens have
    left the window.

    All page and token ids that go in and come out are the full pool's.
    `full_to_swa_index_mapping[id]` (int64 `[size + page_size]` on the device, 0 = unmapped) is the
    token's slot in the window pool; the ledger behind it is on the CPU. Every operation is atomic
    over both pools: what one of them can't do leaves the other untouched.

    Window owners never exceed full owners. `free` drops a share that has left the window, where
    there is one, before one that has not: without knowing which sequence asks, a window slot may so
    be kept too long, never too short. Who knows calls `free_swa_pages` first.
    """

    def __init__(
        self, size: int, size_swa: int, page_size: int, device: torch.device | str
    ) -> None:
        super().__init__(size, page_size, device)
        self.size_swa = size_swa
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
        return self._window_owners(self._valid_pages(as_int64(pages, "pages")))

    def next_pages(self, count: int) -> Int64Array | None:
        return None if self.swa.next_pages(count) is None else self.full.next_pages(count)

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
        distinct, times = np.unique(self._valid_pages(as_int64(pages, "pages")), return_counts=True)
        owners = self._window_owners(distinct)
        if (owners < times).any():
            i = int((owners < times).argmax())
            raise ValueError(
                f"double free of the window slots of page {distinct[i]}: "
                f"{owners[i]} owner(s) have it in their window, fewer than are dropped; "
                "free each page once after it left the window"
            )
        self._drop_window(distinct, times.astype(np.int64, copy=False))

    def free_group_begin(self) -> None:
        super().free_group_begin()
        self.full.free_group_begin()
        self.swa.free_group_begin()

    def free_group_end(self) -> None:
        super().free_group_end()
        self.swa.free_group_end()
        self.full.free_group_end()

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
        settled = np.ones(len(expected), dtype=np.bool_)
        settled[self._deferred_pages()] = False  # unmapped when the group ends
        assert np.array_equal(actual[settled], expected[settled]), (
            "full_to_swa_index_mapping differs from the ledger"
        )

    def _window_owners(self, pages: Int64Array) -> Int64Array:
        halves = self._swa_page[pages]
        owners = np.zeros(len(pages), dtype=np.int64)
        owners[halves > 0] = self.swa.ref_counts(halves[halves > 0])
        return owners

    def _drop_window(self, pages: Int64Array, times: Int64Array) -> None:
        """Takes `times` window owners from each page; the device write, which may fail, first."""
        pages, times = pages[times > 0], times[times > 0]
        unmapped = pages[self._window_owners(pages) == times]
        self._retire(unmapped)
        self.swa.drop(self._swa_page[pages], times)
        self._swa_page[unmapped] = 0

    def _map(self, full: Int64Array, swa: Int64Array) -> None:
        if len(full):
            rows, halves = to_device(np.stack([full, swa]), self.device)
            slots = halves[:, None] * self.page_size + self._offsets
            self.full_to_swa_index_mapping.view(-1, self.page_size).index_copy_(0, rows, slots)

    def _give_back(self, pages: Int64Array) -> None:
        """Clears the mapping of pages without a window half; their ledgers give them back."""
        if len(pages):
            rows = to_device(pages, self.device)
            self.full_to_swa_index_mapping.view(-1, self.page_size).index_fill_(0, rows, 0)

    def _check_open(self, pages: Int64Array) -> None:
        self.full._check_open(pages)
        gone = self._swa_page[pages] == 0
        if gone.any():
            raise ValueError(
                f"last_loc is in page {int(pages[gone][0])}, whose window slots were freed; "
                "the newest token of a sequence never leaves the window, keep its page"
            )

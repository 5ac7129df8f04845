"""One pool's page ledger: a stack of free pages and a count of owners for each page; for single
tokens, with pages of one token.
"""

import numpy as np
import torch

from kvcache.allocators.base import Indices, Int64Array, KVAllocator, as_int64


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
        """Gives the owners of some pages as many free ones in their place, one for each; what they
        owned is free then, and handed out last.
        """
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
        """The distinct pages, ascending, and how often each is named. Changes nothing; ValueError
        (double free) where a page has fewer owners than that.
        """
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

"""Page ledgers: what each does, and that of one pool."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]
Indices = torch.Tensor | npt.NDArray[np.integer] | Sequence[int]

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
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(
                f"size={size} tokens must be a positive multiple of page_size={page_size}; "
                "round it to whole pages"
            )
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
        """Return the owners of each page, int64 `[n]`; 0: free. ValueError for a page that does not
        exist.
        """

    @abstractmethod
    def alloc_pages(self, count: int) -> Int64Array | None:
        """Take `count` pages with one owner each, int64 on the CPU; None if there are fewer."""

    @abstractmethod
    def share(self, pages: Indices) -> None:
        """Add an owner to each page, two if it is named twice. ValueError if one is free."""

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
        ids = as_int64(pages, "pages")
        wrong = (ids < 1) | (ids > self.total_pages)
        if wrong.any():
            raise ValueError(
                f"page {int(ids[wrong][0])} was never issued: "
                f"pages are 1..{self.total_pages}, page 0 is padding"
            )
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
        if (self._refs[ids] == 0).any():
            raise ValueError(
                f"page {int(ids[self._refs[ids] == 0][0])} is free and can't be shared; "
                "allocate it first"
            )
        np.add.at(self._refs, ids, 1)

    def free_pages(self, pages: Indices) -> None:
        self.drop(*self.checked_drops(pages))

    def checked_drops(self, pages: Indices) -> tuple[Int64Array, Int64Array]:
        """Return the distinct pages, ascending, and how often each is named; ValueError: double
        free.
        """
        distinct, times = np.unique(self._valid_pages(pages), return_counts=True)
        short = self._refs[distinct] < times
        if short.any():
            page = int(distinct[short][0])
            raise ValueError(
                f"double free of page {page}: it has {int(self._refs[page])} owner(s), "
                "fewer than are dropped; release each sequence once"
            )
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
        assert ((free >= 1) & (free <= self._open_pages)).all(), (
            "the free list names a page outside the pool"
        )
        assert (self._refs >= 0).all() and self._refs[0] == 0, (
            "negative reference count, or the padding page is owned"
        )
        assert (self._refs[free] == 0).all(), "an owned page is in the free list"
        assert int((self._refs > 0).sum()) + len(free) == self._open_pages, "pages were lost"


def as_int64(values: Indices, name: str) -> Int64Array:
    """Return CPU indices as int64 `[n]`; ValueError for other values, and for those on a GPU, where
    reading them would wait.
    """
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise ValueError(
                f"{name} is on {values.device}; the ledger is on the CPU, pass CPU values"
            )
        values = values.numpy()
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(
            f"{name} must be one-dimensional integers, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64, copy=False)


def to_device(array: Int64Array, device: torch.device) -> torch.Tensor:
    """Copy the array to the device without a wait; the caller may change it immediately."""
    host = torch.from_numpy(array)
    if device.type == "cuda" and array.nbytes >= _PINNED_FROM:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)

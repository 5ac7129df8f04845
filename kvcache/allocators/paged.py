"""Page ledger on the CPU: who owns which page, and the token ids of freshly taken pages."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvcache.ops.expand import LAST_LOC, OUT_START, PAGE_START, PREFIX_LEN, SEQ_LEN, expand_pages

Int64Array = npt.NDArray[np.int64]
Indices = torch.Tensor | npt.NDArray[np.integer] | Sequence[int]


class PagedTokenToKVPoolAllocator:
    """Hands out pages 1 .. size // page_size; token id = page * page_size + offset. Page 0 is padding, never issued.

    Every issued page has a reference count: 1 when issued, +1 for each `share`, -1 for each `free`, back in the free
    list at 0. The ledger is on the CPU and needs no synchronise; only token ids live on `device`. A call that returns
    None or raises has changed nothing.
    """

    def __init__(self, size: int, page_size: int, device: torch.device | str) -> None:
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(
                f"size={size} tokens must be a positive multiple of page_size={page_size}; round it to whole pages"
            )
        self.size = size
        self.page_size = page_size
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.total_pages = size // page_size
        # a stack of free pages, its top is the end of [:_num_free]; filled so that pages go out in ascending order
        self._free = np.arange(self.total_pages, -1, -1, dtype=np.int64)
        self._num_free = self.total_pages
        self._refs = np.zeros(self.total_pages + 1, dtype=np.int64)

    @property
    def available_pages(self) -> int:
        return self._num_free

    def available_size(self) -> int:
        """Tokens that whole free pages can hold."""
        return self._num_free * self.page_size

    def ref_counts(self, pages: Indices) -> Int64Array:
        """Owners of each page, int64 `[n]`; 0 for a free page."""
        return self._refs[self._valid_pages(as_int64(pages, "pages"))]

    def alloc_pages(self, count: int) -> Int64Array | None:
        """`count` pages with one owner each, or None. `alloc_pages(0)` is an empty array."""
        if count < 0:
            raise ValueError(f"can't allocate {count} pages; pass a count >= 0")
        if count > self._num_free:
            return None
        top = self._num_free
        pages = self._free[top - count : top][::-1].copy()
        self._num_free = top - count
        self._refs[pages] = 1
        return pages

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Ids of `need_size` tokens (whole pages), int64 on the device, or None."""
        if need_size < 0 or need_size % self.page_size:
            raise ValueError(f"alloc({need_size}) must be a multiple of page_size {self.page_size}; round up first")
        return self.alloc_extend([0], [need_size], [-1], need_size)

    def alloc_extend(
        self, prefix_lens: Indices, seq_lens: Indices, last_loc: Indices, extend_num_tokens: int
    ) -> torch.Tensor | None:
        """Ids of the tokens that n requests gain by growing from `prefix_lens` to `seq_lens`, int64 on the device.

        Lengths and `last_loc` (id of each request's last token, -1 without one) are int64 `[n]` on the CPU;
        `extend_num_tokens` = sum(seq - prefix). The partial page after `last_loc` is filled first, then new pages:
        sum(ceil(seq / ps) - ceil(prefix / ps)) of them. None when they don't suffice. Raises ValueError where a
        sequence would shrink, the sum disagrees or (last_loc + 1) % ps != prefix % ps.
        """
        prefix = as_int64(prefix_lens, "prefix_lens")
        seq = as_int64(seq_lens, "seq_lens")
        last = as_int64(last_loc, "last_loc")
        gains = self._checked_gains(prefix, seq, last, extend_num_tokens)
        counts = self.pages_between(prefix, seq)
        pages = self.alloc_pages(int(counts.sum()))
        if pages is None:
            return None
        try:
            return self._expand((prefix, seq, last), gains, counts, pages)
        except BaseException:  # such as the device being out of memory
            self.free_pages(pages)
            raise

    def alloc_decode(self, seq_lens: Indices, last_loc: Indices) -> torch.Tensor | None:
        """One token id a request, int64 `[n]` on the device, or None. `seq_lens` count the new token."""
        seq = as_int64(seq_lens, "seq_lens")
        return self.alloc_extend(seq - 1, seq, last_loc, len(seq))

    def _expand(
        self, lengths: tuple[Int64Array, ...], gains: Int64Array, counts: Int64Array, pages: Int64Array
    ) -> torch.Tensor:
        n = len(gains)
        packed = np.empty(5 * n + len(pages), dtype=np.int64)  # one transfer for all that the kernel reads
        meta = packed[: 5 * n].reshape(5, n)
        meta[PREFIX_LEN], meta[SEQ_LEN], meta[LAST_LOC] = lengths
        meta[OUT_START] = np.cumsum(gains) - gains
        meta[PAGE_START] = np.cumsum(counts) - counts
        packed[5 * n :] = pages
        sent = to_device(packed, self.device)
        largest = int(gains.max(initial=0))
        return expand_pages(sent[: 5 * n].view(5, n), sent[5 * n :], self.page_size, int(gains.sum()), largest)

    def pages_between(self, prefix: Int64Array, seq: Int64Array) -> Int64Array:
        """New pages a request takes to grow from `prefix` to `seq` tokens: ceil(seq / ps) - ceil(prefix / ps)."""
        return -(-seq // self.page_size) + -prefix // self.page_size

    def share(self, pages: Indices) -> None:
        """One more owner for each page; a page named twice gains two. ValueError if one of them is free."""
        ids = self._valid_pages(as_int64(pages, "pages"))
        if (self._refs[ids] == 0).any():
            raise ValueError(f"page {int(ids[self._refs[ids] == 0][0])} is free and can't be shared; allocate it first")
        np.add.at(self._refs, ids, 1)

    def free(self, loc: Indices) -> None:
        """Drops one owner of each page that `loc` names a token of (however many of its tokens are named).

        `loc` are token ids; on a GPU tensor this synchronises, CPU ids don't. Empty is a no-op. A token of a page
        without owners raises ValueError (double free) before anything is dropped.
        """
        if isinstance(loc, torch.Tensor):
            loc = loc.cpu()
        self.free_pages(np.unique(as_int64(loc, "loc") // self.page_size))

    def free_pages(self, pages: Indices) -> None:
        """Drops one owner of each page, two of a page named twice; ValueError (double free) leaves all as it was."""
        ids = self._valid_pages(as_int64(pages, "pages"))
        distinct, drops = np.unique(ids, return_counts=True)
        left = self._refs[distinct] - drops
        if (left < 0).any():
            page = int(distinct[left < 0][0])
            raise ValueError(
                f"double free of page {page}: it has {int(self._refs[page])} owner(s), fewer than are dropped; "
                f"release each sequence once"
            )
        self._refs[distinct] = left
        freed = distinct[left == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def check_integrity(self) -> None:
        """Raises AssertionError when a page is lost, twice free, or free while owned. May be called at any time."""
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == len(free), "a page is twice in the free list"
        assert ((free >= 1) & (free <= self.total_pages)).all(), "the free list names a page outside the pool"
        assert (self._refs >= 0).all() and self._refs[0] == 0, "negative reference count, or the padding page is owned"
        assert (self._refs[free] == 0).all(), "an owned page is in the free list"
        assert int((self._refs > 0).sum()) + len(free) == self.total_pages, "pages were lost"

    def _valid_pages(self, pages: Int64Array) -> Int64Array:
        wrong = (pages < 1) | (pages > self.total_pages)
        if wrong.any():
            raise ValueError(
                f"page {int(pages[wrong][0])} was never issued: pages are 1..{self.total_pages}, page 0 is padding"
            )
        return pages

    def _checked_gains(self, prefix: Int64Array, seq: Int64Array, last: Int64Array, total: int) -> Int64Array:
        if not len(prefix) == len(seq) == len(last):
            raise ValueError(
                f"one entry a request needed, got {len(prefix)} prefix_lens, {len(seq)} seq_lens, {len(last)} last_loc"
            )
        gains = seq - prefix
        bad = (gains < 0) | (prefix < 0)
        if bad.any():
            r = int(bad.argmax())
            raise ValueError(f"request {r} can't go from {prefix[r]} to {seq[r]} tokens; lengths only grow")
        bad = (last + 1) % self.page_size != prefix % self.page_size
        if bad.any():
            r = int(bad.argmax())
            raise ValueError(
                f"request {r}: last_loc {last[r]} is not where token {prefix[r]} - 1 of a sequence lies in a page of "
                f"{self.page_size}; pass the id of its last token, -1 for an empty sequence"
            )
        if int(gains.sum()) != total:
            raise ValueError(f"extend_num_tokens is {total}, but the lengths grow by {int(gains.sum())}")
        return gains


def as_int64(values: Indices, name: str) -> Int64Array:
    """CPU indices as int64 `[n]`. A device tensor raises: reading it would synchronise on every call."""
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise ValueError(f"{name} is on {values.device}; the ledger is on the CPU, pass CPU values")
        values = values.numpy()
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} must be one-dimensional integers, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64, copy=False)


def to_device(array: Int64Array, device: torch.device) -> torch.Tensor:
    # From pageable memory CUDA stages the bytes before it returns, so the caller may drop the array at once.
    return torch.from_numpy(array).to(device, non_blocking=True)

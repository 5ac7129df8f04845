"""Page ledgers: what each does, and that of one pool, for pages or single tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvcache.ops.expand import LAST_LOC, OUT_START, PAGE_START, PREFIX_LEN, SEQ_LEN, expand_pages

Int64Array = npt.NDArray[np.int64]
Indices = torch.Tensor | npt.NDArray[np.integer] | Sequence[int]

# bytes: from here on a copy from pageable memory waits for the kernels under way
_PINNED_FROM = 1 << 16


class KVAllocator(ABC):
    """Decides who holds which page of a pool; token id = page * page_size + offset.

    Pages are 1 .. total_pages; page 0 takes the writes of padded tokens and is never issued. Every
    issued page has a count of owners: 1 when issued, +1 for each `share`, -1 for each `free`,
    available again at 0. The ledger is on the CPU and outside every memsaver tag: nothing here
    synchronises unless it says so, and a pause changes nothing.

    A call that returns None (pages are short) or raises has changed nothing. `alloc*` raise
    ValueError for wrong arguments only.
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
        self._deferred: list[Int64Array] | None = None  # pages that the open group has freed

    @property
    @abstractmethod
    def available_pages(self) -> int:
        """Pages that `alloc_pages` can hand out now."""

    @abstractmethod
    def ref_counts(self, pages: Indices) -> Int64Array:
        """Owners of each page, int64 `[n]`; 0: free. ValueError for a page that does not exist."""

    @abstractmethod
    def next_pages(self, count: int) -> Int64Array | None:
        """The pages that `alloc_pages(count)` would give, int64 `[count]` on the CPU, or None."""

    @abstractmethod
    def alloc_pages(self, count: int) -> Int64Array | None:
        """`count` pages (0: an empty array) with one owner each, int64 on the CPU, or None."""

    @abstractmethod
    def share(self, pages: Indices) -> None:
        """One more owner a page, two for one named twice. ValueError if one of them is free."""

    @abstractmethod
    def free_pages(self, pages: Indices) -> None:
        """Drops one owner of each page named; ValueError (double free) leaves all as it was."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError when the ledger contradicts itself, between any operations."""

    @abstractmethod
    def _give_back(self, pages: Int64Array) -> None:
        """Makes pages without an owner available: at once, or when the free group ends."""

    @abstractmethod
    def _check_open(self, pages: Int64Array) -> None:
        """ValueError unless each page, the partial last one of a sequence, can take more tokens."""

    def available_size(self) -> int:
        """Tokens that whole free pages can hold."""
        return self.available_pages * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Ids of `need_size` tokens (whole pages), int64 on the device, or None."""
        if need_size < 0 or need_size % self.page_size:
            raise ValueError(
                f"alloc({need_size}) must be a multiple of page_size {self.page_size}; "
                "round up first"
            )
        return self.alloc_extend([0], [need_size], [-1], need_size)

    def alloc_extend(
        self, prefix_lens: Indices, seq_lens: Indices, last_loc: Indices, extend_num_tokens: int
    ) -> torch.Tensor | None:
        """Ids of the tokens by which n requests grow, int64 on the device.

        Lengths and `last_loc` (id of each request's last token, -1 without one) are int64 `[n]` on
        the CPU; `extend_num_tokens` = sum(seq - prefix). The partial page after `last_loc` is
        filled first, then new pages: sum(ceil(seq / ps) - ceil(prefix / ps)) of them. None when
        they don't suffice. Raises ValueError where a sequence would shrink, the sum disagrees,
        (last_loc + 1) % ps != prefix % ps, or `last_loc`'s page is free. Who shares a partial page
        copies it first: this fills it in place.
        """
        prefix = as_int64(prefix_lens, "prefix_lens")
        seq = as_int64(seq_lens, "seq_lens")
        last = as_int64(last_loc, "last_loc")
        gains = _checked_gains(prefix, seq, last, extend_num_tokens, self.page_size)
        self._check_open(last[(gains > 0) & (prefix % self.page_size > 0)] // self.page_size)
        counts = self.pages_between(prefix, seq)
        pages = self.next_pages(int(counts.sum()))
        if pages is None:
            return None
        loc = self._expand((prefix, seq, last), gains, counts, pages)
        self.alloc_pages(len(pages))  # after the device's part, which may be out of memory
        return loc

    def alloc_decode(self, seq_lens: Indices, last_loc: Indices) -> torch.Tensor | None:
        """One token id a request, int64 `[n]` on the device, or None. `seq_lens` count it."""
        seq = as_int64(seq_lens, "seq_lens")
        return self.alloc_extend(seq - 1, seq, last_loc, len(seq))

    def pages_between(self, prefix: Int64Array, seq: Int64Array) -> Int64Array:
        """New pages of a request: ceil(seq / ps) - ceil(prefix / ps)."""
        return -(-seq // self.page_size) + -prefix // self.page_size

    def free(self, loc: Indices) -> None:
        """Drops one owner of each page that `loc` names a token of.

        `loc` are token ids; on a GPU tensor this synchronises, CPU ids don't:
        BlockManager.token_ids gives those of (request, from, to). Empty is a no-op. A token of a
        page without owners, or one named twice, raises ValueError (double free) first.
        """
        ids = np.sort(as_int64(loc.cpu() if isinstance(loc, torch.Tensor) else loc, "loc"))
        twice = ids[1:] == ids[:-1]
        if twice.any():
            raise ValueError(
                f"double free of token {int(ids[1:][twice][0])}: it is named twice; "
                "name each token once"
            )
        self.free_pages(np.unique(ids // self.page_size))

    def free_group_begin(self) -> None:
        """Opens a group: owners drop at once, so that a double free raises where it happens, but no
        page becomes available before `free_group_end`. ValueError if a group is open already.
        """
        if self._deferred is not None:
            raise ValueError(
                "a free group is open already; end it with free_group_end() before the next one"
            )
        self._deferred = []

    def free_group_end(self) -> None:
        """Closes the group: what it freed becomes available. ValueError without a group."""
        if self._deferred is None:
            raise ValueError("no free group is open; call free_group_begin() first")
        self._give_back(self._deferred_pages())
        self._deferred = None

    def _retire(self, pages: Int64Array) -> None:
        if self._deferred is None:
            self._give_back(pages)
        else:
            self._deferred.append(pages)

    def _deferred_pages(self) -> Int64Array:
        return np.concatenate([np.empty(0, dtype=np.int64), *(self._deferred or [])])

    def _valid_pages(self, pages: Int64Array) -> Int64Array:
        wrong = (pages < 1) | (pages > self.total_pages)
        if wrong.any():
            raise ValueError(
                f"page {int(pages[wrong][0])} was never issued: "
                f"pages are 1..{self.total_pages}, page 0 is padding"
            )
        return pages

    def _expand(
        self,
        lengths: tuple[Int64Array, ...],
        gains: Int64Array,
        counts: Int64Array,
        pages: Int64Array,
    ) -> torch.Tensor:
        n = len(gains)
        # one transfer for all that the kernel reads
        packed = np.empty(5 * n + len(pages), dtype=np.int64)
        meta = packed[: 5 * n].reshape(5, n)
        meta[PREFIX_LEN], meta[SEQ_LEN], meta[LAST_LOC] = lengths
        meta[OUT_START] = np.cumsum(gains) - gains
        meta[PAGE_START] = np.cumsum(counts) - counts
        packed[5 * n :] = pages
        sent = to_device(packed, self.device)
        largest = int(gains.max(initial=0))
        return expand_pages(
            sent[: 5 * n].view(5, n), sent[5 * n :], self.page_size, int(gains.sum()), largest
        )


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


def _checked_gains(
    prefix: Int64Array, seq: Int64Array, last: Int64Array, total: int, page_size: int
) -> Int64Array:
    if not len(prefix) == len(seq) == len(last):
        raise ValueError(
            f"one entry a request needed, got {len(prefix)} prefix_lens, {len(seq)} seq_lens, "
            f"{len(last)} last_loc"
        )
    gains = seq - prefix
    bad = (gains < 0) | (prefix < 0)
    if bad.any():
        r = int(bad.argmax())
        raise ValueError(
            f"request {r} can't go from {prefix[r]} to {seq[r]} tokens; lengths only grow"
        )
    bad = (last + 1) % page_size != prefix % page_size
    if bad.any():
        r = int(bad.argmax())
        raise ValueError(
            f"request {r}: last_loc {last[r]} is not where token {prefix[r]} - 1 of a sequence "
            f"lies in a page of {page_size}; pass the id of its last token, "
            "-1 for an empty sequence"
        )
    if int(gains.sum()) != total:
        raise ValueError(
            f"extend_num_tokens is {total}, but the lengths grow by {int(gains.sum())}"
        )
    return gains


def as_int64(values: Indices, name: str) -> Int64Array:
    """CPU indices as int64 `[n]`; ValueError for a device tensor: reading it would wait."""
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
    """The array on the device, without a wait; on a GPU the caller may change it at once."""
    host = torch.from_numpy(array)
    if device.type == "cuda" and array.nbytes >= _PINNED_FROM:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)

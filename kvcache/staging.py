"""Keys and values on their way between ranks of different tensor-parallel sizes: who sends which
heads, and a ring that promises more bytes of a staging buffer than it has.

A rank of n holds `heads / n` heads in a row; where there are fewer heads than ranks, `n / heads`
ranks in a row hold the same one. Both sides compute the same plain numbers: nobody has to be asked.

The reader (decode) owns the ring. It assigns a range to every transfer at once, also where older
ones still lie: a range has a round, the number of times that the ring has begun anew before it.
What it frees moves the watermark (round, tail): everything assigned in earlier rounds, and before
`tail` in that round, is free again. The reader sends assignments and watermarks; a writer (prefill)
fills its range once `may_fill` says so. A watermark never goes back, so an old one only makes a
writer wait longer.

The oldest range that is not freed may always be filled, whatever its size: nothing waits for ever.
"""

from collections import deque
from typing import NamedTuple

import torch

from kvcache.pools import MHATokenToKVPool


class Assignment(NamedTuple):
    """Bytes `offset`.. of the buffer; `round` goes to the writer with the offset."""

    id: int
    offset: int
    round: int


class Watermark(NamedTuple):
    """All of the rounds before `round` is free, and what begins before byte `tail` of it."""

    round: int
    tail: int


def may_fill(round: int, end: int, watermark: Watermark) -> bool:
    """Return whether a writer may fill a range of this round that ends before byte `end`."""
    before = round - 1  # the round whose ranges lie under this one
    return (
        round == 0
        or before < watermark.round
        or (before == watermark.round and end <= watermark.tail)
    )


class StagingAllocator:
    """The ring. Plain numbers, no tensor; not thread-safe: one thread, or a lock of the caller's.

    size_bytes: of the buffer. alignment: of every offset in bytes, a power of two; 16 and more
    keeps the copies wide.
    """

    def __init__(self, size_bytes: int, alignment: int = 256) -> None:
        assert size_bytes > 0, f"size_bytes must be positive, got {size_bytes}"
        power = alignment > 0 and alignment & (alignment - 1) == 0
        assert power, f"alignment must be a power of two, got {alignment}"
        self.size_bytes = size_bytes
        self.alignment = alignment
        self.watermark = Watermark(0, 0)
        self._round = 0
        self._head = 0  # where the next range begins, if it fits behind
        self._next_id = 0
        self._order: deque[Assignment] = deque()  # as assigned; the first one is not freed
        self._live: set[int] = set()

    @property
    def outstanding(self) -> int:
        """Return the number of ranges assigned and not freed."""
        return len(self._live)

    def assign(self, nbytes: int) -> Assignment | None:
        """Assign a range of `nbytes`, perhaps not ready yet; None only if larger than the ring."""
        assert nbytes > 0, f"can't assign {nbytes} bytes"
        if nbytes > self.size_bytes:
            return None
        if self._head + nbytes > self.size_bytes:
            self._round, self._head = self._round + 1, 0
        assigned = Assignment(self._next_id, self._head, self._round)
        self._next_id += 1
        self._head += -(-nbytes // self.alignment) * self.alignment
        self._order.append(assigned)
        self._live.add(assigned.id)
        return assigned

    def free(self, id: int) -> Watermark:
        """Take a range back, in any order; return the watermark afterwards, for the writers.

        Its writer must be done, or know that it may not begin.
        """
        assert id in self._live, f"range {id} is not assigned: never issued, or freed before"
        self._live.remove(id)
        while self._order and self._order[0].id not in self._live:
            self._order.popleft()
        if self._order:
            self.watermark = Watermark(self._order[0].round, self._order[0].offset)
        else:
            # the head of this round would be a promise that nobody keeps: a range of the next round
            # that ends past it would wait for ranges of this round, of which none is left
            self._round, self._head = self._round + 1, 0
            self.watermark = Watermark(self._round, 0)
        return self.watermark


class HeadSlice(NamedTuple):
    """Heads that a writer sends: from `src_head_start` of its own to the reader's `dst_...`."""

    src_tp_rank: int
    src_head_start: int
    dst_head_start: int
    num_heads: int


def head_writers(
    src_size: int, dst_size: int, dst_rank: int, total_kv_heads: int
) -> tuple[HeadSlice, ...]:
    """Return what each source rank sends to a destination rank, by source rank, without gaps.

    Every head of a destination has exactly one writer; among sources that hold the same head the
    destinations are dealt out. The sizes need not divide each other.

    Raises:
        ValueError: A rank is outside its size, or heads and ranks do not divide: some heads would
            have no place.
    """
    dst_first, dst_heads, _ = _held("destination", dst_size, dst_rank, total_kv_heads)
    found = []
    for src_rank in range(src_size):
        src_first, src_heads, replicas = _held("source", src_size, src_rank, total_kv_heads)
        first = max(src_first, dst_first)
        count = min(src_first + src_heads, dst_first + dst_heads) - first
        if count > 0 and src_rank % replicas == dst_rank % replicas:
            found.append(HeadSlice(src_rank, first - src_first, first - dst_first, count))
    return tuple(found)


def heads_per_rank(tp_size: int, total_kv_heads: int) -> int:
    """Return the KV heads of each of `tp_size` ranks; a ValueError where they do not divide."""
    return _held("a", tp_size, 0, total_kv_heads)[1]


def _held(side: str, size: int, rank: int, total: int) -> tuple[int, int, int]:
    """Return the rank's first head, its number of heads, and how many ranks hold the same."""
    if size < 1 or total < 1:
        raise ValueError(f"{side} size {size} and {total} KV heads must be positive")
    if not 0 <= rank < size:
        raise ValueError(f"{side} rank {rank} is outside its tensor-parallel size of {size}")
    if max(size, total) % min(size, total):
        raise ValueError(
            f"{total} KV heads can't be split over {side} tensor-parallel size {size}; "
            "one must divide the other"
        )
    replicas = max(1, size // total)
    heads = max(1, total // size)
    return rank // replicas * heads, heads, replicas


def pool_layers(pool: MHATokenToKVPool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys `[L, N, H, D]` and values `[L, N, H, Dv]` as stored (fp8: unscaled bytes), views.

    Valid as long as the pool, in either memory order. FP4 rows have no heads to split.
    """
    assert not pool.fp4, "FP4 rows are codes and scales; stage another pool"
    return pool.stored["k"], pool.stored["v"]

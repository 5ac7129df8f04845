"""Staging of keys and values between ranks of different tensor-parallel sizes.

`head_writers` computes which rank sends which heads. Each of n ranks stores `heads / n` consecutive
heads. If there are fewer heads than ranks, `n / heads` consecutive ranks store the same head. Both
sides compute the same numbers, so no negotiation is needed.

`StagingAllocator` is a ring that may assign more bytes than its staging buffer has. The reader
(decode) owns the ring and assigns a range to every transfer immediately, even where older ranges
are still in use. Each range has a round, the number of times that the ring had wrapped
before it. Freeing ranges advances the watermark (round, tail): everything assigned in earlier
rounds, and before byte `tail` in that round, is free. The reader sends assignments and watermarks;
a writer (prefill) fills its range when `may_fill` allows it. A watermark never decreases, so an
outdated one only makes a writer wait longer. The oldest unfreed range may always be filled, so
there is no deadlock.
"""

from collections import deque
from typing import NamedTuple

import torch

from kvcache.pools import MHATokenToKVPool


class Assignment(NamedTuple):
    """A range of the staging buffer. The reader sends offset and round to the writer."""

    id: int  # for `StagingAllocator.free`
    offset: int  # first byte of the range
    round: int


class Watermark(NamedTuple):
    """The free part of the ring."""

    round: int  # all ranges of earlier rounds are free
    tail: int  # ranges of `round` that begin before this byte are free


def may_fill(round: int, end: int, watermark: Watermark) -> bool:
    """Return whether a writer may fill its range: all earlier ranges on the same bytes are free.

    `end` is the byte after the range, and `watermark` the latest that the reader sent.
    """
    before = round - 1  # the round that last assigned the same bytes
    return (
        round == 0
        or before < watermark.round
        or (before == watermark.round and end <= watermark.tail)
    )


class StagingAllocator:
    """Ring allocator of a staging buffer, owned by the reader.

    It works on numbers and touches no memory. Not thread-safe. Every offset is a multiple of
    `alignment` bytes, a power of two. From 16 on, copies can move 16 bytes at a time.
    """

    def __init__(self, size_bytes: int, alignment: int = 256) -> None:
        assert size_bytes > 0, f"size_bytes must be positive, got {size_bytes}"
        power = alignment > 0 and alignment & (alignment - 1) == 0
        assert power, f"alignment must be a power of two, got {alignment}"
        self.size_bytes = size_bytes
        self.alignment = alignment
        self.watermark = Watermark(0, 0)
        self._round = 0
        self._head = 0  # offset of the next range, if the range fits behind it
        self._next_id = 0
        self._order: deque[Assignment] = deque()  # in order of assignment; the first is not freed
        self._live: set[int] = set()

    @property
    def outstanding(self) -> int:
        """Return the number of assigned ranges that are not freed."""
        return len(self._live)

    def assign(self, nbytes: int) -> Assignment | None:
        """Assign a range, or return None if it is larger than the ring.

        Its writer may have to wait until older ranges are freed (`may_fill`).
        """
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
        """Free a range, in any order, and return the new watermark, to be sent to the writers.

        The range's writer must have finished, or must know that it may not start.
        """
        assert id in self._live, f"range {id} is not assigned: never issued, or freed before"
        self._live.remove(id)
        while self._order and self._order[0].id not in self._live:
            self._order.popleft()
        if self._order:
            self.watermark = Watermark(self._order[0].round, self._order[0].offset)
        else:
            # Start a new round. With a watermark at the head of this round, a range of the next
            # round that ends past the head would wait forever, as no range is left to be freed.
            self._round, self._head = self._round + 1, 0
            self.watermark = Watermark(self._round, 0)
        return self.watermark


class HeadSlice(NamedTuple):
    """The consecutive heads that a source rank sends to a destination rank."""

    src_tp_rank: int
    src_head_start: int  # counted in the source rank's pool
    dst_head_start: int  # counted in the destination rank's pool
    num_heads: int


def head_writers(
    src_size: int, dst_size: int, dst_rank: int, total_kv_heads: int
) -> tuple[HeadSlice, ...]:
    """Compute which heads each source rank sends to a destination rank, in the order of sources.

    Every head of a destination has exactly one writer. Of r source ranks that store the same head,
    the i-th sends it to the destination ranks with `dst_rank % r == i`. Neither size has to divide
    the other.

    Raises:
        ValueError: The rank is outside its size, or neither of a size and the number of heads
            divides the other.
    """
    dst_first, dst_heads, _ = _held("destination", dst_size, dst_rank, total_kv_heads)
    slices = []
    for src_rank in range(src_size):
        src_first, src_heads, replicas = _held("source", src_size, src_rank, total_kv_heads)
        first = max(src_first, dst_first)
        count = min(src_first + src_heads, dst_first + dst_heads) - first
        if count > 0 and src_rank % replicas == dst_rank % replicas:
            slices.append(HeadSlice(src_rank, first - src_first, first - dst_first, count))
    return tuple(slices)


def heads_per_rank(tp_size: int, total_kv_heads: int) -> int:
    """Return the number of KV heads per rank, at least 1.

    Raises:
        ValueError: Neither number divides the other.
    """
    return _held("a", tp_size, 0, total_kv_heads)[1]


def _held(side: str, size: int, rank: int, total: int) -> tuple[int, int, int]:
    """Return a rank's first head, its number of heads, and how many ranks store the same heads."""
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
    """Return the keys `[L, N, H, D]` and values `[L, N, H, Dv]` of a pool, for `kvcache.ops`.

    They are views of the stored elements (for fp8, bytes without scales applied), valid while the
    pool exists. The pool may have either memory order, but may not be FP4, whose codes and scales
    are not staged.
    """
    assert not pool.fp4, "FP4 pools can't be staged: their rows are codes and scales"
    return pool.stored["k"], pool.stored["v"]

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
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcache.pools.token_pools import MHATokenToKVPool


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
    """Tells whether a writer may fill a range of this round that ends before byte `end`."""
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
        if size_bytes <= 0:
            raise ValueError(f"size_bytes must be positive, got {size_bytes}")
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, got {alignment}")
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
        """Ranges assigned and not freed."""
        return len(self._live)

    def assign(self, nbytes: int) -> Assignment | None:
        """A range of `nbytes`, perhaps not ready yet; None only if larger than the ring."""
        if nbytes <= 0:
            raise ValueError(f"can't assign {nbytes} bytes; ask for at least one")
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
        """Takes a range back, in any order; the watermark afterwards, for the writers.

        Its writer must be done, or know that it may not begin. ValueError for another id.
        """
        if id not in self._live:
            raise ValueError(f"staging range {id} is not assigned: never issued, or freed before")
        self._live.remove(id)
        while self._order and self._order[0].id not in self._live:
            self._order.popleft()
        if self._order:
            self.watermark = Watermark(self._order[0].round, self._order[0].offset)
        else:
            self._restart()
        return self.watermark

    def _restart(self) -> None:
        """After the last range was freed.

        A watermark at the head of this round would be a promise that nobody keeps: a range of the
        next round that ends past it would wait for ranges of this round, of which none is left.
        """
        self._round, self._head = self._round + 1, 0
        self.watermark = Watermark(self._round, 0)


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
        raise ValueError(
            f"{side} tensor-parallel size {size} and {total} KV heads must be positive"
        )
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
    """Keys `[L, N, H, D]` and values `[L, N, H, Dv]` as stored (fp8: unscaled), views.

    Valid as long as the pool, in either memory order. ValueError for FP4, without views.
    """
    layers = [pool.get_kv_buffer(layer) for layer in range(pool.config.num_layers)]
    return stack_layers([k for k, _ in layers]), stack_layers([v for _, v in layers])


def stack_layers(layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """A view `[L, ...]` of tensors at even distances in one block; ValueError for others."""
    first = layers[0]
    addresses = [layer.data_ptr() for layer in layers]
    step = addresses[1] - addresses[0] if len(layers) > 1 else 0
    alike = all(
        layer.shape == first.shape
        and layer.stride() == first.stride()
        and layer.dtype == first.dtype
        and layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for layer in layers
    )
    if not alike or addresses != [addresses[0] + i * step for i in range(len(layers))] or step < 0:
        raise ValueError(
            "these layers do not lie at even distances in one block of memory; "
            "stage them one by one"
        )
    return first.as_strided(
        (len(layers), *first.shape), (step // first.element_size(), *first.stride())
    )

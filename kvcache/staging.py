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

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcache.pools.token_pools import MHATokenToKVPool

ALLOC_OVERSIZED = -2  # what a writer is sent instead of an offset: the request can never fit


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


def offset_to_send(assigned: Assignment | None) -> int:
    """The offset as a writer is told it, `ALLOC_OVERSIZED` for a request that was refused."""
    return ALLOC_OVERSIZED if assigned is None else assigned.offset


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


def compute_head_slice_params(
    src_attn_tp_size: int,
    dst_attn_tp_size: int,
    src_tp_rank: int,
    dst_tp_rank: int,
    total_kv_heads: int,
) -> tuple[int, int, int, int]:
    """`(src_head_start, num_heads_to_send, dst_head_start, num_heads_to_send)`, of each rank's own.

    All zeros where this source has nothing to send to this destination. Every head of a destination
    has exactly one writer; among sources that hold the same head the destinations are dealt out.
    The sizes need not divide each other. ValueError for a rank outside its size, and where heads
    and ranks do not divide: some heads would have no place.
    """
    src_first, src_heads, replicas = _held("source", src_attn_tp_size, src_tp_rank, total_kv_heads)
    dst_first, dst_heads, _ = _held("destination", dst_attn_tp_size, dst_tp_rank, total_kv_heads)
    first = max(src_first, dst_first)
    count = min(src_first + src_heads, dst_first + dst_heads) - first
    if count <= 0 or src_tp_rank % replicas != dst_tp_rank % replicas:
        return 0, 0, 0, 0
    return first - src_first, count, first - dst_first, count


def head_writers(
    src_attn_tp_size: int, dst_attn_tp_size: int, dst_tp_rank: int, total_kv_heads: int
) -> tuple[HeadSlice, ...]:
    """All that send to a destination rank, by source rank; their heads leave no gaps."""
    found = []
    for src in range(src_attn_tp_size):
        src_start, count, dst_start, _ = compute_head_slice_params(
            src_attn_tp_size, dst_attn_tp_size, src, dst_tp_rank, total_kv_heads
        )
        if count:
            found.append(HeadSlice(src, src_start, dst_start, count))
    return tuple(found)


def heads_per_rank(tp_size: int, total_kv_heads: int) -> int:
    """KV heads that each of `tp_size` ranks holds; ValueError where they do not divide."""
    return _held("a", tp_size, 0, total_kv_heads)[1]


def _held(side: str, size: int, rank: int, total: int) -> tuple[int, int, int]:
    """First head of the rank, how many it holds, how many ranks hold the same."""
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


class StagingBuffer:
    """`size_bytes` of contiguous uint8 on `device`, contents undefined.

    custom_mem_pool: where the memory comes from, for instance `saver.mem_pool(tag)`, which a peer
    GPU can read once it is exported; CUDA only. On the CPU open `saver.region(tag)` around the call
    instead. The pool is kept as long as the buffer. A buffer on a paused tag must not be touched,
    and its ring has to be empty before the pause.
    """

    def __init__(
        self,
        size_bytes: int,
        device: torch.device | str,
        custom_mem_pool: torch.cuda.MemPool | None = None,
    ) -> None:
        device = torch.device(device)
        if size_bytes <= 0:
            raise ValueError(f"size_bytes must be positive, got {size_bytes}")
        if custom_mem_pool is not None and device.type != "cuda":
            raise ValueError(f"custom_mem_pool needs a CUDA device, got {device}")
        self._pool = custom_mem_pool
        with contextlib.ExitStack() as placed:
            if custom_mem_pool is not None:
                placed.enter_context(torch.cuda.use_mem_pool(custom_mem_pool, device))
            self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.device = self.tensor.device

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel()

    @property
    def address(self) -> int:
        """Returns the address of the first byte, in this process."""
        return self.tensor.data_ptr()

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes `offset` to `offset + nbytes`, uint8; ValueError past the end."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are outside this buffer of {self.size_bytes}"
            )
        return self.tensor[offset : offset + nbytes]


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

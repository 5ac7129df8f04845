"""Decides who gets which bytes of a staging buffer, and when they may be filled: a ring that
promises more than it has.

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

ALLOC_OVERSIZED = -2  # what a writer is sent instead of an offset: the request can never fit


class Assignment(NamedTuple):
    """Bytes `offset`.. of the buffer; `round` goes to the writer with the offset."""

    id: int
    offset: int
    round: int


class Watermark(NamedTuple):
    """All of the rounds before `round` is free, and of this round what begins before `tail`
    (bytes).
    """

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
        """A range of `nbytes` at an aligned offset, perhaps not ready yet; None only if it is
        larger than the ring.
        """
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

        The range's writer must be done, or know that it may not begin. ValueError for an id that is
        not outstanding.
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
        next round that ends past it would wait for ranges of this round, and there are none that
        could still be freed.
        """
        self._round, self._head = self._round + 1, 0
        self.watermark = Watermark(self._round, 0)

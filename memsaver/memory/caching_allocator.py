"""Model of torch's caching allocator: the memory it takes from the driver for given allocations.

`CachingAllocator` serves a request from the smallest cached block that is large enough and splits
off the rest. It joins adjacent free blocks, and takes a new segment if no block is large enough.
Streams share no blocks.
The rules are those of c10/cuda/CUDACachingAllocator.
"""

import bisect
from collections.abc import Hashable
from dataclasses import dataclass, field

from memsaver.ops.layout import round_up

MIB = 1 << 20
_BLOCK = 512
_SMALL = 1 * MIB  # Requests of up to this size share segments of 2 MiB.
_SMALL_SEGMENT = 2 * MIB
_MIDDLE = 10 * MIB  # Requests below this size share segments of 20 MiB.
_MIDDLE_SEGMENT = 20 * MIB
_ROUND = 2 * MIB  # Segments of larger requests are multiples of this size.


@dataclass(eq=False, slots=True)
class _CachedBlock:
    segment: int
    start: int
    size: int
    pool: Hashable
    before: "_CachedBlock | None" = None
    after: "_CachedBlock | None" = None
    free: bool = False


@dataclass
class CachingAllocator:
    """An allocator without memory, which only counts.

    Attributes:
        reserved: Bytes taken from the driver.
        peak: The largest `reserved` since `reset_peak`.
    """

    reserved: int = 0
    peak: int = 0
    # Sorted (size, segment, start) of free blocks, by pool.
    _cached: dict[Hashable, list[tuple[int, int, int]]] = field(default_factory=dict)
    _at: dict[tuple[int, int], _CachedBlock] = field(default_factory=dict)
    _live: dict[Hashable, _CachedBlock] = field(default_factory=dict)
    _segments: int = 0

    def allocate(self, key: Hashable, nbytes: int, stream: Hashable = 0) -> None:
        """Allocate a block on a stream; `key` names it for `free`."""
        size = max(_BLOCK, round_up(nbytes, _BLOCK))
        pool = (stream, size <= _SMALL)
        block = self._best(pool, size) or self._new_segment(pool, size)
        self._split(block, size)
        block.free = False
        self._live[key] = block

    def free(self, key: Hashable) -> None:
        block = self._live.pop(key)
        if (after := block.after) is not None and after.free:
            self._uncache(after)
            self._join(block, after)
        if (before := block.before) is not None and before.free:
            self._uncache(before)
            self._join(before, block)
            block = before
        self._cache(block)

    def holds(self, key: Hashable) -> bool:
        return key in self._live

    def empty_cache(self) -> None:
        """Return the segments without a live block to the driver."""
        for pool, cached in self._cached.items():
            resident = []
            for entry in cached:
                block = self._at[entry[1:]]
                if block.before is None and block.after is None:
                    self.reserved -= block.size
                    del self._at[entry[1:]]
                else:
                    resident.append(entry)
            self._cached[pool] = resident

    def clear(self) -> None:
        """Forget all blocks."""
        self.reserved = self.peak = 0
        for blocks in (self._cached, self._at, self._live):
            blocks.clear()

    def reset_peak(self) -> None:
        self.peak = self.reserved

    def _best(self, pool: Hashable, size: int) -> _CachedBlock | None:
        cached = self._cached.setdefault(pool, [])
        place = bisect.bisect_left(cached, (size, 0, 0))
        if place == len(cached):
            return None
        _, segment, start = cached.pop(place)
        return self._at[segment, start]

    def _new_segment(self, pool: tuple[Hashable, bool], size: int) -> _CachedBlock:
        large = _MIDDLE_SEGMENT if size < _MIDDLE else round_up(size, _ROUND)
        whole = _SMALL_SEGMENT if pool[1] else large
        self._segments += 1
        self.reserved += whole
        self.peak = max(self.peak, self.reserved)
        block = _CachedBlock(self._segments, 0, whole, pool)
        self._at[block.segment, 0] = block
        return block

    def _split(self, block: _CachedBlock, size: int) -> None:
        left = block.size - size
        small = isinstance(block.pool, tuple) and block.pool[1]
        if left < _BLOCK if small else left <= _SMALL:
            return
        rest = _CachedBlock(block.segment, block.start + size, left, block.pool, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._at[rest.segment, rest.start] = rest
        self._cache(rest)

    def _cache(self, block: _CachedBlock) -> None:
        block.free = True
        bisect.insort(
            self._cached.setdefault(block.pool, []), (block.size, block.segment, block.start)
        )

    def _uncache(self, block: _CachedBlock) -> None:
        cached = self._cached[block.pool]
        cached.pop(bisect.bisect_left(cached, (block.size, block.segment, block.start)))

    def _join(self, block: _CachedBlock, after: _CachedBlock) -> None:
        del self._at[after.segment, after.start]
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block

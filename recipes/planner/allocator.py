"""The caching allocator of torch, reckoned without a GPU: how much it takes of the driver for a
sequence of allocations; and the log of what a process asks of it.

`CachingAllocator` serves a request from the smallest cached block that holds it, splits off what is
left, joins free neighbours, and takes a new segment where no block is large enough; streams share
nothing.
Source: c10/cuda/CUDACachingAllocator.

A log of few layers is cut into blocks: a layer's forward, a layer's backward, and what is between.
A layer in the middle, or several where layers alternate, are the pattern of all that are left out:
their blocks are repeated, and what they name of their neighbours is taken from the neighbours of
each copy.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, groupby
from typing import Any

from memsaver.ops.layout import round_up
from recipes.setup.models import meta_model

MIB = 1 << 20
_BLOCK = 512
_SMALL = 1 * MIB  # requests up to it share segments of 2 MiB
_SMALL_SEGMENT = 2 * MIB
_MIDDLE = 10 * MIB  # requests below it share segments of 20 MiB
_MIDDLE_SEGMENT = 20 * MIB
_ROUND = 2 * MIB  # of a larger request's own segment


@dataclass(eq=False, slots=True)
class _CachedBlock:
    segment: int
    start: int
    size: int
    pool: Hashable
    before: _CachedBlock | None = None
    after: _CachedBlock | None = None
    free: bool = False


@dataclass
class CachingAllocator:
    """`reserved`: bytes held of the driver. `peak`: the most of them since `reset_peak`."""

    reserved: int = 0
    peak: int = 0
    # (size, segment, start), sorted.
    _cached: dict[Hashable, list[tuple[int, int, int]]] = field(default_factory=dict)
    _at: dict[tuple[int, int], _CachedBlock] = field(default_factory=dict)
    _live: dict[Hashable, _CachedBlock] = field(default_factory=dict)
    _segments: int = 0

    def allocate(self, key: Hashable, nbytes: int, stream: Hashable = 0) -> None:
        """key: to name the allocation by in `free`. stream: of the work that asks for it."""
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
        """Segments without a living block go back to the driver."""
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


_AROUND = 1, 2  # neighbours before and behind a pattern: layers prefetch for each other

Block = tuple[int, str, int]
"""(number of the forward pass, "forward" or "backward", layer), or (running number, "", 0) between
them.
"""
Key = tuple[Block, int]
"""An allocation: the block that made it, and its number in there."""


@dataclass(frozen=True, slots=True)
class Entry:
    """what: "allocate" (key, nbytes, stream), "free" (key), "empty_cache", or "read"."""

    block: Block
    what: str
    key: Key = ((0, "", 0), 0)
    nbytes: int = 0
    stream: Hashable = 0


@dataclass
class Log:
    entries: list[Entry] = field(default_factory=list)
    block: Block = (0, "", 0)
    _counts: dict[Block, int] = field(default_factory=dict)
    _passes: int = 0
    _between: int = 0

    def enter(self, kind: str, layer: int) -> None:
        """Puts what follows into a layer's block. A forward of layer 0 begins a new pass."""
        if kind == "forward" and layer == 0:
            self._passes += 1
        self.block = (self._passes, kind, layer)

    def leave(self) -> None:
        """Puts what follows between blocks."""
        self._between += 1
        self.block = (self._between, "", 0)

    def new_key(self) -> Key:
        number = self._counts.get(self.block, 0)
        self._counts[self.block] = number + 1
        return self.block, number

    def add(
        self, what: str, key: Key = ((0, "", 0), 0), nbytes: int = 0, stream: Hashable = 0
    ) -> None:
        self.entries.append(Entry(self.block, what, key, nbytes, stream))


def repeated_layers(fields: dict[str, Any]) -> tuple[int, int, int]:
    """Layers that stand for others: number of the first, how many, and how often they come again.

    They are a period of the model's layers. One more is traced before and one behind them, as the
    first and the last layer of each kind do more: they make and free what all of a kind share.
    """
    kinds = _kinds(meta_model(fields).get_decoder())
    count, (before, after) = len(kinds), _AROUND
    # At the least, a period of all that is left repeats; it comes once.
    spans = combinations(range(count + 1), 2)
    repeats = ((i, j) for i, j in spans if kinds[j:] == kinds[i : i + count - j])
    start, end = min(repeats, key=lambda span: span[1])
    first, period = end + before, end - start
    return first, period, max(0, (count - first - after) // period - 2)


def _kinds(decoder: Any) -> list[int]:
    """A number for each layer, the same where parameters are, and what the config's lists say."""
    count = len(decoder.layers)
    config = decoder.config.to_dict().values()
    lists = [value for value in config if isinstance(value, list) and len(value) == count]
    found: dict[Hashable, int] = {}
    kinds = []
    for index, layer in enumerate(decoder.layers):
        shapes = tuple((name, param.shape) for name, param in layer.named_parameters())
        said = tuple(str(each[index]) for each in lists)
        kinds.append(found.setdefault((shapes, said), len(found)))
    return kinds


def with_layers(entries: list[Entry], first: int, period: int, copies: int) -> Iterator[Entry]:
    """The entries of a model whose `period` layers from `first` on come `copies` times more."""
    pattern, shifts = range(first, first + period), range(0, (copies + 1) * period, period)

    def part(entry: Entry) -> Hashable:
        number, kind, layer = entry.block
        return (number, kind) if kind and layer in pattern else entry.block

    for _, group in groupby(entries, key=part):
        together = list(group)
        block = together[0].block
        if kind := block[1]:
            ways = _shifts_of(block, pattern, shifts)
            for shift in ways if kind == "forward" else reversed(ways):
                yield from (_shifted(entry, shift) for entry in together)
        else:  # what frees something of the pattern from outside frees that of every copy
            for entry in together:
                ways = _shifts_of(entry.key[0], pattern, shifts)
                yield from (_shifted(entry, shift) for shift in ways)


def _shifts_of(block: Block, pattern: range, shifts: range) -> range:
    """Returns by how many layers a block moves: in the pattern all ways, behind it the furthest."""
    _, kind, layer = block
    if not kind or layer < pattern.start:
        return shifts[:1]
    return shifts if layer in pattern else shifts[-1:]


def _shifted(entry: Entry, shift: int) -> Entry:
    (number, kind, layer), count = entry.key
    if not kind:
        return entry
    return Entry(
        entry.block, entry.what, ((number, kind, layer + shift), count), entry.nbytes, entry.stream
    )


def replay(entries: Iterator[Entry]) -> list[tuple[int, int]]:
    """Bytes that torch holds at each "read", and the most since the one before.

    A ValueError for entries that free what was never taken: the layers are not alike.
    """
    allocator, found = CachingAllocator(), []
    for entry in entries:
        if entry.what == "allocate":
            allocator.allocate(entry.key, entry.nbytes, entry.stream)
        elif entry.what == "free":
            if not allocator.holds(entry.key):
                text = f"{entry.key} is freed in {entry.block} and was never made"
                raise ValueError(f"layers are not alike: {text}")
            allocator.free(entry.key)
        elif entry.what == "empty_cache":
            allocator.empty_cache()
        else:
            found.append((allocator.reserved, allocator.peak))
            allocator.reset_peak()
    return found

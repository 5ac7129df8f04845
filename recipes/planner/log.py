"""Logs in order what a process asks of torch's allocator, and how one with more layers would ask.

A trace of few layers is cut into blocks: a layer's forward, a layer's backward, and what is
between. A layer in the middle, or several where layers alternate, are the pattern of all that are
left out: their blocks are repeated, and what they name of their neighbours is taken from the
neighbours of each copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from recipes.planner.allocator import CachingAllocator

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

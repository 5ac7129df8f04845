"""Logs in order what a process asks of torch's allocator, and how one with more layers would ask.

A trace of few layers is cut into blocks: a layer's forward, a layer's backward, and what is
between. A layer in the middle, or several where layers alternate, are the pattern of all that are
left out: their blocks are repeated, and what they name of their neighbours is taken from the
neighbours of each copy.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, groupby
from typing import Any

from recipes.planner.allocator import CachingAllocator
from recipes.setup.models import meta_model

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

"""A heap that is kept between evictions.

Outdated entries stay in it and are put right when they come up.
"""

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Rank = tuple[int, ...]
_SLACK = 64


class EvictionQueue(Generic[T]):
    """Items, the one of lowest `rank` first. `push` and `pop` cost O(log n) amortised, `discard`
    O(1).

    The rank of an item that waits may grow: nothing need be done then, as its entry comes up early
    and is put right. An item whose rank falls has to be pushed again. The heap holds at most twice
    as many entries as there are items (and a few): past that it is rebuilt without the outdated
    ones, which the pushes since the last time have paid for.
    """

    def __init__(self, rank: Callable[[T], Rank]) -> None:
        self._rank = rank
        # entries are flat, (*rank, number of the push, item): nested tuples take twice as long to
        # compare
        self._heap: list[tuple[Any, ...]] = []
        self._live: dict[T, tuple[Any, ...]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: T) -> bool:
        return item in self._live

    @property
    def entries(self) -> int:
        """Counts the heap's entries, outdated ones too."""
        return len(self._heap)

    def is_right(self, item: T, wanted: bool) -> bool:
        """Tells whether an item is queued exactly where that is `wanted`, and comes up in time."""
        entry = self._live.get(item)
        if entry is None or not wanted:
            return (entry is not None) == wanted
        return entry[:-2] <= self._rank(item)

    def push(self, item: T) -> None:
        """Adds an item, or notices that its rank fell."""
        queued, rank = self._live.get(item), self._rank(item)
        if queued is not None and queued[:-2] <= rank:
            return
        heapq.heappush(self._heap, self._entry(item, rank))
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        self._live.pop(item, None)

    def pop(self) -> T:
        """Takes the item of lowest rank; IndexError without one."""
        while True:
            entry = self._heap[0]
            item: T = entry[-1]
            if self._live.get(item) is not entry:
                heapq.heappop(self._heap)
            elif entry[:-2] != (rank := self._rank(item)):
                heapq.heapreplace(self._heap, self._entry(item, rank))
            else:
                heapq.heappop(self._heap)
                del self._live[item]
                return item

    def _entry(self, item: T, rank: Rank) -> tuple[Any, ...]:
        """Its only one that counts from here on."""
        # between equal ranks the order of pushes decides; items are never compared
        self._pushes += 1
        entry = self._live[item] = (*rank, self._pushes, item)
        return entry

"""A heap that is kept between evictions. Outdated entries stay in it and are skipped when they come up."""

import heapq
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Rank = tuple[int, ...]
_SLACK = 64


class EvictionQueue(Generic[T]):
    """Items with a rank each, the lowest first. `push` and `pop` cost O(log n) amortised, `discard` O(1).

    The heap holds at most twice as many entries as there are items (and a few): past that it is rebuilt without the
    outdated ones, which the pushes since the last time have paid for.
    """

    def __init__(self) -> None:
        # entries are flat, (*rank, number of the push, item): nested tuples take twice as long to compare
        self._heap: list[tuple[Any, ...]] = []
        self._live: dict[T, tuple[Any, ...]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: T) -> bool:
        return item in self._live

    def rank(self, item: T) -> Rank | None:
        entry = self._live.get(item)
        return None if entry is None else entry[:-2]

    def push(self, item: T, rank: Rank) -> None:
        """Adds an item, or gives it another rank."""
        if self.rank(item) == rank:
            return
        self._pushes += 1  # between equal ranks the order of pushes decides; items are never compared
        entry = (*rank, self._pushes, item)
        self._live[item] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        self._live.pop(item, None)

    def pop(self) -> T:
        """Takes the item of lowest rank; IndexError without one."""
        while True:
            entry = heapq.heappop(self._heap)
            item: T = entry[-1]
            if self._live.get(item) is entry:
                del self._live[item]
                return item

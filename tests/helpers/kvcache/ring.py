"""Writers and a reader around a staging ring, taking turns at random."""

import random
from collections.abc import Sequence

from kvcache.staging import StagingAllocator, Watermark, may_fill


class Deadlock(AssertionError):
    """Ranges wait, and nobody can move."""


class Overlap(AssertionError):
    """A writer was let into bytes that are not read yet."""


def play(ring: StagingAllocator, sizes: Sequence[int], turns: random.Random) -> int:
    """Passes transfers of these sizes through the ring to the end; how many ranges waited at most."""
    model = _Model(ring, list(sizes), turns)
    while model.todo or ring.outstanding:
        model.turn()
    assert ring.watermark == model.seen[-1]
    return model.most_waiting


class _Model:
    def __init__(self, ring: StagingAllocator, todo: list[int], turns: random.Random) -> None:
        self.ring, self.todo, self.turns = ring, todo, turns
        self.waiting: dict[int, tuple[int, int, int]] = {}  # id -> offset, end, round: assigned, not filled
        self.filled: dict[int, tuple[int, int]] = {}
        self.owner: list[int | None] = [None] * ring.size_bytes  # of every byte that is filled and not freed
        self.seen: list[Watermark] = [ring.watermark]  # as sent to the writers; they may know an old one
        self.known = 0
        self.most_waiting = 0

    def turn(self) -> None:
        ready = [id for id in self.waiting if self._ready(id)]
        moves = [
            *([self._assign] if self.todo else []),
            *([lambda: self._fill(self.turns.choice(ready))] if ready else []),
            *([lambda: self._free(self.turns.choice(list(self.filled)))] if self.filled else []),
            *([self._deliver] if self.known < len(self.seen) - 1 else []),
        ]
        if not moves:
            raise Deadlock(f"{self.waiting} wait at watermark {self.ring.watermark}")
        self.turns.choice(moves)()

    def _ready(self, id: int) -> bool:
        _, end, round = self.waiting[id]
        return may_fill(round, end, self.seen[self.known])

    def _assign(self) -> None:
        nbytes = self.todo.pop()
        assigned = self.ring.assign(nbytes)
        if nbytes > self.ring.size_bytes:
            assert assigned is None
            return
        assert assigned is not None
        id, offset, round = assigned
        assert offset % self.ring.alignment == 0
        assert 0 <= offset <= offset + nbytes <= self.ring.size_bytes
        self.waiting[id] = (offset, offset + nbytes, round)
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def _fill(self, id: int) -> None:
        offset, end, _ = self.waiting.pop(id)
        if any(owner is not None for owner in self.owner[offset:end]):
            raise Overlap(f"range {id} at bytes {offset} to {end} is let into {set(self.owner[offset:end])}")
        self.owner[offset:end] = [id] * (end - offset)
        self.filled[id] = (offset, end)

    def _free(self, id: int) -> None:
        offset, end = self.filled.pop(id)
        self.owner[offset:end] = [None] * (end - offset)
        watermark = self.ring.free(id)
        assert watermark == self.ring.watermark >= self.seen[-1]  # never back
        self.seen.append(watermark)

    def _deliver(self) -> None:
        self.known = self.turns.randint(self.known + 1, len(self.seen) - 1)

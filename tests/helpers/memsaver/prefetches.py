"""A gate that delays the copies of a prefetch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from memsaver import MemorySaver
from memsaver.tag import prefetch as prefetches

MIB = 1 << 20


class Gate:
    """Gate in front of the copies of a prefetch, which lets a given number of pieces pass."""

    def __init__(self, saver: MemorySaver) -> None:
        self._feed = saver.backend.feed
        self._let = threading.Semaphore(0)
        self.passed = list[int]()  # first addresses, piece by piece
        self.failing: Exception | None = None

    def feed(self, pieces: Any, queued: Any, inward: bool) -> None:
        self._feed(self._gated(pieces), queued, inward)

    def _gated(self, pieces: Any) -> Iterator[Any]:
        for piece in pieces:
            assert self._let.acquire(timeout=60)
            if self.failing is not None:
                raise self.failing
            self.passed.append(piece[0][0])
            yield piece

    def let(self, count: int) -> None:
        self._let.release(count)

    def trickle(self) -> None:
        """Allow single pieces through for a while, then all of them."""
        for _ in range(400):
            self.let(1)
            time.sleep(1e-5)
        self.let(100_000)


@contextmanager
def gated(saver: MemorySaver, piece: int = MIB) -> Iterator[Gate]:
    """Delay the prefetches of a saver, in pieces of at most `piece` bytes."""
    backend, gate = saver.backend, Gate(saver)
    del saver  # a test may end the saver inside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "feed", gate.feed)
        patch.setattr(prefetches, "PIECE", piece)
        try:
            yield gate
        finally:
            gate.let(1000)

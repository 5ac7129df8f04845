"""Content that comes back as slowly as a test wants it."""

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
    """Stands before the copies of a prefetch, and lets as many pieces pass as it is told."""

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
        """Lets single pieces pass for a while, then all."""
        for _ in range(400):
            self.let(1)
            time.sleep(1e-5)
        self.let(100_000)


@contextmanager
def gated(saver: MemorySaver, piece: int = MIB) -> Iterator[Gate]:
    """Inside, pieces of at most so many bytes come when they are let."""
    backend, gate = saver.backend, Gate(saver)
    del saver  # it may end inside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "feed", gate.feed)
        patch.setattr(prefetches, "PIECE", piece)
        try:
            yield gate
        finally:
            gate.let(1000)

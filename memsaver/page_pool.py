"""Physical memory without a place: kept by a pause, taken by the next resume or growth of any tag of the saver."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from memsaver.allocator import shim
from memsaver.backends.base import Backend
from memsaver.errors import BackendError

LARGEST = 1 << 30  # bytes: mapping 60 GiB in such pieces takes 3.4 ms on an H100, in one piece 1.3 ms


def piece_sizes(nbytes: int, granularity: int) -> list[int]:
    """Sizes of the extents for ``nbytes`` that are to be kept: few, and alike for every tag, so that any tag can use
    another's: whole LARGEST ones, then every power of two times the granularity at most once."""
    sizes = [LARGEST] * (nbytes // LARGEST)
    rest, size = nbytes % LARGEST, LARGEST // 2
    while rest >= granularity and size >= granularity:
        if rest >= size:
            sizes.append(size)
            rest -= size
        size //= 2
    return sizes


class PagePool:
    """Extents that this saver holds and no tag maps; they count as committed. ``retained``: by how many bytes the
    driver refused to take memory back so far; those stay here."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.retained = 0

    @property
    def extents(self) -> list[shim.Extent]:
        return shim.pool(self._backend.phys)

    @property
    def held_bytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)

    def keep(self, extents: Sequence[shim.Extent]) -> None:
        shim.pool_put(self._backend.phys, extents)

    def give_back(self, extents: Sequence[shim.Extent]) -> None:
        """To the driver. What it refuses stays in the pool, where a later ``trim`` or a shortage tries again."""
        for extent in extents:
            try:
                self._backend.release(extent.handle, extent.nbytes)
            except BackendError:
                self.retained += extent.nbytes
                self.keep([extent])

    def obtain(self, nbytes: int, undo: contextlib.ExitStack, whole: bool) -> list[shim.Extent]:
        """Extents of ``nbytes`` together: kept ones, and new ones for the rest.

        whole: the rest as one extent, else in pieces that other tags can use. Raises ``ShortOfMemory``; what was taken
        goes where it came from when ``undo`` unwinds.
        """
        taken = shim.pool_take(self._backend.phys, nbytes)
        undo.callback(self.keep, taken)
        rest = nbytes - sum(extent.nbytes for extent in taken)
        made: list[shim.Extent] = []
        undo.callback(self.give_back, made)
        for size in [rest] * bool(rest) if whole else piece_sizes(rest, self._backend.granularity):
            made.append(self._backend.create(size))
        return taken + made

    def trim(self, nbytes: int | None = None) -> int:
        """Give at least ``nbytes`` (None: all) of the kept memory back to the driver; bytes given back."""
        return shim.pool_drop(self._backend.phys, self.held_bytes if nbytes is None else nbytes)

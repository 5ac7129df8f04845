"""A paused tag's memory coming back piece by piece, each filled while the next is fetched."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from memsaver.native import shim
from memsaver.tag.arena import Arena
from memsaver.vmm.backend import Backend, Waitable


class Refill:
    """Extents mapped behind a paused tag one by one, each filled from the host once it is there."""

    def __init__(
        self, backend: Backend, into: Arena, undo: contextlib.ExitStack, late: bool = False
    ) -> None:
        """late: the content comes, and is checked, when the memory is there (`Arrival`)."""
        self._backend, self._into, self._undo, self._late = backend, into, undo, late
        self._events: list[Waitable] = []
        self.placed: list[shim.Extent] = []
        self.missing = into.committed_when_paused

    def put(self, extents: Sequence[shim.Extent]) -> None:
        """Puts extents of at most ``missing`` bytes behind those that are there."""
        at = self._into.committed_when_paused - self.missing
        self.placed += self._into.map(extents, at, self._undo)
        nbytes = sum(extent.nbytes for extent in extents)
        self.missing -= nbytes
        if nbytes and not self._late:
            self.fill(at, nbytes)

    def fill(self, at: int, nbytes: int) -> None:
        if (backup := self._into.backup) is None:
            return
        if event := backup.fill(self._backend, self._into.address, at, nbytes):
            self._events.append(event)
            self._undo.callback(event.synchronize)  # before the unmapping

    def finish(self) -> None:
        """All memory is there, and the content unless it is late, as far as debug mode knows."""
        shim.set_extents(self._into.slot, self.placed)
        self._undo.callback(shim.set_extents, self._into.slot, [])
        for event in self._events:
            event.synchronize()
        if (backup := self._into.backup) is not None:
            backup.restore(self._backend, self._into.address, self._into.committed_when_paused)
        if not self._late:
            self._into.verify()

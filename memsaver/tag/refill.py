"""A paused tag's memory coming back piece by piece, each filled while the next is fetched; one tag
out and another in, extent by extent into the first's memory, both directions busy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from memsaver.content import HostBackup
from memsaver.memory.backend import Backend, ShortOfMemory, Waitable
from memsaver.memory.page_pool import LARGEST, PagePool
from memsaver.native import shim
from memsaver.system.device_lock import undone_under
from memsaver.tag.arena import Arena


class Refill:
    """Extents mapped behind a paused tag one by one, each filled from the host once it is there."""

    def __init__(
        self, backend: Backend, into: Arena, undo: contextlib.ExitStack, late: bool = False
    ) -> None:
        """late: the content comes, and is checked, when the memory is there (`Prefetch`)."""
        self._backend, self._into, self._undo, self._late = backend, into, undo, late
        self._events: list[Waitable] = []
        self.placed: list[shim.Extent] = []
        self.missing = into.committed_when_paused

    def put(self, extents: Sequence[shim.Extent]) -> None:
        """Put extents of at most ``missing`` bytes behind those that are there."""
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
        """Conclude: all memory is there, and the content unless it is late."""
        shim.set_extents(self._into.slot, self.placed)
        self._undo.callback(shim.set_extents, self._into.slot, [])
        for event in self._events:
            event.synchronize()
        if (backup := self._into.backup) is not None:
            backup.restore(self._backend, self._into.address, self._into.committed_when_paused)


def _unserved(sizes: Sequence[int], needed: int) -> int:
    """Return what is left of ``needed`` if whole extents of these sizes serve it in order."""
    for size in sizes:
        needed -= size if size <= needed else 0
    return needed


class Swap:
    """``out`` is active and frozen, ``into`` is paused; the device has nothing to do with either.

    What ``run`` raises has changed nothing: extents that had gone over come back, their content
    from the copy.
    """

    def __init__(
        self, backend: Backend, pool: PagePool, lock: contextlib.AbstractContextManager[object]
    ) -> None:
        self._backend, self._pool, self._lock = backend, pool, lock

    def run(
        self, out: Arena, copy: HostBackup | None, fresh: bool, into: Arena
    ) -> list[shim.Extent]:
        """copy: for the content of ``out``, which is not in it yet if it is ``fresh``.

        Returns the extents of ``out`` that ``into`` had no use for; nothing maps them.
        """
        leaving = shim.extents(out.slot)
        with undone_under(self._lock) as undo:
            undo.callback(self._backend.synchronize)  # whatever is still being copied
            copied = [self._start_out(out, copy if fresh else None, extent) for extent in leaving]
            refill = Refill(self._backend, into, undo)
            with self._lock:
                # first: short of memory, nothing was changed
                head, tail = self._own(leaving, refill.missing, undo)
                refill.put(head)
            left = []
            for extent, event in zip(leaving, copied, strict=True):
                if event is not None:
                    event.synchronize()
                with self._lock:
                    self._take_away(out, copy, extent, undo)
                    if extent.nbytes > refill.missing:
                        left.append(extent)
                    else:
                        refill.put([extent])
            if tail:
                with self._lock:
                    refill.put(tail)
            refill.finish()
            shim.set_extents(out.slot, [])
            undo.pop_all()
        return left

    def _start_out(
        self, out: Arena, copy: HostBackup | None, extent: shim.Extent
    ) -> Waitable | None:
        if copy is None:
            return None
        runs = copy.part(extent.offset, extent.nbytes)
        return self._backend.start_copy(
            [(host, out.address + at, nbytes) for at, host, nbytes in runs]
        )

    def _own(
        self, leaving: Sequence[shim.Extent], needed: int, undo: contextlib.ExitStack
    ) -> tuple[list[shim.Extent], list[shim.Extent]]:
        """Obtain what ``into`` gets beside the extents of ``out``, to be put before and after them.

        That is what the extents cannot serve; and at most LARGEST bytes for a head start, so that
        the way in need not wait for the way out, if they are there. Raises ``ShortOfMemory``.
        """
        sizes = [extent.nbytes for extent in leaving]
        head = self._pool.obtain(_unserved(sizes, needed), undo)
        rest = needed - sum(extent.nbytes for extent in head)
        try:
            with contextlib.ExitStack() as spare:
                start = self._pool.obtain_most(min(rest, LARGEST), spare)
                rest -= sum(extent.nbytes for extent in start)
                tail = self._pool.obtain(_unserved(sizes, rest), spare)
                undo.enter_context(spare.pop_all())
        except ShortOfMemory:
            return head, []
        return head + start, tail

    def _take_away(
        self, out: Arena, copy: HostBackup | None, extent: shim.Extent, undo: contextlib.ExitStack
    ) -> None:
        address = out.address + extent.offset
        self._backend.unmap(address, extent.nbytes)

        def put_back() -> None:
            self._backend.map(address, extent.nbytes, extent.handle)
            self._backend.set_access(address, extent.nbytes)
            runs = copy.part(extent.offset, extent.nbytes) if copy is not None else ()
            self._backend.copy([(out.address + at, host, nbytes) for at, host, nbytes in runs])

        undo.callback(put_back)

"""A paused tag's memory coming back piece by piece, each filled while the next is fetched; one tag
out and another in, extent by extent into the first's memory, both directions busy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from memsaver.backup.on_host import HostBackup
from memsaver.native import shim
from memsaver.tag.arena import Arena
from memsaver.vmm.backend import Backend, Waitable
from memsaver.vmm.page_pool import LARGEST, PagePool


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


def goes_piecewise(sizes: Sequence[int], needed: int) -> bool:
    """Can extents of these sizes serve ``needed`` bytes so that at most LARGEST bytes more than
    must be are held?

    Not if they are too large to fit one after the other: an extent cannot be split.
    """
    head = min(needed, LARGEST)
    return head + _unserved(sizes, needed - head) <= max(0, needed - sum(sizes)) + LARGEST


def _unserved(sizes: Sequence[int], needed: int) -> int:
    """Tells what is left of ``needed`` if whole extents of these sizes serve it, in their order."""
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
        with contextlib.ExitStack() as undo:
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
        """Obtains what ``into`` gets beside the extents of ``out``; raises ``ShortOfMemory``.

        That is at most LARGEST bytes for a head start, so that the way in need not wait for the way
        out; and what those extents cannot serve.
        """
        head = self._pool.obtain_most(min(needed, LARGEST), undo)
        left = _unserved(
            [extent.nbytes for extent in leaving], needed - sum(extent.nbytes for extent in head)
        )
        return head, self._pool.obtain(left, undo)

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

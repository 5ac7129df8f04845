"""Refill of a paused tag with memory and content, and the swap of two tags.

A refill copies content into one extent while the next one is obtained. A swap moves one tag's
extents to another, and copies content in both directions at the same time.
"""

import contextlib
from collections.abc import Sequence

from memsaver.content import HostBackup
from memsaver.memory.backend import Backend, ShortOfMemory, Waitable
from memsaver.memory.page_pool import LARGEST, PagePool
from memsaver.native import shim
from memsaver.system.device_lock import undone_under
from memsaver.tag.arena import Arena


class Refill:
    """Restore of one paused tag: extents are mapped one by one and filled with saved content."""

    def __init__(
        self, backend: Backend, into: Arena, undo: contextlib.ExitStack, late: bool = False
    ) -> None:
        """Begin a refill that maps nothing yet; with `late`, a `Prefetch` restores the content.

        `undo` receives the steps that undo the refill.
        """
        self._backend, self._into, self._undo, self._late = backend, into, undo, late
        self._events: list[Waitable] = []
        self.placed: list[shim.Extent] = []  # mapped, with their offsets
        self.missing = into.committed_when_paused  # bytes that still lack memory

    def put(self, extents: Sequence[shim.Extent]) -> None:
        """Map extents of at most `missing` bytes after the mapped ones, and begin to fill them."""
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
            self._undo.callback(event.synchronize)  # on undo, wait before unmapping

    def finish(self) -> None:
        """Enter the extents into the shim's table, and wait for the content unless it is late."""
        shim.set_extents(self._into.slot, self.placed)
        self._undo.callback(shim.set_extents, self._into.slot, [])
        for event in self._events:
            event.synchronize()
        if (backup := self._into.backup) is not None:
            backup.restore(self._backend, self._into.address, self._into.committed_when_paused)


def _unserved(sizes: Sequence[int], needed: int) -> int:
    """Return how many of the needed bytes remain after whole extents are used in order."""
    for size in sizes:
        needed -= size if size <= needed else 0
    return needed


class Swap:
    """Swap of two tags of one saver: one leaves the device, and another takes over its memory.

    The leaving tag is frozen, the entering tag is paused, and the device uses neither of them. If
    `run` raises, nothing has changed: extents that had moved are mapped back, and their content is
    restored from the copy.
    """

    def __init__(
        self, backend: Backend, pool: PagePool, lock: contextlib.AbstractContextManager[object]
    ) -> None:
        self._backend, self._pool, self._lock = backend, pool, lock

    def run(
        self, out: Arena, copy: HostBackup | None, fresh: bool, into: Arena
    ) -> list[shim.Extent]:
        """Move the memory of `out` to `into`, and return the unmapped extents that are left over.

        If the backup `copy` is `fresh`, the content of `out` is copied into it first. A `copy` of
        ``None`` discards the content.
        """
        leaving = shim.extents(out.slot)
        with undone_under(self._lock) as undo:
            undo.callback(self._backend.synchronize)  # wait for copies before undoing
            copied = [self._start_out(out, copy if fresh else None, extent) for extent in leaving]
            refill = Refill(self._backend, into, undo)
            with self._lock:
                # New memory comes first: a shortage then has nothing to undo.
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
        """Obtain the memory that the entering tag needs in addition to the leaving extents.

        If available, up to LARGEST bytes are added as a head start, so that copies to the device
        need not wait for copies from it. The first list of extents is to be mapped before the
        leaving ones, the second after them.
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

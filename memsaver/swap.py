"""One tag out and another in, extent by extent: the memory of the first serves the second, both directions busy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from memsaver.allocator import shim
from memsaver.arena import Arena
from memsaver.arrival import Arrival
from memsaver.backends.base import Backend
from memsaver.backup.host import HostBackup, Waitable
from memsaver.page_pool import LARGEST, PagePool


def goes_piecewise(sizes: Sequence[int], needed: int) -> bool:
    """Can extents of these sizes serve ``needed`` bytes so that at most LARGEST bytes more than must be are held?

    Not if they are too large to fit one after the other: an extent cannot be split.
    """
    head = min(needed, LARGEST)
    missing = needed - head
    for size in sizes:
        missing -= size if size <= missing else 0
    return head + missing <= max(0, needed - sum(sizes)) + LARGEST


class Swap:
    """``out`` is active and frozen, ``into`` is paused; the device has nothing to do with either.

    What ``run`` raises has changed nothing: extents that had gone over come back, their content from the copy.
    """

    def __init__(self, backend: Backend, pool: PagePool, lock: contextlib.AbstractContextManager[object]) -> None:
        self._backend, self._pool, self._lock = backend, pool, lock

    def run(self, out: Arena, copy: HostBackup | None, fresh: bool, into: Arena) -> list[shim.Extent]:
        """copy: for the content of ``out``, which is not in it yet if it is ``fresh``.

        Returns the extents of ``out`` that ``into`` had no use for; nothing maps them.
        """
        leaving = shim.extents(out.slot)
        with contextlib.ExitStack() as undo:
            undo.callback(self._backend.synchronize)  # whatever is still being copied
            copied = [self._start_out(out, copy if fresh else None, extent) for extent in leaving]
            arrival = Arrival(self._backend, into, undo)
            self._head_start(arrival, undo)
            left = []
            for extent, event in zip(leaving, copied, strict=True):
                if event is not None:
                    event.synchronize()
                with self._lock:
                    self._take_away(out, copy, extent, undo)
                    if extent.nbytes > arrival.missing:
                        left.append(extent)
                    else:
                        arrival.put([extent])
            self._rest(arrival, undo)
            arrival.finish()
            shim.set_extents(out.slot, [])
            undo.pop_all()
        return left

    def _start_out(self, out: Arena, copy: HostBackup | None, extent: shim.Extent) -> Waitable | None:
        if copy is None:
            return None
        runs = copy.part(extent.offset, extent.nbytes)
        return self._backend.start_copy([(host, out.address + at, nbytes) for at, host, nbytes in runs])

    def _head_start(self, arrival: Arrival, undo: contextlib.ExitStack) -> None:
        """At most LARGEST bytes beside what ``out`` holds, so that the way in need not wait for the way out."""
        with self._lock:
            arrival.put(self._pool.obtain_most(min(arrival.missing, LARGEST), undo))

    def _take_away(self, out: Arena, copy: HostBackup | None, extent: shim.Extent, undo: contextlib.ExitStack) -> None:
        address = out.address + extent.offset
        self._backend.unmap(address, extent.nbytes)

        def put_back() -> None:
            self._backend.map(address, extent.nbytes, extent.handle)
            self._backend.set_access(address, extent.nbytes)
            runs = copy.part(extent.offset, extent.nbytes) if copy is not None else ()
            self._backend.copy([(out.address + at, host, nbytes) for at, host, nbytes in runs])

        undo.callback(put_back)

    def _rest(self, arrival: Arrival, undo: contextlib.ExitStack) -> None:
        """What ``out`` had not: from the pool or the driver, ``ShortOfMemory``."""
        if arrival.missing:
            with self._lock:
                arrival.put(self._pool.obtain(arrival.missing, undo))

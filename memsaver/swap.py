"""One tag out and another in, extent by extent: the memory of the first serves the second, both directions busy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from memsaver.allocator import shim
from memsaver.arena import Arena
from memsaver.backends.base import Backend
from memsaver.backup.host import HostBackup, Run, Waitable
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
            arrival = _Arrival(self._backend, into, undo)
            self._head_start(arrival, undo)
            left = []
            for extent, event in zip(leaving, copied, strict=True):
                if event is not None:
                    event.synchronize()
                with self._lock:
                    self._take_away(out, copy, extent, undo)
                    if not arrival.put(extent):
                        left.append(extent)
            self._rest(arrival, left, undo)
            arrival.wait()
            shim.set_extents(into.slot, arrival.placed)
            shim.set_extents(out.slot, [])
            undo.pop_all()
        return left

    def _start_out(self, out: Arena, copy: HostBackup | None, extent: shim.Extent) -> Waitable | None:
        if copy is None:
            return None
        runs = _within(copy.runs(), extent.offset, extent.nbytes)
        return self._backend.start_copy([(host, out.address + at, nbytes) for at, host, nbytes in runs])

    def _head_start(self, arrival: _Arrival, undo: contextlib.ExitStack) -> None:
        """At most LARGEST bytes beside what ``out`` holds, so that the way in need not wait for the way out."""
        with self._lock:
            for extent in self._pool.obtain_most(min(arrival.missing, LARGEST), undo):
                arrival.put(extent)

    def _take_away(self, out: Arena, copy: HostBackup | None, extent: shim.Extent, undo: contextlib.ExitStack) -> None:
        address = out.address + extent.offset
        self._backend.unmap(address, extent.nbytes)

        def put_back() -> None:
            self._backend.map(address, extent.nbytes, extent.handle)
            self._backend.set_access(address, extent.nbytes)
            runs = _within(copy.runs(), extent.offset, extent.nbytes) if copy is not None else ()
            self._backend.copy([(out.address + at, host, nbytes) for at, host, nbytes in runs])

        undo.callback(put_back)

    def _rest(self, arrival: _Arrival, left: list[shim.Extent], undo: contextlib.ExitStack) -> None:
        """What ``out`` had not: from the pool or the driver, ``ShortOfMemory``."""
        if arrival.missing:
            with self._lock:
                for extent in self._pool.obtain(arrival.missing, undo, whole=False):
                    arrival.put(extent)


class _Arrival:
    """Extents mapped behind a paused tag one after the other, each filled as soon as it is there."""

    def __init__(self, backend: Backend, into: Arena, undo: contextlib.ExitStack) -> None:
        self._backend, self._into, self._undo = backend, into, undo
        self._events: list[Waitable] = []
        self.placed: list[shim.Extent] = []
        self.missing = into.committed_when_paused

    def put(self, extent: shim.Extent) -> bool:
        """False: it is more than is missing."""
        if extent.nbytes > self.missing:
            return False
        at = self._into.committed_when_paused - self.missing
        address = self._into.address + at
        self._backend.map(address, extent.nbytes, extent.handle)
        self._undo.callback(self._backend.unmap, address, extent.nbytes)
        self._backend.set_access(address, extent.nbytes)
        self.placed.append(replace(extent, offset=at))
        self.missing -= extent.nbytes
        self._fill(at, extent.nbytes)
        return True

    def _fill(self, at: int, nbytes: int) -> None:
        if isinstance(self._into.backup, HostBackup):
            runs = _within(self._into.backup.runs(), at, nbytes)
            transfers = [(self._into.address + to, host, size) for to, host, size in runs]
            if (event := self._backend.start_copy(transfers, inward=True)) is not None:
                self._events.append(event)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()
        if self._into.backup is not None and not isinstance(self._into.backup, HostBackup):
            self._into.backup.restore(self._backend, self._into.address)


def _within(runs: Iterator[Run] | Sequence[Run], first: int, nbytes: int) -> Iterator[Run]:
    """The parts of runs (offset in the tag, host address, nbytes) that lie in a part of the tag."""
    for offset, host, size in runs:
        start, end = max(offset, first), min(offset + size, first + nbytes)
        if start < end:
            yield start, host + start - offset, end - start

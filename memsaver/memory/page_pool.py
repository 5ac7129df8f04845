"""Physical memory without a place: kept by a pause, taken by the next resume or growth of any tag
of the saver. Handles of other savers' extents: each imported once, until its owner ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memsaver.errors import BackendError, LeaseError, format_bytes
from memsaver.memory.backend import Backend, ShortOfMemory
from memsaver.native import shim

_ARRIVAL_SECONDS = 2.0  # less than a peer waits that revokes


@dataclass
class Import:
    """owner: whatever stands for the connection to the owner. pins: leases that map it now."""

    handle: int
    nbytes: int
    backend: Backend
    owner: object
    pins: int = 0
    orphan: bool = False


class Imports:
    """A table of imports by the extent's id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._by_id: dict[int, Import] = {}
        self._receiving: set[int] = set()
        self._gone: weakref.WeakSet[object] = weakref.WeakSet()

    def add(self, extent_id: int, item: Import) -> None:
        """Looks after the handle from here on; it is released at once if its owner is gone."""
        with self._lock:
            assert extent_id not in self._by_id
            self._by_id[extent_id] = item
            if item.owner in self._gone:
                self._release(extent_id)

    @contextlib.contextmanager
    def receiving(self, ids: Sequence[int]) -> Iterator[None]:
        """Inside, these may be added; their owner, who knows of it, may revoke them: that waits."""
        with self._lock:
            self._receiving.update(ids)
        try:
            yield
        finally:
            with self._lock:
                self._receiving.difference_update(ids)
                self._lock.notify_all()

    def unchanged(self) -> contextlib.AbstractContextManager[object]:
        """Inside, only this thread changes what is here."""
        return self._lock

    def pin(self, ids: Sequence[int]) -> list[int]:
        """The handles; they stay until ``unpin``."""
        with self._lock:
            if any(extent_id not in self._by_id for extent_id in ids):
                raise LeaseError(
                    "the owner has gone, or has revoked the memory; attach again if it is there"
                )
            items = [self._by_id[extent_id] for extent_id in ids]
            for item in items:
                item.pins += 1
            return [item.handle for item in items]

    def unpin(self, ids: Sequence[int]) -> None:
        with self._lock:
            for extent_id in ids:
                item = self._by_id[extent_id]
                item.pins -= 1
                if item.orphan and not item.pins:
                    self._release(extent_id)

    def pinned(self, ids: Sequence[int]) -> bool:
        """Are they all here, each mapped by a lease?"""
        with self._lock:
            return all(
                extent_id in self._by_id and self._by_id[extent_id].pins > 0 for extent_id in ids
            )

    def missing(self, ids: Sequence[int]) -> list[int]:
        with self._lock:
            return [extent_id for extent_id in ids if extent_id not in self._by_id]

    def take(self, extent_id: int) -> int:
        """The handle, which is the caller's from here on; KeyError if it is not here."""
        with self._lock:
            return self._by_id.pop(extent_id).handle

    def drop(self, ids: Sequence[int]) -> list[int]:
        """Release those that no lease maps; the ids of the others."""
        with self._lock:
            self._lock.wait_for(lambda: self._receiving.isdisjoint(ids), _ARRIVAL_SECONDS)
            here = [extent_id for extent_id in ids if extent_id in self._by_id]
            mapped = [extent_id for extent_id in here if self._by_id[extent_id].pins]
            for extent_id in here:
                if extent_id not in mapped:
                    self._release(extent_id)
            return mapped + sorted(self._receiving.intersection(ids))

    def drop_owner(self, owner: object) -> None:
        """The owner is gone: release all of its extents, those that a lease maps when it ends."""
        with self._lock:
            self._gone.add(owner)
            for extent_id in [key for key, item in self._by_id.items() if item.owner is owner]:
                if self._by_id[extent_id].pins:
                    self._by_id[extent_id].orphan = True
                else:
                    self._release(extent_id)

    def after_fork(self) -> None:
        """Starts anew in the child: handles and pins are the parent's."""
        self.__init__()  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._by_id)

    def _release(self, extent_id: int) -> None:
        item = self._by_id.pop(extent_id)
        with contextlib.suppress(BackendError):  # the process goes on, and so does its owner
            item.backend.release(item.handle, 0)


imports = Imports()
"""Of this process."""
os.register_at_fork(after_in_child=imports.after_fork)


# extents more than needed: mapping each costs some 20 us, making them anew has their memory cleared
_MANY = 16
# bytes: mapping 60 GiB in such pieces takes 3.4 ms on an H100, in one piece 1.3 ms
LARGEST = 1 << 30


def piece_sizes(nbytes: int, granularity: int) -> list[int]:
    """Sizes of the extents for ``nbytes`` that are to be kept: few, and alike for every tag, so
    that any tag can use another's: whole LARGEST ones, then every power of two times the
    granularity at most once.
    """
    sizes = [LARGEST] * (nbytes // LARGEST)
    rest, size = nbytes % LARGEST, LARGEST // 2
    while rest >= granularity and size >= granularity:
        if rest >= size:
            sizes.append(size)
            rest -= size
        size //= 2
    return sizes


class PagePool:
    """Extents that this saver holds and no tag maps; they count as committed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def extents(self) -> list[shim.Extent]:
        found = shim.read(shim.library().ms_pool_get, self._backend.phys, shim.ExtentRecord)
        return [shim.to_extent(item) for item in found]

    @property
    def held_bytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)

    def retain(self, extents: Sequence[shim.Extent]) -> None:
        array = shim.to_array(extents)
        if shim.library().ms_pool_put(self._backend.phys, array, len(array)):
            raise MemoryError("no host memory for the page pool's table")

    def are_many(self, extents: Sequence[shim.Extent]) -> bool:
        """Tells whether mapping them costs more than it must, as after growth tensor by tensor."""
        total = sum(extent.nbytes for extent in extents)
        return len(extents) > len(piece_sizes(total, self._backend.granularity)) + _MANY

    def keep_remade(self, extents: Sequence[shim.Extent]) -> None:
        """Keep as much memory in few extents: the small ones are made anew as large ones.

        The driver has their memory for a moment; if another process is faster, less is kept.
        """
        small = [extent for extent in extents if extent.nbytes < LARGEST]
        self.retain([extent for extent in extents if extent.nbytes >= LARGEST])
        self.give_back(small)
        made: list[shim.Extent] = []
        with contextlib.suppress(ShortOfMemory):
            for size in piece_sizes(
                sum(extent.nbytes for extent in small), self._backend.granularity
            ):
                made.append(self._backend.create(size))
        self.retain(made)

    def give_back(self, extents: Sequence[shim.Extent]) -> None:
        """Gives extents to the driver. What it refuses stays in the pool, for the next ``trim``."""
        for extent in extents:
            try:
                self._backend.release(extent.handle, extent.nbytes)
            except BackendError:
                self.retain([extent])

    def mark_shared(self, ids: Sequence[int], shared: bool) -> None:
        """Note whether peers have imported these extents, wherever in this saver they are."""
        array = (ctypes.c_uint64 * len(ids))(*ids)
        shim.library().ms_mark_shared(self._backend.phys, array, len(ids), int(shared))

    def check_room(self, nbytes: int) -> None:
        """Raises ``LeaseError`` if a peer's extents of so many bytes would pass the limit."""
        limit = self._backend.limit_bytes
        if limit is not None and self._backend.committed_bytes + nbytes > limit:
            raise LeaseError(
                f"{format_bytes(nbytes)} more would pass the limit of {format_bytes(limit)}: "
                f"{format_bytes(self._backend.committed_bytes)} are held; "
                "trim() or pause there first"
            )

    def take_over(self, extents: Sequence[tuple[int, int]], fds: dict[int, int]) -> None:
        """Become the owner of a peer's extents (id, nbytes), all or none. The caller holds
        ``imports.unchanged()``.

        fds: descriptors of those that this process has not imported; each leaves the dictionary
        when it is used.
        """
        backend, nbytes = self._backend, sum(nbytes for _, nbytes in extents)
        backend.bind_thread()
        with contextlib.ExitStack() as undo:
            if shim.library().ms_charge(backend.phys, nbytes, ctypes.byref(shim.Cause())):
                self.check_room(nbytes)
            undo.callback(shim.discharge, backend.phys, nbytes)
            handles: dict[int, int] = {}
            for extent_id in list(fds):
                handles[extent_id] = backend.import_fd(fds.pop(extent_id))
                undo.callback(backend.release, handles[extent_id], 0)
            here = [extent_id for extent_id, _ in extents if extent_id not in handles]
            if gone := imports.missing(here):
                raise LeaseError(
                    f"{len(gone)} extents were revoked meanwhile; hand them over again"
                )
            handles |= {extent_id: imports.take(extent_id) for extent_id in here}
            self.retain(
                [shim.Extent(handles[at], at, 0, size, shared=True) for at, size in extents]
            )
            undo.pop_all()

    def take(self, nbytes: int, undo: contextlib.ExitStack) -> list[shim.Extent]:
        """Take kept extents, large ones first, of at most ``nbytes`` together; kept again when
        ``undo`` unwinds.
        """
        array = shim.to_array(self.extents)
        count = shim.library().ms_pool_take(self._backend.phys, nbytes, array, len(array))
        taken = [shim.to_extent(item) for item in array[:count]]
        undo.callback(self.retain, taken)
        return taken

    def make(self, nbytes: int, undo: contextlib.ExitStack, whole: bool) -> list[shim.Extent]:
        """New extents of ``nbytes`` together; ``undo`` gives them back.

        whole: one extent, else pieces that other tags can use. Raises ``ShortOfMemory``.
        """
        made: list[shim.Extent] = []
        undo.callback(self.give_back, made)
        for size in (
            [nbytes] * bool(nbytes) if whole else piece_sizes(nbytes, self._backend.granularity)
        ):
            made.append(self._backend.create(size))
        return made

    def obtain(self, nbytes: int, undo: contextlib.ExitStack) -> list[shim.Extent]:
        """Extents of ``nbytes`` together: kept ones, then new ones, in pieces for other tags."""
        taken = self.take(nbytes, undo)
        return taken + self.make(nbytes - sum(extent.nbytes for extent in taken), undo, whole=False)

    def obtain_most(self, nbytes: int, undo: contextlib.ExitStack) -> list[shim.Extent]:
        """Obtains as many bytes as there are, at most ``nbytes``, in pieces that other tags can
        use; undo as in ``obtain``.
        """
        taken = self.take(nbytes, undo)
        made: list[shim.Extent] = []
        undo.callback(self.give_back, made)
        rest, size = nbytes - sum(extent.nbytes for extent in taken), LARGEST
        while rest >= self._backend.granularity <= size:
            try:
                if size <= rest:
                    made.append(self._backend.create(size))
                    rest -= size
                    continue
            except ShortOfMemory:
                pass
            size //= 2
        return taken + made

    def drop(self, nbytes: int) -> int:
        """Give at least ``nbytes``, if there are, that no peer has imported, back to the driver."""
        dropped: int = shim.library().ms_pool_drop(self._backend.phys, nbytes)
        return dropped

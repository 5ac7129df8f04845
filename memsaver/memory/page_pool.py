"""Keep physical memory that no tag maps, and the handles of other savers' extents.

A pause can retain extents in the page pool, for the next resume or growth of any tag of the saver.
An extent of another saver is imported once, until its owner revokes it.
"""

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

_ARRIVAL_SECONDS = 2.0  # less than a revoking peer waits


@dataclass
class Import:
    """An imported extent of another saver."""

    handle: int  # in this process
    nbytes: int
    backend: Backend  # that imported the extent
    owner: object  # stands for the connection to the owner
    pins: int = 0  # number of leases that map the extent
    orphan: bool = False  # the owner is gone: the extent is released with its last lease


class Imports:
    """The imports of a process by extent id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._by_id: dict[int, Import] = {}
        self._receiving: set[int] = set()
        self._gone: weakref.WeakSet[object] = weakref.WeakSet()

    def add(self, extent_id: int, item: Import) -> None:
        """Own a handle from now on; release it immediately if the extent's owner is gone."""
        with self._lock:
            assert extent_id not in self._by_id
            self._by_id[extent_id] = item
            if item.owner in self._gone:
                self._release(extent_id)

    @contextlib.contextmanager
    def receiving(self, ids: Sequence[int]) -> Iterator[None]:
        """Announce that extents will be added inside, so that their revocation waits until then."""
        with self._lock:
            self._receiving.update(ids)
        try:
            yield
        finally:
            with self._lock:
                self._receiving.difference_update(ids)
                self._lock.notify_all()

    def unchanged(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which only this thread changes the table."""
        return self._lock

    def pin(self, ids: Sequence[int]) -> list[int]:
        """Return the handles, which stay valid until ``unpin``.

        Raises:
            LeaseError: The owner is gone, or has revoked an extent.
        """
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
        """Return whether all of the extents are here and mapped by a lease."""
        with self._lock:
            return all(
                extent_id in self._by_id and self._by_id[extent_id].pins > 0 for extent_id in ids
            )

    def missing(self, ids: Sequence[int]) -> list[int]:
        with self._lock:
            return [extent_id for extent_id in ids if extent_id not in self._by_id]

    def take(self, extent_id: int) -> int:
        """Remove an import and return its handle, which the caller then owns."""
        with self._lock:
            return self._by_id.pop(extent_id).handle

    def drop(self, ids: Sequence[int]) -> list[int]:
        """Release the extents that no lease maps; return the ids still mapped or being received."""
        with self._lock:
            self._lock.wait_for(lambda: self._receiving.isdisjoint(ids), _ARRIVAL_SECONDS)
            present = [extent_id for extent_id in ids if extent_id in self._by_id]
            mapped = [extent_id for extent_id in present if self._by_id[extent_id].pins]
            for extent_id in present:
                if extent_id not in mapped:
                    self._release(extent_id)
            return mapped + sorted(self._receiving.intersection(ids))

    def drop_owner(self, owner: object) -> None:
        """Release all extents of an owner that is gone, leased ones with their last lease."""
        with self._lock:
            self._gone.add(owner)
            for extent_id in [key for key, item in self._by_id.items() if item.owner is owner]:
                if self._by_id[extent_id].pins:
                    self._by_id[extent_id].orphan = True
                else:
                    self._release(extent_id)

    def after_fork(self) -> None:
        """Reset the table in a child, as handles and pins are the parent's."""
        self.__init__()  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._by_id)

    def _release(self, extent_id: int) -> None:
        item = self._by_id.pop(extent_id)
        with contextlib.suppress(BackendError):  # neither this process nor the owner depends on it
            item.backend.release(item.handle, 0)


imports = Imports()
"""The imports of this process."""
os.register_at_fork(after_in_child=imports.after_fork)


# Surplus extents that are tolerated. Mapping one costs some 20 us, but new extents must be cleared.
_MANY = 16
# bytes: mapping 60 GiB in such pieces takes 3.4 ms on an H100, in one piece 1.3 ms
LARGEST = 1 << 30


def piece_sizes(nbytes: int, granularity: int) -> list[int]:
    """Return sizes of extents, ``nbytes`` in total, that any tag can reuse.

    The extents are few, and alike for all tags: as many of size LARGEST as fit, then every power of
    two times the granularity at most once.
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
    """Extents that a saver retains and no tag maps; they count as committed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def extents(self) -> list[shim.Extent]:
        records = shim.read(shim.library().ms_pool_get, self._backend.phys, shim.ExtentRecord)
        return [shim.to_extent(record) for record in records]

    @property
    def held_bytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)

    def retain(self, extents: Sequence[shim.Extent]) -> None:
        array = shim.to_array(extents)
        if shim.library().ms_pool_put(self._backend.phys, array, len(array)):
            raise MemoryError("no host memory for the page pool's table")

    def are_many(self, extents: Sequence[shim.Extent]) -> bool:
        """Return whether extents are too many to map quickly, as after growth by single tensors."""
        total = sum(extent.nbytes for extent in extents)
        return len(extents) > len(piece_sizes(total, self._backend.granularity)) + _MANY

    def keep_remade(self, extents: Sequence[shim.Extent]) -> None:
        """Retain the memory of extents in fewer ones: release small ones, and create large ones.

        Meanwhile, another process may take the released memory; then less is retained.
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
        """Release extents; an extent that the driver refuses stays in the pool until ``trim``."""
        for extent in extents:
            try:
                self._backend.release(extent.handle, extent.nbytes)
            except BackendError:
                self.retain([extent])

    def mark_shared(self, ids: Sequence[int], shared: bool) -> None:
        """Record whether peers have imported these extents of a tag or of the pool."""
        array = (ctypes.c_uint64 * len(ids))(*ids)
        shim.library().ms_mark_shared(self._backend.phys, array, len(ids), int(shared))

    def check_room(self, nbytes: int) -> None:
        """Raise ``LeaseError`` if a peer's extents of ``nbytes`` would exceed the limit."""
        limit = self._backend.limit_bytes
        if limit is not None and self._backend.committed_bytes + nbytes > limit:
            raise LeaseError(
                f"{format_bytes(nbytes)} more would pass the limit of {format_bytes(limit)}: "
                f"{format_bytes(self._backend.committed_bytes)} are held; "
                "trim() or pause there first"
            )

    def take_over(self, extents: Sequence[tuple[int, int]], fds: dict[int, int]) -> None:
        """Acquire a peer's extents (id, nbytes), all or none, inside of ``imports.unchanged()``.

        ``fds`` are descriptors, by id, of the extents that this process has not imported. Each is
        removed when it is used.

        Raises:
            LeaseError: The extents would exceed the limit, or some were revoked.
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
            imported = [extent_id for extent_id, _ in extents if extent_id not in handles]
            if revoked := imports.missing(imported):
                raise LeaseError(
                    f"{len(revoked)} extents were revoked meanwhile; hand them over again"
                )
            handles |= {extent_id: imports.take(extent_id) for extent_id in imported}
            self.retain(
                [shim.Extent(handles[at], at, 0, size, shared=True) for at, size in extents]
            )
            undo.pop_all()

    def take(self, nbytes: int, undo: contextlib.ExitStack) -> list[shim.Extent]:
        """Take retained extents of at most ``nbytes`` in total, large ones first.

        Unwinding ``undo`` retains them again.
        """
        array = shim.to_array(self.extents)
        count = shim.library().ms_pool_take(self._backend.phys, nbytes, array, len(array))
        taken = [shim.to_extent(record) for record in array[:count]]
        undo.callback(self.retain, taken)
        return taken

    def make(self, nbytes: int, undo: contextlib.ExitStack, whole: bool) -> list[shim.Extent]:
        """Create extents of ``nbytes`` in total: one if ``whole``, else pieces for any tag.

        Unwinding ``undo`` releases them.

        Raises:
            ShortOfMemory: The limit or the driver refuses an extent.
        """
        made: list[shim.Extent] = []
        undo.callback(self.give_back, made)
        for size in (
            [nbytes] * bool(nbytes) if whole else piece_sizes(nbytes, self._backend.granularity)
        ):
            made.append(self._backend.create(size))
        return made

    def obtain(self, nbytes: int, undo: contextlib.ExitStack) -> list[shim.Extent]:
        """Obtain extents of ``nbytes`` in total: retained ones, then new pieces for any tag."""
        taken = self.take(nbytes, undo)
        return taken + self.make(nbytes - sum(extent.nbytes for extent in taken), undo, whole=False)

    def obtain_most(self, nbytes: int, undo: contextlib.ExitStack) -> list[shim.Extent]:
        """Obtain extents like ``obtain``, but of fewer bytes if ``nbytes`` are not available."""
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
        """Release ``nbytes`` or more of retained extents that no peer imports; return the bytes."""
        return shim.library().ms_pool_drop(self._backend.phys, nbytes)

"""Handles of other savers' extents here: each imported once, until its owner ends it."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memsaver.errors import BackendError, LeaseError
from memsaver.vmm.backend import Backend

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
        self._arriving: set[int] = set()
        self._gone: weakref.WeakSet[object] = weakref.WeakSet()

    def add(self, extent_id: int, item: Import) -> None:
        """Looks after the handle from here on; it is released at once if its owner is gone."""
        with self._lock:
            assert extent_id not in self._by_id
            self._by_id[extent_id] = item
            if item.owner in self._gone:
                self._release(extent_id)

    @contextlib.contextmanager
    def arriving(self, ids: Sequence[int]) -> Iterator[None]:
        """Inside, these may be added; their owner, who knows of it, may revoke them: that waits."""
        with self._lock:
            self._arriving.update(ids)
        try:
            yield
        finally:
            with self._lock:
                self._arriving.difference_update(ids)
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
            self._lock.wait_for(lambda: self._arriving.isdisjoint(ids), _ARRIVAL_SECONDS)
            here = [extent_id for extent_id in ids if extent_id in self._by_id]
            mapped = [extent_id for extent_id in here if self._by_id[extent_id].pins]
            for extent_id in here:
                if extent_id not in mapped:
                    self._release(extent_id)
            return mapped + sorted(self._arriving.intersection(ids))

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

"""Handles of other savers' extents in this process: each imported once, kept until its owner revokes it or is gone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from memsaver.backends.base import Backend
from memsaver.errors import BackendError


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
    """By the extent's id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[int, Import] = {}

    def add(self, extent_id: int, item: Import) -> None:
        with self._lock:
            assert extent_id not in self._by_id
            self._by_id[extent_id] = item

    def pin(self, ids: Sequence[int]) -> list[int]:
        """The handles; they stay until ``unpin``. KeyError for one that is not here."""
        with self._lock:
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

    def missing(self, ids: Sequence[int]) -> list[int]:
        with self._lock:
            return [extent_id for extent_id in ids if extent_id not in self._by_id]

    def take(self, extent_id: int) -> int | None:
        """The handle, which is the caller's from here on; None if it is not here."""
        with self._lock:
            item = self._by_id.pop(extent_id, None)
            return None if item is None else item.handle

    def drop(self, ids: Sequence[int]) -> list[int]:
        """Release those that no lease maps; the ids of the others."""
        with self._lock:
            here = [extent_id for extent_id in ids if extent_id in self._by_id]
            mapped = [extent_id for extent_id in here if self._by_id[extent_id].pins]
            for extent_id in here:
                if extent_id not in mapped:
                    self._release(extent_id)
            return mapped

    def drop_owner(self, owner: object) -> None:
        """The owner is gone: release all of its extents, those that a lease maps when it ends."""
        with self._lock:
            for extent_id in [key for key, item in self._by_id.items() if item.owner is owner]:
                if self._by_id[extent_id].pins:
                    self._by_id[extent_id].orphan = True
                else:
                    self._release(extent_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def _release(self, extent_id: int) -> None:
        item = self._by_id.pop(extent_id)
        with contextlib.suppress(BackendError):  # the process goes on, and so does its owner
            item.backend.release(item.handle, 0)


imports = Imports()
"""Of this process."""

"""Leases that stay mapped between uses, until their owner asks for them back.

Mapping costs milliseconds, also at the peer's other GPUs, so who uses the same tag again and again
keeps its lease. The owner's pause, or whatever else moves the tag's pages, recalls it first: an
idle lease is unmapped at once, by a thread of this process; one in use ends with the use. So a
lease that is mapped always shows the tag's own pages.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

from memsaver.common.signals import Finalizer, Unbroken
from memsaver.errors import StateError
from memsaver.sharing.client import peer_backend
from memsaver.sharing.lease import Lease
from memsaver.tag.borrowed import Endings, Ticket, endings

_Key = tuple[Ticket, torch.device]


class Kept:
    """One lease, born in use. Whoever finds it recalled and unused ends it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self._lock = threading.Lock()
        self._uses = 1
        self._recalled = False
        lease.owner.recalls[lease.number] = self._recall_by_owner

    def enter(self, at_least: int) -> bool:
        """Begin a use; False: it is on its way back, its owner is gone, or it is too small."""
        with self._lock:
            good = (
                not self._recalled
                and not self.lease.owner.endpoint.closed
                and self.lease.nbytes >= at_least
            )
            self._uses += good
            return good

    def leave(self) -> None:
        """Waits for the device: a recall must not, it may come while a graph is captured."""
        try:
            self.lease.synchronize()
        finally:
            with self._lock:
                self._uses -= 1
                if self._recalled or self.lease.owner.endpoint.closed:
                    self._end()

    def recall(self) -> None:
        """Allows no further use; ends it if there is none.

        May be tried again when the driver refused (``BackendError``).
        """
        with self._lock:
            self._recalled = True
            self._end()

    def _recall_by_owner(self) -> None:
        """Recalls for the owner, in a thread of its connection."""
        self.lease.bind_thread()
        self.recall()

    def _end(self) -> None:
        if not self._uses and not self.lease.closed:
            self.lease.end()
            self.lease.owner.recalls.pop(self.lease.number, None)


class LeaseCache:
    """Leases by ticket and, on GPUs, current device. Thread-safe; inert in a forked child.

    Where it is dropped without ``close``, its leases end all the same.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[_Key, Kept] = {}
        self._closed = False
        self._pid = os.getpid()
        Finalizer(self, _drop, self._kept, endings())

    def use(self, ticket: Ticket, at_least: int = 0) -> contextlib.AbstractContextManager[Lease]:
        """A lease of the tag, mapped now or before; while it is used, its owner's pause fails.

        Tensors of it must not be used afterwards. Waits for the device's work when it is left.
        at_least: bytes that it must have; a tag that has grown since it was mapped is mapped anew
        only if this says so. Raises ``LeaseError`` (as ``attach``) and ``StateError`` (closed, or a
        forked child).
        """
        return Unbroken(self._use(ticket, at_least))

    @contextlib.contextmanager
    def _use(self, ticket: Ticket, at_least: int) -> Iterator[Lease]:
        kept = self._entered(ticket, at_least)
        try:
            yield kept.lease
        finally:
            kept.leave()

    def _entered(self, ticket: Ticket, at_least: int) -> Kept:
        if os.getpid() != self._pid:
            raise StateError(
                "this is a forked child, where kept leases are inert; make LeaseCache of its own"
            )
        key = ticket, peer_backend(ticket.device_key).device
        with self._lock:
            if self._closed:
                raise StateError("these LeaseCache are closed; make new ones")
            kept = self._kept.get(key)
        if kept is not None and kept.enter(at_least):
            return kept
        # without the lock: the owner may be waiting for another use here
        fresh = Kept(Lease(ticket, kept=True))
        with self._lock:
            replaced, closed = self._kept.get(key), self._closed
            for gone in [known for known, item in self._kept.items() if item.lease.closed]:
                del self._kept[gone]
            self._kept[key] = fresh
        with contextlib.ExitStack() as undo:
            undo.callback(fresh.leave)
            # smaller, of a dead owner, or of another thread that was as fast
            if replaced is not None:
                replaced.recall()
            if closed:
                fresh.recall()
            undo.pop_all()
        return fresh

    def close(self) -> None:
        """End all, those in use with their use. May be tried again (``BackendError``)."""
        if os.getpid() == self._pid:
            with self._lock:
                self._closed = True
                kept = list(self._kept.values())
            with contextlib.ExitStack() as all_of_them:
                for item in kept:
                    all_of_them.callback(item.recall)

    def __enter__(self) -> LeaseCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _drop(kept: dict[_Key, Kept], endings: Endings) -> None:
    """Runs in a finalizer, maybe under any lock, so another thread ends them."""
    for item in kept.values():
        endings.put(item.lease.bind_thread, item.recall)

"""The peer's side of sharing: leases of owners' tags.

Leases that stay mapped between uses, until their owner asks for them back.

Mapping costs milliseconds, also at the peer's other GPUs, so who uses the same tag again and again
keeps its lease. The owner's pause, or whatever else moves the tag's pages, recalls it first: an
idle lease is unmapped at once, by a thread of this process; one in use ends with the use. So a
lease that is mapped always shows the tag's own pages.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from memsaver.errors import BackendError, LeaseError, StateError
from memsaver.memory.backend import Backend, Reservation
from memsaver.memory.page_pool import Import, imports
from memsaver.native import shim
from memsaver.sharing import rpc
from memsaver.sharing.client import Owner, owner_of, peer_backend
from memsaver.system.device_lock import device_lock
from memsaver.system.interrupts import Finalizer, Unbroken, held
from memsaver.system.threads import forkable
from memsaver.tag.tickets import AliasedPages, Ticket, endings

TIMEOUT_SECONDS = 10.0


class Lease(contextlib.AbstractContextManager["Lease"]):
    """A tag of another saver, mapped at an address of this process.

    On GPUs the one that is current now can use the address, and no other; tensors say that they are
    on it. If it is not the tag's, the two must reach each other; the tag's may be hidden, and this
    process has no context there. Tensors from ``tensor`` dangle after ``close``; a lease that
    nobody closes ends with itself and the last of them.
    Errors: ``LeaseError`` when the owner refuses or is gone, or the current GPU does not reach the
    tag's.
    """

    _kept = False  # the owner may ask for it back

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._backend = peer_backend(ticket.device_key)
        with held(), contextlib.ExitStack() as undo:
            granted = lease_extents(ticket, self._backend, undo, self._kept)
            self.owner, self.number, extents = granted
            self.nbytes = sum(extent.nbytes for extent in extents)
            reservation = Reservation(self._backend, max(self.nbytes, self._backend.granularity))
            undo.callback(reservation.close)
            self._address = reservation.address
            with device_lock(ticket.device_key), contextlib.ExitStack() as mapped:
                for extent in extents:
                    address = self._address + extent.offset
                    self._backend.map(address, extent.nbytes, extent.handle, ticket.writable)
                    mapped.callback(self._backend.unmap, address, extent.nbytes)
                if self.nbytes:
                    self._open_access()
                mapped.pop_all()
            self._mapped = _Mapped(
                self._backend, ticket.device_key, self._address, self.nbytes, undo.pop_all()
            )
            # it may run under any lock, so another thread talks to the owner
            Finalizer(self, endings().put, self._mapped.end_dropped)

    def _open_access(self) -> None:
        try:
            self._backend.set_access(self._address, self.nbytes)
        except BackendError as error:
            if self._backend.device_key == self.ticket.device_key:
                raise
            raise LeaseError(
                f"no lease of tag {self.ticket.tag!r}: {self._backend.device} does not reach the "
                f"memory of {self.ticket.device_key} ({error}); "
                "use GPUs that reach each other (nvidia-smi topo -p2p r)"
            ) from error

    @property
    def closed(self) -> bool:
        return self._mapped.closed

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, byte_offset: int = 0
    ) -> torch.Tensor:
        """Tensor over the tag's pages, ``byte_offset`` bytes from the start of the tag's arena."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self.closed:
            raise LeaseError(f"the lease of {self.ticket.tag!r} is closed; attach again")
        if byte_offset < 0 or byte_offset + nbytes > self.nbytes:
            last = byte_offset + nbytes
            raise ValueError(
                f"bytes {byte_offset}..{last} are outside the {self.nbytes} of {self.ticket.tag!r}"
            )
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=self._backend.device)
        return (
            self._backend.window(self._address + byte_offset, nbytes, self).view(dtype).view(shape)
        )

    @held()
    def close(self) -> None:
        """Unmap, and tell the owner; when this returns, the owner knows that the lease has ended.

        May be tried again when the driver refused (``BackendError``).
        """
        if not self.closed:
            self._backend.synchronize()
            self._mapped.end()

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass
class _Mapped:
    """Holds a lease's things for a finalizer. ``undo``: when nothing is mapped any more."""

    backend: Backend
    device_key: str
    address: int
    nbytes: int
    undo: contextlib.ExitStack
    closed: bool = False

    @held()
    def end(self) -> None:
        """Unmap, and tell the owner; not in a forked child, where the lease is the parent's."""
        if not self.closed and not self.backend.forked:
            with device_lock(self.device_key):
                if self.nbytes:
                    self.backend.unmap(self.address, self.nbytes)
            self.closed = True
            self.undo.close()

    def end_dropped(self) -> None:
        """Ends a lease that nobody closed, in a thread of our own."""
        if not self.closed:
            self.backend.bind_thread()
            self.backend.synchronize()
            self.end()


def attach(ticket: Ticket) -> Lease:
    """Map the ticket's tag into this process (also into the owner's, at a second address)."""
    return Lease(ticket)


def lease_extents(
    ticket: Ticket, backend: Backend, undo: contextlib.ExitStack, kept: bool = False
) -> tuple[Owner, int, list[shim.Extent]]:
    """Return a lease of the tag as its owner knows it, the connection to that and the lease's
    number, and the tag's extents, by handles of this process, until ``undo`` (empty) unwinds.
    """
    with _explained(ticket):
        owner = owner_of(ticket.socket_name)
    ask = partial(_ask, owner, ticket, backend, undo, kept)
    with owner.granting:
        number, granted, forgotten = ask()
        if lost := imports.missing([extent_id for extent_id, _, _ in granted]):
            forgotten += lost  # with an answer that came too late
            undo.close()
            number, granted, _ = ask()
    ids = [extent_id for extent_id, _, _ in granted]
    handles = imports.pin(ids)
    undo.callback(imports.unpin, ids)
    extents = [
        shim.Extent(handle, *extent, shared=True)
        for handle, extent in zip(handles, granted, strict=True)
    ]
    return owner, number, extents


def alias_pages(ticket: Ticket, device: torch.device, undo: contextlib.ExitStack) -> AliasedPages:
    """A lease of the tag for a tag on ``device``, until that ends it, or ``undo`` unwinds."""
    ends = contextlib.ExitStack()
    undo.callback(ends.close)
    _, _, extents = lease_extents(ticket, peer_backend(ticket.device_key, device), ends)
    return AliasedPages(ticket, extents, ends.close)


def _ask(
    owner: Owner, ticket: Ticket, backend: Backend, undo: contextlib.ExitStack, kept: bool
) -> tuple[int, list[tuple[int, int, int]], list[int]]:
    """The lease's number; (id, offset, nbytes) of its extents, which are imported then; and which
    of them the owner wrongly believes to be here: to be told when the lease ends.
    """
    with _explained(ticket):
        answer, fds = owner.endpoint.call(
            "lease", timeout=TIMEOUT_SECONDS, token=ticket.token, kept=kept
        )
    fresh = [(extent_id, nbytes) for extent_id, _, nbytes, new in answer["extents"] if new]
    forgotten = [extent_id for extent_id, _ in fresh]
    undo.callback(_end_lease, owner, answer["lease"], forgotten)
    import_all(fresh, fds, backend, owner, forgotten)
    extents = [(extent_id, offset, nbytes) for extent_id, offset, nbytes, _ in answer["extents"]]
    return answer["lease"], extents, forgotten


def import_all(
    extents: Sequence[tuple[int, int]],
    fds: Sequence[int],
    backend: Backend,
    owner: Owner,
    left: list[int],
) -> None:
    """Import (id, nbytes) each from its descriptor, closing all; what succeeds leaves ``left``."""
    pending = list(fds)
    try:
        # the kernel leaves out those that would pass the limit of open files
        if len(extents) != len(fds):
            raise LeaseError(
                f"{len(fds)} of {len(extents)} descriptors came; raise the limit of open files"
            )
        for extent_id, nbytes in extents:
            handle = backend.import_fd(pending.pop(0))
            imports.add(extent_id, Import(handle, nbytes, backend, owner))
            left.remove(extent_id)
    finally:
        rpc.close_all(pending)


def _end_lease(owner: Owner, lease: int, forgotten: list[int]) -> None:
    """forgotten: ids that the owner believes this process to have, but it has not."""
    # an owner that is gone needs no telling
    with contextlib.suppress(rpc.ConnectionClosed, TimeoutError, rpc.CallRefused):
        owner.endpoint.call("unlease", timeout=TIMEOUT_SECONDS, lease=lease, forgotten=forgotten)


def _explained(ticket: Ticket) -> contextlib.AbstractContextManager[None]:
    return explained(f"no lease of tag {ticket.tag!r}", f"the owner of tag {ticket.tag!r}")


@contextlib.contextmanager
def explained(what: str, who: str) -> Iterator[None]:
    try:
        yield
    except rpc.CallRefused as error:
        raise LeaseError(f"{what}: {error}") from error
    except (OSError, TimeoutError) as error:
        raise LeaseError(
            f"{what}: {who} does not answer ({error}); is its process alive?"
        ) from error


_Key = tuple[Ticket, torch.device]


class CachedLease(Lease):
    """A lease that stays mapped between uses, born in use. Whoever finds it recalled and unused
    ends it.
    """

    _kept = True

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(ticket)
        self._lock = forkable(threading.Lock())
        self._uses = 1
        self._recalled = False
        self.owner.recalls[self.number] = self

    def enter(self, at_least: int) -> bool:
        """Begin a use; False: it is on its way back, its owner is gone, or it is too small."""
        with self._lock:
            gone = self._recalled or self.owner.endpoint.closed
            good = not gone and self.nbytes >= at_least
            self._uses += good
            return good

    def leave(self) -> None:
        """Wait for the device: a recall must not, it may come while a graph is captured."""
        try:
            self._backend.synchronize()
        finally:
            with self._lock:
                self._uses -= 1
                if self._recalled or self.owner.endpoint.closed:
                    self._end()

    def recall(self) -> None:
        """Allow no further use; end it if there is none.

        May be tried again when the driver refused (``BackendError``).
        """
        with self._lock:
            self._recalled = True
            self._end()

    def recall_beside(self) -> None:
        """Recall, in a thread of our own."""
        self._backend.bind_thread()
        self.recall()

    def _end(self) -> None:
        if not self._uses and not self.closed:
            self._mapped.end()
            self.owner.recalls.pop(self.number, None)


class LeaseCache(contextlib.AbstractContextManager["LeaseCache"]):
    """Leases by ticket and, on GPUs, current device. Thread-safe; a forked child's begins anew.

    Where it is dropped without ``close``, its leases end all the same.
    """

    def __init__(self) -> None:
        self._lock = forkable(threading.Lock())
        self._leases: dict[_Key, CachedLease] = {}
        self._closed = False

    def use(self, ticket: Ticket, at_least: int = 0) -> contextlib.AbstractContextManager[Lease]:
        """Return a lease of the tag, mapped now or before; its use makes the owner's pause fail.

        Tensors of it must not be used afterwards. Waits for the device's work when it is left.
        at_least: bytes that it must have; a tag that has grown since it was mapped is mapped anew
        only if this says so. Raises ``LeaseError`` (as ``attach``) and ``StateError`` (closed).
        """
        return Unbroken(self._use(ticket, at_least))

    @contextlib.contextmanager
    def _use(self, ticket: Ticket, at_least: int) -> Iterator[Lease]:
        lease = self._entered(ticket, at_least)
        try:
            yield lease
        finally:
            lease.leave()

    def _entered(self, ticket: Ticket, at_least: int) -> CachedLease:
        key = ticket, peer_backend(ticket.device_key).device
        with self._lock:
            if self._closed:
                raise StateError("these LeaseCache are closed; make new ones")
            known = self._leases.get(key)
        if known is not None and known.enter(at_least):
            return known
        # without the lock: the owner may be waiting for another use here
        fresh = CachedLease(ticket)
        with self._lock:
            replaced, closed = self._leases.get(key), self._closed
            for ended in [at for at, lease in self._leases.items() if lease.closed]:
                del self._leases[ended]
            self._leases[key] = fresh
        with contextlib.ExitStack() as undo:
            undo.callback(fresh.leave)
            # smaller, of a dead owner, of the parent, or of another thread that was as fast
            if replaced is not None:
                replaced.recall()
            if closed:
                fresh.recall()
            undo.pop_all()
        return fresh

    def close(self) -> None:
        """End all, those in use with their use. May be tried again (``BackendError``)."""
        with self._lock:
            self._closed = True
            leases = list(self._leases.values())
        with contextlib.ExitStack() as all_of_them:
            for lease in leases:
                all_of_them.callback(lease.recall)

    def __exit__(self, *exc: object) -> None:
        self.close()

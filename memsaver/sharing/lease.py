"""The peer's side of sharing: leases of other savers' tags, and a cache of leases.

Mapping costs milliseconds, also on the peer's other GPUs, so a cache keeps leases mapped between
uses. Before the owner pauses the tag or moves its pages otherwise, it recalls cached leases. A
thread of this process unmaps an idle lease immediately; a lease in use ends with the use. A mapped
lease therefore always shows the tag's present pages.
"""

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
    """Mapping of another saver's tag at an address of this process.

    A lease of GPU memory can be used on the GPU that is current when the lease is made, and its
    tensors report that device. If the tag is on a different GPU, the two GPUs must reach each
    other. The tag's GPU may be hidden, and this process creates no context there.

    Tensors from `tensor` must not be used after `close`. A lease that is never closed ends when the
    lease and all of its tensors are dropped.

    Args:
        ticket: Ticket for the tag, from `MemorySaver.share`.

    Attributes:
        ticket: The ticket.
        nbytes: Bytes of the tag that are mapped.
        owner: Connection to the saver that owns the tag.
        number: The owner's number for the lease.

    Raises:
        LeaseError: The owner refuses or is gone, or the current GPU cannot reach the memory.
    """

    _kept = False  # whether the owner may recall it

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
            # The finalizer may run under any lock, so another thread talks to the owner.
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
        """Return whether the lease has ended."""
        return self._mapped.closed

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, byte_offset: int = 0
    ) -> torch.Tensor:
        """Return a tensor over the tag's pages.

        Args:
            shape: Shape of the tensor.
            dtype: Data type of the tensor.
            byte_offset: Offset of the tensor from the start of the tag's arena; see
                `MemorySaver.offset_of`.

        Returns:
            A contiguous tensor that shares memory with the owner's tag.

        Raises:
            LeaseError: The lease is closed.
            ValueError: The tensor would exceed the mapped bytes.
        """
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
        """Unmap the tag and notify the owner.

        When the call returns, the owner knows that the lease has ended.

        Raises:
            BackendError: The driver refused; the call may be repeated.
        """
        if not self.closed:
            self._backend.synchronize()
            self._mapped.end()

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass
class _Mapped:
    """Resources of a lease, for its finalizer."""

    backend: Backend
    device_key: str  # of the memory, which may be on a different GPU than the backend's
    address: int
    nbytes: int
    undo: contextlib.ExitStack  # runs after the memory is unmapped
    closed: bool = False

    @held()
    def end(self) -> None:
        """Unmap and notify the owner, except in a forked child: the lease is the parent's."""
        if not self.closed and not self.backend.forked:
            with device_lock(self.device_key):
                if self.nbytes:
                    self.backend.unmap(self.address, self.nbytes)
            self.closed = True
            self.undo.close()

    def end_dropped(self) -> None:
        """End a lease that was dropped without `close`, in a thread of memsaver."""
        if not self.closed:
            self.backend.bind_thread()
            self.backend.synchronize()
            self.end()


def attach(ticket: Ticket) -> Lease:
    """Map a shared tag into this process.

    Works in the owner's process, too, where it maps the tag at a second address.

    Args:
        ticket: Ticket for the tag, from `MemorySaver.share`.

    Returns:
        The lease, which is also a context manager.

    Raises:
        LeaseError: The owner refuses or is gone, or the current GPU cannot reach the memory.
    """
    return Lease(ticket)


def lease_extents(
    ticket: Ticket, backend: Backend, undo: contextlib.ExitStack, kept: bool = False
) -> tuple[Owner, int, list[shim.Extent]]:
    """Obtain a lease of a tag: its owner, the lease's number, and the tag's imported extents.

    The extents have handles of this process. Unwinding `undo`, an empty stack, ends the lease. A
    `kept` lease may stay mapped until the owner recalls it.
    """
    with _explained(ticket):
        owner = owner_of(ticket.socket_name)
    ask = partial(_ask, owner, ticket, backend, undo, kept)
    with owner.granting:
        try:
            number, granted, forgotten = ask()
            if lost := imports.missing([extent_id for extent_id, _, _ in granted]):
                forgotten += lost  # they came with an answer that was too late
                undo.close()
                number, granted, _ = ask()
        except BaseException:
            # Ends a failed lease before another thread asks. Otherwise the owner would forget
            # extents that the other thread has imported in between, and send them a second time.
            undo.close()
            raise
    ids = [extent_id for extent_id, _, _ in granted]
    handles = imports.pin(ids)
    undo.callback(imports.unpin, ids)
    extents = [
        shim.Extent(handle, *extent, shared=True)
        for handle, extent in zip(handles, granted, strict=True)
    ]
    return owner, number, extents


def alias_pages(ticket: Ticket, device: torch.device, undo: contextlib.ExitStack) -> AliasedPages:
    """Obtain the pages of another saver's tag for an alias on a device.

    The alias ends the lease, or `undo` does when it unwinds.
    """
    ends = contextlib.ExitStack()
    undo.callback(ends.close)
    _, _, extents = lease_extents(ticket, peer_backend(ticket.device_key, device), ends)
    return AliasedPages(ticket, extents, ends.close)


def _ask(
    owner: Owner, ticket: Ticket, backend: Backend, undo: contextlib.ExitStack, kept: bool
) -> tuple[int, list[tuple[int, int, int]], list[int]]:
    """Request a lease and import its new extents.

    The result is the lease's number, its extents as (id, offset, nbytes), and a list of ids that
    the owner must be told to forget when the lease ends, because they were not imported.
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
    """Import extents (id, nbytes), one from each file descriptor.

    The descriptors are no longer the caller's, even after an error. Each successful import removes
    its id from `left`.
    """
    pending = list(fds)
    try:
        # The kernel drops descriptors that would exceed the limit of open files.
        if len(extents) != len(fds):
            raise LeaseError(
                f"{len(fds)} of {len(extents)} descriptors arrived; raise the limit of open files"
            )
        for extent_id, nbytes in extents:
            handle = backend.import_fd(pending.pop(0))
            imports.add(extent_id, Import(handle, nbytes, backend, owner))
            left.remove(extent_id)
    finally:
        rpc.close_all(pending)


def _end_lease(owner: Owner, lease: int, forgotten: list[int]) -> None:
    """Report to the owner that a lease has ended, and which ids were not imported."""
    # An owner that is gone needs no message.
    with contextlib.suppress(rpc.ConnectionClosed, TimeoutError, rpc.CallRefused):
        owner.endpoint.call("unlease", timeout=TIMEOUT_SECONDS, lease=lease, forgotten=forgotten)


def _explained(ticket: Ticket) -> contextlib.AbstractContextManager[None]:
    return explained(f"no lease of tag {ticket.tag!r}", f"the owner of tag {ticket.tag!r}")


@contextlib.contextmanager
def explained(failure: str, owner: str) -> Iterator[None]:
    """Convert errors of a request to ``LeaseError``s that name the failure and the owner."""
    try:
        yield
    except rpc.CallRefused as error:
        raise LeaseError(f"{failure}: {error}") from error
    except (OSError, TimeoutError) as error:
        raise LeaseError(
            f"{failure}: {owner} does not answer ({error}); is its process alive?"
        ) from error


_Key = tuple[Ticket, torch.device]


class CachedLease(Lease):
    """Lease that stays mapped between uses; it starts with one use.

    The thread that finds the lease both recalled and unused ends it.
    """

    _kept = True

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(ticket)
        # The user's thread begins and ends uses, and a thread of the connection recalls. The lock
        # decides which of the two finds the lease both recalled and unused. It is held while the
        # lease is unmapped, so that it is unmapped once.
        self._lock = forkable(threading.Lock())
        self._uses = 1
        self._recalled = False
        self.owner.recalls[self.number] = self

    def enter(self, at_least: int) -> bool:
        """Begin a use; return False if the lease is recalled, orphaned or too small."""
        with self._lock:
            gone = self._recalled or self.owner.endpoint.closed
            good = not gone and self.nbytes >= at_least
            self._uses += good
            return good

    def leave(self) -> None:
        """End a use after waiting for the device.

        A recall cannot wait for the device, because a graph capture may be active then.
        """
        try:
            self._backend.synchronize()
        finally:
            with self._lock:
                self._uses -= 1
                if self._recalled or self.owner.endpoint.closed:
                    self._end()

    def recall(self) -> None:
        """Refuse further uses, and end the lease if it is not in use.

        The call may be repeated after a ``BackendError``.
        """
        with self._lock:
            self._recalled = True
            self._end()

    def recall_in_thread(self) -> None:
        """Recall from a thread of memsaver, which must first select the device."""
        self._backend.bind_thread()
        self.recall()

    def _end(self) -> None:
        if not self._uses and not self.closed:
            self._mapped.end()
            self.owner.recalls.pop(self.number, None)


class LeaseCache(contextlib.AbstractContextManager["LeaseCache"]):
    """Cache of leases that stay mapped between uses, by ticket and current GPU.

    Thread-safe. In a forked child, the cache maps tags again. Dropping a cache without `close`
    ends its leases, too.
    """

    def __init__(self) -> None:
        # Guards the two fields below. No thread talks to an owner, or takes the lock of a lease,
        # while it holds this lock.
        self._lock = forkable(threading.Lock())
        self._leases: dict[_Key, CachedLease] = {}
        self._closed = False

    def use(self, ticket: Ticket, at_least: int = 0) -> contextlib.AbstractContextManager[Lease]:
        """Return a context manager that provides a lease of the tag, mapped now or earlier.

        The owner cannot pause the tag inside the context. The exit waits for the device's work, and
        tensors of the lease must not be used after it.

        Args:
            ticket: Ticket for the tag, from `MemorySaver.share`.
            at_least: Bytes that the lease must cover. A tag that has grown since it was mapped is
                mapped again only if this requires it.

        Returns:
            A context manager whose value is the lease.

        Raises:
            LeaseError: The owner refuses or is gone, or the current GPU cannot reach the memory.
            StateError: The cache is closed.
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
                raise StateError("this LeaseCache is closed; make a new one")
            known = self._leases.get(key)
        if known is not None and known.enter(at_least):
            return known
        # Not under the lock: the owner may be waiting for another use in this process.
        fresh = CachedLease(ticket)
        with self._lock:
            replaced, closed = self._leases.get(key), self._closed
            for ended in [at for at, lease in self._leases.items() if lease.closed]:
                del self._leases[ended]
            self._leases[key] = fresh
        with contextlib.ExitStack() as undo:
            undo.callback(fresh.leave)
            # The replaced lease is too small, orphaned, the parent's, or was made by another
            # thread at the same time.
            if replaced is not None:
                replaced.recall()
            if closed:
                fresh.recall()
            undo.pop_all()
        return fresh

    def close(self) -> None:
        """End all leases; a lease in use ends with the use.

        Raises:
            BackendError: The driver refused; the call may be repeated.
        """
        with self._lock:
            self._closed = True
            leases = list(self._leases.values())
        with contextlib.ExitStack() as recalls:
            for lease in leases:
                recalls.callback(lease.recall)

    def __exit__(self, *exc: object) -> None:
        self.close()

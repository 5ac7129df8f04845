"""The peer's side of sharing: connections to owners, leases of their tags, extents handed over to them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from memsaver import rpc
from memsaver.allocator import shim
from memsaver.arena import Reservation
from memsaver.backends.base import Backend, make_backend
from memsaver.device_lock import device_lock
from memsaver.errors import LeaseError
from memsaver.imports import Import, imports
from memsaver.places import device_key

TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Permission to map one tag; plain data to be sent to the peer. Good as long as the saver lives."""

    socket_name: str
    token: str
    tag: str
    device_key: str
    writable: bool


@dataclass(frozen=True, kw_only=True)
class PoolTicket:
    """Permission to hand extents over to a saver; plain data, good as long as the saver lives."""

    socket_name: str
    token: str
    device_key: str
    pid: int


class Owner:
    """The connection of this process to one saver, here or in another process; one for all leases of it.

    ``granting``: held from asking for a lease until what came with it is imported, for the next answer builds on that.
    """

    def __init__(self, socket_name: str) -> None:
        self._socket_name = socket_name
        self.granting = threading.Lock()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect("\0" + socket_name)
            _, uid = rpc.credentials(connection)
            if uid != os.getuid():  # who would not answer; or who has taken a dead saver's name, to be told tokens
                raise rpc.Refused(f"its saver is user {uid}'s, this process is user {os.getuid()}'s")
        except BaseException:
            connection.close()
            raise
        self.endpoint = rpc.Endpoint(connection, self._serve, self._gone, "memsaver-peer", self._late)
        self.endpoint.start()

    def _gone(self) -> None:
        imports.drop_owner(self)
        with _lock:
            if _owners.get(self._socket_name) is self:
                del _owners[self._socket_name]

    def _late(self, answer: dict[str, Any]) -> None:
        """Give back a lease that nobody waits for any longer; what came with it, the next one asks for."""
        if "lease" in answer:
            self.endpoint.tell("unlease", lease=answer["lease"], forgotten=[])

    def _serve(self, op: str, arguments: dict[str, Any], fds: list[int]) -> rpc.Reply:
        assert op == "revoke" and not fds
        if mapped := imports.drop(arguments["ids"]):
            raise rpc.Refused(f"{len(mapped)} extents are mapped by a lease")
        return {}, []


_owners: dict[str, Owner] = {}
_lock = threading.Lock()


def owner_of(socket_name: str) -> Owner:
    """The process's connection to that saver, made anew when it was lost. OSError: nobody listens."""
    with _lock:
        owner = _owners.get(socket_name)
        if owner is None or owner.endpoint.closed:
            owner = _owners[socket_name] = Owner(socket_name)
        return owner


class Lease:
    """A tag of another saver, mapped at an address of this process.

    Where the GPU that is current is another one than the tag's, both can use the address, if they reach each other;
    ``close`` waits for the work of the tag's GPU only.
    Tensors from ``tensor`` dangle after ``close``. Errors: ``LeaseError`` when the owner refuses or is gone, or the
    tag's GPU is not visible here.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._backend = peer_backend(ticket.device_key)
        with contextlib.ExitStack() as undo:
            extents = lease_extents(ticket, undo)
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
                    self._backend.set_access(self._address, self.nbytes)
                    self._backend.set_peer_access(self._address, self.nbytes)
                mapped.pop_all()
            self._undo = undo.pop_all()
        self._closed = False

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, byte_offset: int = 0) -> torch.Tensor:
        """Tensor over the tag's pages, ``byte_offset`` bytes from the start of the tag's arena."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._closed:
            raise LeaseError(f"the lease of {self.ticket.tag!r} is closed; attach again")
        if byte_offset < 0 or byte_offset + nbytes > self.nbytes:
            last = byte_offset + nbytes
            raise ValueError(f"bytes {byte_offset}..{last} are outside the {self.nbytes} of {self.ticket.tag!r}")
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=self._backend.device)
        return self._backend.view(self._address + byte_offset, nbytes)[0].view(dtype).view(shape)

    def close(self) -> None:
        """Unmap, and tell the owner; when this returns, the owner knows that the lease has ended.

        May be tried again when the driver refused (``BackendError``).
        """
        if not self._closed:
            self._backend.synchronize()
            with device_lock(self.ticket.device_key):
                if self.nbytes:
                    self._backend.unmap(self._address, self.nbytes)
            self._closed = True
            self._undo.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def attach(ticket: Ticket) -> Lease:
    """Map the tag that ``ticket`` names into this process (also into the owner's, at a second address)."""
    return Lease(ticket)


def lease_extents(ticket: Ticket, undo: contextlib.ExitStack) -> list[shim.Extent]:
    """A lease of the tag: its extents as they lie there, by this process's handles, until ``undo`` (empty) unwinds."""
    granted = _granted(ticket, peer_backend(ticket.device_key), undo)
    ids = [extent_id for extent_id, _, _ in granted]
    handles = imports.pin(ids)
    undo.callback(imports.unpin, ids)
    return [shim.Extent(handle, *extent, shared=True) for handle, extent in zip(handles, granted, strict=True)]


def _granted(ticket: Ticket, backend: Backend, undo: contextlib.ExitStack) -> list[tuple[int, int, int]]:
    """(id, offset, nbytes) of every extent, all of them imported here."""
    with _explained(ticket):
        owner = owner_of(ticket.socket_name)
    with owner.granting:
        extents, forgotten = _ask(owner, ticket, backend, undo)
        if lost := imports.missing([extent_id for extent_id, _, _ in extents]):
            forgotten += lost  # with an answer that came too late
            undo.close()
            extents, _ = _ask(owner, ticket, backend, undo)
    return extents


def _ask(
    owner: Owner, ticket: Ticket, backend: Backend, undo: contextlib.ExitStack
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """The leased extents, and which of them the owner wrongly believes to be here: to be told when the lease ends."""
    with _explained(ticket):
        answer, fds = owner.endpoint.call("lease", timeout=TIMEOUT_SECONDS, token=ticket.token)
    fresh = [(extent_id, nbytes) for extent_id, _, nbytes, new in answer["extents"] if new]
    forgotten = [extent_id for extent_id, _ in fresh]
    undo.callback(_end_lease, owner, answer["lease"], forgotten)
    import_all(fresh, fds, backend, owner, forgotten)
    return [(extent_id, offset, nbytes) for extent_id, offset, nbytes, _ in answer["extents"]], forgotten


def import_all(
    extents: Sequence[tuple[int, int]], fds: Sequence[int], backend: Backend, owner: Owner, left: list[int]
) -> None:
    """Import (id, nbytes) each from its descriptor, closing all; ids leave ``left`` as they succeed."""
    pending = list(fds)
    try:
        if len(extents) != len(fds):  # the kernel leaves out those that would pass the limit of open files
            raise LeaseError(f"{len(fds)} of {len(extents)} descriptors came; raise the limit of open files")
        for extent_id, nbytes in extents:
            handle = backend.import_fd(pending.pop(0))
            imports.add(extent_id, Import(handle, nbytes, backend, owner))
            left.remove(extent_id)
    finally:
        rpc.close_all(pending)


def _end_lease(owner: Owner, lease: int, forgotten: list[int]) -> None:
    """forgotten: ids that the owner believes this process to have, but it has not."""
    with contextlib.suppress(rpc.Closed, TimeoutError, rpc.Refused):  # an owner that is gone needs no telling
        owner.endpoint.call("unlease", timeout=TIMEOUT_SECONDS, lease=lease, forgotten=forgotten)


def hand_over(extents: Sequence[shim.Extent], to: PoolTicket, backend: Backend) -> None:
    """Make the saver of ``to`` the owner of extents that nothing maps; their handles here become imports.

    Raises ``LeaseError`` when it refuses (nothing was changed), and ``Lost`` when it is not known what became of them.
    """
    _giving[threading.get_ident()] = time.monotonic()
    try:
        with explained("the memory was not handed over", "the saver to hand it to"):
            owner = owner_of(to.socket_name)
            wanted = [(extent.id, extent.nbytes) for extent in extents]
            answer, _ = owner.endpoint.call("offer", timeout=TIMEOUT_SECONDS, token=to.token, extents=wanted)
        with imports.arriving([extent.id for extent in extents]):
            _give(owner, extents, to, backend, answer["need"])
            for extent in extents:
                imports.add(extent.id, Import(extent.handle, extent.nbytes, backend, owner))
    finally:
        del _giving[threading.get_ident()]


_giving: dict[int, float] = {}  # by thread: when its hand-over began


def gives_for(seconds: float) -> bool:
    """Whether a hand-over of this process has waited for its receiver that long."""
    return any(time.monotonic() - began > seconds for began in tuple(_giving.values()))


def _give(owner: Owner, extents: Sequence[shim.Extent], to: PoolTicket, backend: Backend, need: list[int]) -> None:
    """need: ids of those that the receiver has not imported."""
    fds: list[int] = []
    wanted = [(extent.id, extent.nbytes) for extent in extents]
    try:
        for extent in extents:
            if extent.id in need:
                fds.append(backend.export_fd(extent.handle))
        owner.endpoint.call("give", timeout=TIMEOUT_SECONDS, fds=fds, token=to.token, extents=wanted, need=need)
    except rpc.Refused as error:
        raise LeaseError(f"the memory was not handed over: {error}; nothing was changed") from error
    except (rpc.Closed, TimeoutError) as error:
        raise Lost(str(error)) from error
    finally:
        rpc.close_all(fds)


class Lost(Exception):
    """The peer fell silent while extents changed hands: it may own them, so the giver must not."""


def _explained(ticket: Ticket) -> contextlib.AbstractContextManager[None]:
    return explained(f"no lease of tag {ticket.tag!r}", f"the owner of tag {ticket.tag!r}")


@contextlib.contextmanager
def explained(what: str, who: str) -> Iterator[None]:
    try:
        yield
    except rpc.Refused as error:
        raise LeaseError(f"{what}: {error}") from error
    except (OSError, TimeoutError) as error:
        raise LeaseError(f"{what}: {who} does not answer ({error}); is its process alive?") from error


@cache
def peer_backend(key: str) -> Backend:
    """What this process maps another saver's memory with."""
    if key == "cpu":
        return make_backend(torch.device("cpu"))
    for index in range(torch.cuda.device_count()):
        if device_key(torch.device("cuda", index)) == key:
            return make_backend(torch.device("cuda", index))
    raise LeaseError(f"{key} is not visible in this process; add it to CUDA_VISIBLE_DEVICES")

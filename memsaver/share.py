"""Leases: a tag's extents mapped in another process of the same user, by file descriptor.

The owner listens on an abstract unix socket (nothing in the file system to leave behind), checks the peer's user and
a random token, and sends the extents' fds. The connection is the lease's lifetime: it ends when the peer closes it,
or dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from memsaver.allocator import shim
from memsaver.arena import Arena, Reservation
from memsaver.backends.base import Backend, make_backend
from memsaver.errors import LeaseError

_FDS_PER_MESSAGE = 200  # the kernel takes 253
_MESSAGE_BYTES = 1 << 16
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Permission to map one tag; plain data to be sent to the peer. Good as long as the saver lives."""

    socket_name: str
    token: str
    tag: str
    device_key: str
    writable: bool


@dataclass(frozen=True)
class _Holder:
    pid: int
    tag: str


class LeaseServer:
    """The owner's side: grants leases from its own thread, and knows who holds which."""

    def __init__(self, lock: threading.RLock, find_arena: Callable[[str], Arena]) -> None:
        self._lock = lock
        self._find_arena = find_arena
        self._grants: dict[str, Ticket] = {}
        self._holders: dict[socket.socket, _Holder] = {}
        self._changed = threading.Condition()
        self._socket_name = f"memsaver-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self._socket_name)
        self._listener.listen()
        threading.Thread(target=self._accept, name="memsaver-leases", daemon=True).start()

    def ticket(self, arena: Arena, writable: bool) -> Ticket:
        """The same ticket for the same tag and right, however often it is asked for."""
        for known in self._grants.values():
            if (known.tag, known.writable) == (arena.tag, writable):
                return known
        token = secrets.token_hex(16)
        ticket = Ticket(
            socket_name=self._socket_name,
            token=token,
            tag=arena.tag,
            device_key=arena.backend.device_key,
            writable=writable,
        )
        self._grants[token] = ticket
        return ticket

    def holders(self, tag: str) -> list[int]:
        """Process ids that hold a lease of the tag."""
        with self._changed:
            return [holder.pid for holder in self._holders.values() if holder.tag == tag]

    def wait_free(self, tags: list[str], timeout: float) -> None:
        """Wait until no lease of the tags is left; ``LeaseError`` names who still holds one."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while held := [holder for holder in self._holders.values() if holder.tag in tags]:
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    names = ", ".join(f"{holder.tag!r} by process {holder.pid}" for holder in held)
                    raise LeaseError(f"leased: {names}; close the Lease there before pausing (nothing was changed)")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            for connection in self._holders:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="memsaver-lease", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:  # closed last: the peer takes that for the end of its lease
            try:
                if self._grant(connection):
                    connection.recv(16)  # until the peer says goodbye, or dies
            except OSError:
                pass  # a peer that died in the middle
            finally:
                with self._changed:
                    self._holders.pop(connection, None)
                    self._changed.notify_all()

    def _grant(self, connection: socket.socket) -> bool:
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        connection.settimeout(_TIMEOUT_SECONDS)
        ticket = self._grants.get(connection.recv(256).decode(errors="replace"))
        connection.settimeout(None)
        if ticket is None or uid != os.getuid():
            connection.send(json.dumps({"error": "unknown ticket, or another user's"}).encode())
            return False
        with self._lock:  # no pause between looking and sending
            arena = self._find_arena(ticket.tag)
            if arena.paused:
                connection.send(json.dumps({"error": f"tag {ticket.tag!r} is paused; resume it first"}).encode())
                return False
            with self._changed:
                self._holders[connection] = _Holder(pid, ticket.tag)
            arena.backend.bind_thread()
            _send_extents(connection, arena)
        return True


def _send_extents(connection: socket.socket, arena: Arena) -> None:
    extents = shim.extents(arena.slot)
    for first in range(0, max(1, len(extents)), _FDS_PER_MESSAGE):
        batch = extents[first : first + _FDS_PER_MESSAGE]
        more = first + _FDS_PER_MESSAGE < len(extents)
        text = json.dumps({"extents": [(item.offset, item.nbytes) for item in batch], "more": more}).encode()
        fds: list[int] = []
        try:
            for item in batch:
                fds.append(arena.backend.export_fd(item.handle))
            socket.send_fds(connection, [text], fds)
        finally:
            for fd in fds:
                os.close(fd)


class Lease:
    """The peer's side: a tag of another saver, mapped at an address of this process.

    Tensors from ``tensor`` dangle after ``close``. Errors: ``LeaseError`` when the owner refuses or is gone, or the
    tag's GPU is not visible here.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._backend = _peer_backend(ticket.device_key)
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            undo.callback(_say_goodbye, connection)
            pieces = _fetch_extents(connection, ticket, self._backend)
            for handle, _, _ in pieces:
                undo.callback(self._backend.release, handle, 0)
            self.nbytes = sum(nbytes for _, _, nbytes in pieces)
            reservation = Reservation(self._backend, max(self.nbytes, self._backend.granularity))
            undo.callback(reservation.close)
            self._address = reservation.address
            for handle, offset, nbytes in pieces:
                self._backend.map(self._address + offset, nbytes, handle, ticket.writable)
                undo.callback(self._backend.unmap, self._address + offset, nbytes)
            if self.nbytes:
                self._backend.set_access(self._address, self.nbytes)
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
        """Unmap, and tell the owner; when this returns, the owner knows that the lease has ended."""
        if not self._closed:
            self._closed = True
            self._backend.synchronize()
            self._undo.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def attach(ticket: Ticket) -> Lease:
    """Map the tag that ``ticket`` names into this process (also into the owner's, at a second address)."""
    return Lease(ticket)


def _fetch_extents(connection: socket.socket, ticket: Ticket, backend: Backend) -> list[tuple[int, int, int]]:
    """Ask the owner; (imported handle, offset, nbytes) of every extent. All or nothing."""
    connection.settimeout(_TIMEOUT_SECONDS)
    pieces: list[tuple[int, int, int]] = []
    with contextlib.ExitStack() as undo:
        undo.enter_context(_explained(ticket))
        connection.connect("\0" + ticket.socket_name)
        connection.send(ticket.token.encode())
        more = True
        while more:
            text, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _FDS_PER_MESSAGE)
            reply = json.loads(text or b'{"error": "the owner closed the connection"}')
            if "error" in reply:
                raise LeaseError(f"no lease of tag {ticket.tag!r}: {reply['error']}")
            for fd, (offset, nbytes) in zip(fds, reply["extents"], strict=True):
                handle = backend.import_fd(fd)
                undo.callback(backend.release, handle, 0)
                pieces.append((handle, offset, nbytes))
            more = reply["more"]
        undo.pop_all()
    return pieces


@contextlib.contextmanager
def _explained(ticket: Ticket) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LeaseError(f"the owner of tag {ticket.tag!r} does not answer ({error}); is its process alive?") from error


def _say_goodbye(connection: socket.socket) -> None:
    """End the lease at the owner before going on; an owner that is gone needs no telling."""
    with contextlib.suppress(OSError):
        connection.send(b"bye")
        connection.recv(16)  # returns when the owner has closed its end


@cache
def _peer_backend(device_key: str) -> Backend:
    if device_key == "cpu":
        return make_backend(torch.device("cpu"))
    for index in range(torch.cuda.device_count()):
        if f"GPU-{torch.cuda.get_device_properties(index).uuid}" == device_key:
            return make_backend(torch.device("cuda", index))
    raise LeaseError(f"{device_key} is not visible in this process; add it to CUDA_VISIBLE_DEVICES")

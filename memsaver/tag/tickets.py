"""Tickets that permit other savers to use memory, and pages aliased with such a ticket."""

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from memsaver.errors import LeaseError
from memsaver.memory.backend import Backend
from memsaver.native import shim


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Permission to map one tag: picklable data, valid while the issuing saver lives.

    Attributes:
        socket_name: Abstract Unix socket of the issuing saver.
        token: Secret that identifies the ticket to the saver.
        tag: Tag that the ticket is for.
        device_key: Device of the tag: ``"cpu"`` or the identity of a GPU.
        writable: Whether the holder may write to the tag.
    """

    socket_name: str
    token: str
    tag: str
    device_key: str
    writable: bool


@dataclass(frozen=True, kw_only=True)
class PoolTicket:
    """Permission to hand memory over to a saver: picklable data, valid while the saver lives.

    Attributes:
        socket_name: Abstract Unix socket of the issuing saver.
        token: Secret that identifies the ticket to the saver.
        device_key: Device of the saver: ``"cpu"`` or the identity of a GPU.
        pid: Process of the saver.
    """

    socket_name: str
    token: str
    device_key: str
    pid: int


class Peers(Protocol):
    """The peers that share a saver's memory, as its operations see them."""

    def made(self, ticket: Ticket) -> bool:
        """Return whether this saver issued the ticket."""

    def holders(self, tag: str) -> list[int]:
        """Return the process ids of the tag's leases, one per lease."""

    def wait_free(self, tags: Sequence[str], timeout: float) -> None:
        """Wait until no lease maps the tags, or raise ``LeaseError`` naming the holders."""

    def recall(self, tags: Sequence[str]) -> None:
        """Ask peers to end cached leases of the tags, immediately or with the present use."""

    def revoke(self, ids: Sequence[int], except_pid: int | None) -> None:
        """Revoke the peers' imports of extents, or raise ``LeaseError`` naming a peer."""

    def hand_over(self, extents: Sequence[shim.Extent], to: PoolTicket) -> LeaseError | None:
        """Hand unmapped extents over to another saver; see `memsaver.sharing.hand_over`."""

    def close(self) -> None:
        """End all connections, after which peers release their imports."""


_log = logging.getLogger("memsaver")


class AliasedPages:
    """Pages of another saver's tag, held by a lease for the arena that aliases them.

    The extents have handles of this process and leave no gaps from byte 0 on. The arena that maps
    them unmaps them and then calls ``end``, which releases them and tells the owner.
    """

    def __init__(
        self, ticket: Ticket, extents: Sequence[shim.Extent], end: Callable[[], None]
    ) -> None:
        self.ticket = ticket
        self.extents = tuple(extents)
        self.nbytes = sum(extent.nbytes for extent in extents)
        self.end = end
        self._endings = endings()  # here, because a finalizer must not start threads

    def drop(self, backend: Backend, address: int) -> None:
        """Unmap the pages, and end the lease in another thread.

        Finalizers call this under any lock, so they must not talk to the owner themselves.
        """
        if self.nbytes:
            backend.unmap(address, self.nbytes)
        self._endings.put(self.end)


@cache
def endings() -> queue.SimpleQueue[Callable[[], None]]:
    """Return the queue of callbacks from finalizers, which one thread of this process calls.

    A forked child starts with a new queue, because the memory and connections are its parent's.
    """
    pending: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    name = f"memsaver-aliased-{os.getpid()}"
    threading.Thread(target=_call_all, args=[pending], name=name, daemon=True).start()
    return pending


os.register_at_fork(after_in_child=endings.cache_clear)


def _call_all(pending: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        try:
            pending.get()()
        except Exception:
            _log.exception(
                "aliased pages were not returned to their owner, "
                "which may count them as leased until this process ends"
            )

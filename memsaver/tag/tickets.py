"""Permissions that one saver gives to others; pages of another saver's tag behind one of ours, and
how they go back when nobody may wait for it.
"""

from __future__ import annotations

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
    """Permission to map one tag; plain data for the peer. Good as long as the saver lives."""

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


class Peers(Protocol):
    """Represents the other processes that share this saver's memory, to its operations."""

    def made(self, ticket: Ticket) -> bool:
        """Return whether the ticket is for a tag of this saver."""

    def holders(self, tag: str) -> list[int]:
        """Return the processes that map the tag, once for each lease."""

    def wait_free(self, tags: Sequence[str], timeout: float) -> None:
        """Wait until no lease maps the tags; ``LeaseError`` names who still does."""

    def recall(self, tags: Sequence[str]) -> None:
        """Have peers end leases of the tags that they do not use."""

    def revoke(self, ids: Sequence[int], except_pid: int | None) -> None:
        """Have peers release their imports of these extents; ``LeaseError`` names who does not."""

    def hand_over(self, extents: Sequence[shim.Extent], to: PoolTicket) -> LeaseError | None:
        """Give unmapped extents to another saver; see `memsaver.sharing.hand_over`."""

    def close(self) -> None:
        """End all connections: peers let go of what they imported."""


_log = logging.getLogger("memsaver")


class AliasedPages:
    """The lease behind an aliased tag. Who maps the extents unmaps them, then calls ``end``."""

    def __init__(
        self, ticket: Ticket, extents: Sequence[shim.Extent], end: Callable[[], None]
    ) -> None:
        """extents: gap-free from byte 0 on, by this process's handles.

        end: lets go of them, and tells the owner.
        """
        self.ticket = ticket
        self.extents = tuple(extents)
        self.nbytes = sum(extent.nbytes for extent in extents)
        self.end = end
        self._endings = endings()  # now: a finalizer is not to start threads

    def drop(self, backend: Backend, address: int) -> None:
        """Unmap and end, for a finalizer: it may run under any lock, so another thread talks to the
        owner.
        """
        if self.nbytes:
            backend.unmap(address, self.nbytes)
        self._endings.put(self.end)


@cache
def endings() -> queue.SimpleQueue[Callable[[], None]]:
    """Return the queue of this process's thread that calls what finalizers put there, in order.

    In a forked child nobody reads its parent's: the memory and connections there are not its own.
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
                "aliased pages were not given back in order; "
                "their owner may miss them until this ends"
            )

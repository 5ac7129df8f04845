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


class Endings:
    """Calls what finalizers put here, one after the other in a thread, and nothing in a forked
    child, whose memory and connections it is not.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._pending: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        name = f"memsaver-aliased-{self._pid}"
        threading.Thread(target=_call_all, args=[self._pending], name=name, daemon=True).start()

    def put(self, *calls: Callable[[], None]) -> None:
        if os.getpid() == self._pid:
            for call in calls:
                self._pending.put(call)


@cache
def endings() -> Endings:
    """Returns those of this process."""
    return Endings()


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

"""Pages of another saver's tag behind a tag of this one, and how they go back when nobody may wait
for the owner.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from memsaver.native import shim
from memsaver.vmm.backend import Backend

if TYPE_CHECKING:
    from memsaver.tag.tickets import Ticket

_log = logging.getLogger("memsaver")


class BorrowedPages:
    """The lease behind a borrowed tag. Who maps the extents unmaps them, then calls ``end``."""

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
        self._pid = os.getpid()
        self._endings = endings(self._pid)  # now: a finalizer is not to start threads

    def drop(self, backend: Backend, address: int) -> None:
        """Unmap and end, for a finalizer: it may run under any lock, so another thread talks to the
        owner.

        Does nothing in a forked child, which has neither the mapping nor the lease.
        """
        if os.getpid() == self._pid:
            if self.nbytes:
                backend.unmap(address, self.nbytes)
            self._endings.put(self.end)


@cache
def endings(pid: int) -> queue.SimpleQueue[Callable[[], None]]:
    """Returns a queue of what a thread of this process calls, one after the other; putting
    something there is safe in a finalizer.
    """
    pending: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    threading.Thread(
        target=_call_all, args=[pending], name=f"memsaver-borrowed-{pid}", daemon=True
    ).start()
    return pending


def _call_all(pending: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        try:
            pending.get()()
        except Exception:
            _log.exception(
                "borrowed pages were not given back in order; "
                "their owner may miss them until this ends"
            )

"""Tags that take each other's pages: two of one saver exchange them, one borrows those of another saver's tag."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from memsaver.common.signals import held
from memsaver.errors import StateError, format_bytes
from memsaver.placing import Placing
from memsaver.tag.arena import Arena

if TYPE_CHECKING:
    from memsaver.sharing.lease import Ticket


class Aliasing(Placing):
    """The operations of ``MemorySaver`` that put one tag's pages behind another's addresses."""

    def exchange(self, one: str, other: str) -> None:
        """Two active tags swap their memory: what the tensors of each showed, those of the other show from here on.

        Addresses stay, so tensors and captured CUDA graphs do; nothing is copied. Both must have as many bytes
        committed. Waits for the device. What ``mark_clean`` said goes with the content; copies that were kept of it are
        dropped. Raises ``ValueError`` (sizes, or twice the same tag), ``StateError`` (paused, or a region is open),
        ``LeaseError`` (another process maps one of them, or one is borrowed); nothing was changed then.
        """
        with self._operation():
            arenas = [self._active(tag, "exchange") for tag in (one, other)]
            if one == other:
                raise ValueError(f"exchange needs two tags, got {one!r} twice")
            if inside := [arena.tag for arena in arenas if arena.open_regions]:
                raise StateError(f"cannot exchange {inside}: a region of it is open; leave the region first")
            started = time.perf_counter()
            self._switch.exchange(*arenas)
            seconds = time.perf_counter() - started
            for arena in arenas:
                self._recorder.record("exchange", arena, seconds)

    def borrow(self, tag: str, ticket: Ticket) -> None:
        """Make a paused tag active with the pages of another saver's tag, whose ``share`` gave the ticket.

        Byte i of the tag is byte i of the other one: two tags, one memory, which stays the owner's and counts there.
        ``pause(tag)`` gives it back; until then the owner cannot pause, and this tag cannot be allocated on, resized,
        exchanged, swapped, saved or shared (``LeaseError``). The tag's own content, if it was saved, comes back with
        the ``resume`` after that. Writable as the ticket says. The pages stay if the owner dies.

        Raises ``StateError`` (the tag is not paused), ``ValueError`` (another device, a ticket of this saver, or the
        tag's tensors need more bytes than the other tag has), ``LeaseError`` (the owner refuses or is gone); nothing
        was changed then.
        """
        with self._lock:
            self._borrower(tag, ticket)
        from memsaver.sharing.lease import lease_extents
        from memsaver.sharing.peer_backend import peer_backend
        from memsaver.tag.borrowed import Loan

        started, ends = time.perf_counter(), contextlib.ExitStack()
        with held(), contextlib.ExitStack() as undo:
            undo.callback(ends.close)
            backend = peer_backend(ticket.device_key, self.backend.device)
            grant = lease_extents(ticket, backend, ends)  # without the lock: the owner may be waiting for this saver
            with self._operation():
                arena, loan = self._borrower(tag, ticket), Loan(ticket, grant.extents, ends.close)
                self._check_size(arena, ticket, loan.nbytes)
                self._switch.borrow(arena, loan)
                undo.pop_all()
                self._recorder.record("borrow", arena, time.perf_counter() - started)

    def _borrower(self, tag: str, ticket: Ticket) -> Arena:
        """The tag, if it may borrow what the ticket is for."""
        arena = self._arena(tag)
        arena.require_own(f"borrow({tag!r})")
        if not arena.paused:
            raise StateError(f"borrow({tag!r}): the tag is active; pause it first")
        if ticket.device_key != self.backend.device_key:
            raise ValueError(f"borrow({tag!r}): pages of {ticket.device_key} cannot serve {self.backend.device_key}")
        if self._switch.server is not None and self._switch.server.made(ticket):
            raise ValueError(f"borrow({tag!r}): {ticket.tag!r} is a tag of the same saver; use exchange()")
        return arena

    def _check_size(self, arena: Arena, ticket: Ticket, nbytes: int) -> None:
        needed = min(arena.committed_when_paused, self.backend.round_up(arena.stats.top))
        if not needed <= nbytes <= arena.reservation.nbytes:
            raise ValueError(
                f"borrow({arena.tag!r}): the tag needs {format_bytes(needed)} and has addresses for "
                f"{format_bytes(arena.reservation.nbytes)}; tag {ticket.tag!r} has {format_bytes(nbytes)}"
            )

"""The host memory that paused tags are saved in: one arena per process and kind, for good."""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memsaver.common.layout import joined, round_up
from memsaver.common.machine import workers
from memsaver.errors import BackendError, HostMemoryError, format_bytes
from memsaver.vmm import pinned_pages
from memsaver.vmm.pinned_pages import HUGE_PAGE, Pinner

UNIT = 4096  # bytes: what direct I/O asks for
SEGMENT = 1 << 30  # bytes: one is pinned while the next is touched
_AT_ONCE = 2  # segments that are obtained beside other work: one touched, one pinned


class Piece(NamedTuple):
    """A part of the arena: where it starts, and how long it is."""

    address: int
    nbytes: int


@dataclass
class _Segment:
    """Memory pinned in one go. ``free``: its parts that nobody uses, in order, never adjacent."""

    address: int
    nbytes: int
    free: list[Piece] = field(default_factory=list)

    @property
    def free_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.free)


class HostArena:
    """Pieces of host memory, pinned once and used again and again. Thread-safe.

    budget_bytes: the most that it may hold. None: with the tiers of the KV cache it may have 0.8 of
    what machine and container have available besides, 5 % of their memory being left to Ray's
    memory monitor (`room_bytes`).
    """

    def __init__(self, pinner: Pinner | None, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._pinner = pinner
        self._segments: list[_Segment] = []
        # so that a finalizer, which may run anywhere, needs no lock
        self._returned: deque[Piece] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._coming = 0  # bytes that `reserve` asked for and are not there yet
        self._stops = 0  # what was asked for before the last is not begun any more

    @property
    def committed_bytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self.committed_bytes - sum(segment.free_bytes for segment in self._segments)

    def take(self, nbytes: int, whole: bool = False) -> list[Piece]:
        """Pieces of ``nbytes`` together, few; ``HostMemoryError``, with nothing taken, if it may
        not grow so far.

        whole: one piece. Each begins at, and has, a multiple of UNIT bytes.
        """
        taken: list[Piece] = []
        with self._lock:
            left = round_up(nbytes, UNIT)
            try:
                while left:
                    self._collect()
                    if piece := self._take_free(left, whole):
                        more = [piece]
                    elif self._coming:
                        self._changed.wait()
                        continue
                    else:
                        more = self._grow(left, whole)
                    taken += more
                    left -= sum(each.nbytes for each in more)
            except BaseException:
                self.give(taken)
                raise
        return taken

    def reserve(self, nbytes: int, bind: Callable[[], None]) -> None:
        """Begins to obtain, beside other work, what is missing for so many bytes to be free; a
        ``take`` uses what is there, and waits for what is on its way.

        What may not be had is left: the ``take`` that needs it says why. bind: called first in the
        threads that do it.
        """
        with self._lock:
            self._collect()
            free = sum(segment.free_bytes for segment in self._segments)
            more = round_up(max(0, nbytes - free - self._coming), HUGE_PAGE)
            with contextlib.suppress(HostMemoryError):
                self._check_budget(self._coming + more)
                for at in range(0, more, SEGMENT):
                    size = min(SEGMENT, more - at)
                    workers("reserve", _AT_ONCE).submit(self._bring, size, bind, self._stops)
                    self._coming += size

    def stop(self) -> None:
        """Ends what ``reserve`` began: waits for what is under way, which stays."""
        with self._lock:
            self._stops += 1
            self._changed.wait_for(lambda: not self._coming)

    def give(self, pieces: Sequence[Piece]) -> None:
        """Takes back pieces that are not needed any more. Takes no lock: finalizers call it."""
        self._returned.extend(pieces)

    def trim(self) -> int:
        """Give memory that no saved content is in back to the system; bytes."""
        self.stop()
        with self._lock:
            self._collect()
            unused = [s for s in self._segments if s.free_bytes == s.nbytes]
            for segment in unused:
                pinned_pages.give_back(segment.address, segment.nbytes, self._pinner)
                self._segments.remove(segment)
            return sum(segment.nbytes for segment in unused)

    def _take_free(self, most: int, whole: bool) -> Piece | None:
        """Takes from the smallest free part that has it all, else the largest part, unless it must
        be ``whole``.
        """
        parts = [*itertools.chain.from_iterable(segment.free for segment in self._segments)]
        enough = [piece for piece in parts if piece.nbytes >= most]
        if not parts or (whole and not enough):
            return None
        length = operator.attrgetter("nbytes")
        piece = min(enough, key=length) if enough else max(parts, key=length)
        free = self._segment_of(piece).free
        at, size = free.index(piece), min(piece.nbytes, most)
        rest = Piece(piece.address + size, piece.nbytes - size)
        free[at : at + 1] = [rest] if rest.nbytes else []
        return Piece(piece.address, size)

    def _bring(self, size: int, bind: Callable[[], None], stops: int) -> None:
        """Adds a segment, unless that was stopped meanwhile; a refusal stops the rest."""
        made: list[_Segment] = []
        try:
            # the last: as Python ends, it takes no more work
            with contextlib.suppress(MemoryError, BackendError, RuntimeError):
                if self._may_come(size, stops):
                    bind()
                    (address,) = pinned_pages.obtain([size], self._pinner)
                    made.append(_Segment(address, size, [Piece(address, size)]))
        finally:
            with self._lock:
                self._coming -= size
                self._segments += made
                if not made and stops == self._stops:
                    self._stops += 1
                self._changed.notify_all()

    def _may_come(self, size: int, stops: int) -> bool:
        with self._lock:
            if stops == self._stops:
                self._check_budget(size)
            return stops == self._stops

    def _grow(self, nbytes: int, whole: bool) -> list[Piece]:
        size = round_up(nbytes, HUGE_PAGE)
        self._check_budget(size)
        most = size if whole else SEGMENT
        sizes = [min(most, size - at) for at in range(0, size, most)]
        try:
            addresses = pinned_pages.obtain(sizes, self._pinner)
        except (MemoryError, BackendError) as error:
            raise self._refusal(size, 0, str(error)) from error
        made = [_Segment(address, each) for address, each in zip(addresses, sizes, strict=True)]
        spare = size - nbytes
        if spare:
            made[-1].free.append(Piece(made[-1].address + made[-1].nbytes - spare, spare))
        self._segments += made
        return [Piece(s.address, s.nbytes - s.free_bytes) for s in made]

    def _check_budget(self, more: int) -> None:
        if self.budget_bytes is not None:
            left = self.budget_bytes - self.committed_bytes
            why = f"the budget is {format_bytes(self.budget_bytes)}"
        else:
            left = pinned_pages.room_bytes()
            may = f"{format_bytes(max(0, left))} more may be taken"
            why = f"{may} of the machine's and the container's memory"
        if more > left:
            raise self._refusal(more, more - left, why)

    def _refusal(self, nbytes: int, missing: int, why: str) -> HostMemoryError:
        message = (
            f"{format_bytes(nbytes)} more of host memory are needed for saved content, which holds "
            f"{format_bytes(self.committed_bytes)}: {why}. Resume a saved tag first, "
            "raise host_arena.budget_bytes, or pause with content='discard'; nothing was changed."
        )
        return HostMemoryError(message, nbytes, missing, {"saved content": self.committed_bytes})

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            segment = self._segment_of(piece)
            free = joined(sorted([*segment.free, piece]))
            segment.free = [Piece(*part) for part in free]

    def _segment_of(self, piece: Piece) -> _Segment:
        return next(s for s in self._segments if 0 <= piece.address - s.address < s.nbytes)

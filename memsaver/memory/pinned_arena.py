"""Host memory that paused tags are saved in, one arena per process and kind, for good; beneath it
host memory that is there before it is used: huge pages if any, touched by threads, pinned.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from memsaver.errors import BackendError, HostMemoryError, format_bytes
from memsaver.ops.layout import joined, round_up
from memsaver.system.host_memory import available_memory
from memsaver.system.libc import MAP_FAILED, libc
from memsaver.system.threads import workers

HUGE_PAGE = 2 << 20
SHARE = 0.8  # of the memory that is available: others want some, too
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 10, 14, 23
_CHUNK = 16 << 20
UNIT = 4096  # bytes: what direct I/O asks for
SEGMENT = 1 << 30  # bytes: one is pinned while the next is touched
_AT_ONCE = 2  # segments that are obtained beside other work: one touched, one pinned


_held: dict[int, int] = {}  # bytes by address; a child that is forked has none of them
os.register_at_fork(after_in_child=_held.clear)


class Pinner(Protocol):
    """Makes host memory reachable for a device's copy engines."""

    def pin(self, address: int, nbytes: int) -> None: ...
    def unpin(self, address: int) -> None: ...
    def __hash__(self) -> int: ...


def held_bytes() -> int:
    """Counts what this process has obtained, for saved content and KV cache tiers together."""
    return sum(tuple(_held.values()))


def room_bytes() -> int:
    """Tells how much more may be obtained: all of it together is at most 0.8 of what machine and
    container would have available without it.
    """
    held = held_bytes()
    return int(SHARE * (available_memory() + held)) - held


def obtain(sizes: Sequence[int], pinner: Pinner | None) -> list[int]:
    """Addresses of so many bytes each (multiples of HUGE_PAGE), side by side, with memory behind
    every page; or none.

    While one is pinned the next are touched. A forked child does not have them. ``MemoryError``,
    ``BackendError``.
    """
    address = _map(sum(sizes))
    starts = [address + at for at in itertools.accumulate(sizes, initial=0)][:-1]
    with contextlib.ExitStack() as undo:
        undo.callback(libc().munmap, address, sum(sizes))
        touching = [_touch(start, nbytes) for start, nbytes in zip(starts, sizes, strict=True)]
        undo.callback(wait, [*itertools.chain.from_iterable(touching)])
        for start, nbytes, parts in zip(starts, sizes, touching, strict=True):
            for part in parts:
                part.result()
            if pinner is not None:
                pinner.pin(start, nbytes)
                undo.callback(pinner.unpin, start)
        undo.pop_all()
    _held.update(zip(starts, sizes, strict=True))
    return starts


def _map(nbytes: int) -> int:
    """Addresses that begin with a huge page."""
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    raw = libc().mmap(None, nbytes + HUGE_PAGE, access, flags, -1, 0)
    if raw == MAP_FAILED:
        raise MemoryError(f"mmap: {os.strerror(ctypes.get_errno())}")
    address = round_up(raw, HUGE_PAGE)
    # whole huge pages only
    for start, end in ((raw, address), (address + nbytes, raw + nbytes + HUGE_PAGE)):
        if end > start:
            libc().munmap(start, end - start)
    libc().madvise(address, nbytes, _MADV_DONTFORK)
    # refused where the kernel has none: then small pages
    libc().madvise(address, nbytes, _MADV_HUGEPAGE)
    return address


def give_back(address: int, nbytes: int, pinner: Pinner | None) -> None:
    if pinner is not None:
        pinner.unpin(address)
    libc().munmap(address, nbytes)
    _held.pop(address, None)


def _touch(address: int, nbytes: int) -> list[Future[None]]:
    """One thread gets 2 GiB/s from the kernel, which clears the pages; many get many times that."""
    starts = range(address, address + nbytes, _CHUNK)
    return [
        workers("touch").submit(_populate, start, min(_CHUNK, address + nbytes - start))
        for start in starts
    ]


def _populate(address: int, nbytes: int) -> None:
    """A page at a time: a call keeps whoever maps something in this process waiting."""
    for page in range(address, address + nbytes, HUGE_PAGE):
        if libc().madvise(page, HUGE_PAGE, _MADV_POPULATE_WRITE) == 0:
            continue
        if (code := ctypes.get_errno()) != errno.EINVAL:
            raise MemoryError(f"no host memory: {os.strerror(code)}")
        ctypes.memset(page, 0, HUGE_PAGE)  # a kernel before 5.14


class PinnedPiece(NamedTuple):
    """A part of the arena: where it starts, and how long it is."""

    address: int
    nbytes: int


@dataclass
class _Segment:
    """Memory pinned in one go. ``free``: its parts that nobody uses, in order, never adjacent."""

    address: int
    nbytes: int
    free: list[PinnedPiece] = field(default_factory=list)

    @property
    def free_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.free)


class PinnedArena:
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
        self._returned: deque[PinnedPiece] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Bytes by tag of each owner.
        self._reserved: weakref.WeakKeyDictionary[object, dict[str, int]] = (
            weakref.WeakKeyDictionary()
        )
        # Bytes of each segment on its way, and the reservation that it is for.
        self._coming: dict[Future[None], tuple[int, dict[str, int]]] = {}

    @property
    def committed_bytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments)

    @property
    def coming_bytes(self) -> int:
        """Bytes that ``reserve`` asked for and are not there yet."""
        return sum(size for size, _ in tuple(self._coming.values()))

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self.committed_bytes - sum(segment.free_bytes for segment in self._segments)

    def take(self, nbytes: int, whole: bool = False) -> list[PinnedPiece]:
        """Pieces of ``nbytes`` together, few; ``HostMemoryError``, with nothing taken, if it may
        not grow so far.

        whole: one piece. Each begins at, and has, a multiple of UNIT bytes.
        """
        taken: list[PinnedPiece] = []
        with self._lock:
            left = round_up(nbytes, UNIT)
            try:
                while left:
                    self._collect()
                    if piece := self._take_free(left, whole):
                        more = [piece]
                    elif self.coming_bytes:
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

    def reserve(
        self,
        owner: object,
        sizes: Mapping[str, int],
        bind: Callable[[], None],
        saved: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Begins to obtain, beside other work, what is missing for ``sizes``, bytes by tag, to be
        free, and for all that is reserved to fit at once; a ``take`` uses what is there, and waits
        for what is on its way.

        A tag of an owner counts once, as it was reserved last. What may not be had is left: the
        ``take`` that needs it says why. bind: called first in the threads that do it. saved: bytes
        of the tags that lie in the arena now, which need no room beside themselves.
        """
        with self._lock:
            self._collect()
            reserved = self._reserved.setdefault(owner, {})
            reserved.update(sizes)
            free = sum(segment.free_bytes for segment in self._segments)
            wanted = sum(max(0, sizes[tag] - saved.get(tag, 0)) for tag in sizes)
            together = sum(sum(each.values()) for each in self._reserved.values())
            missing = max(wanted - free, together - self.committed_bytes)
            more = round_up(max(0, missing - self.coming_bytes), HUGE_PAGE)
            with contextlib.suppress(HostMemoryError):
                self._check_budget(self.coming_bytes + more)
                for at in range(0, more, SEGMENT):
                    size = min(SEGMENT, more - at)
                    segment = workers("reserve", _AT_ONCE).submit(self._bring, size, bind, reserved)
                    self._coming[segment] = size, reserved
                    segment.add_done_callback(self._arrived)

    def stop(self, owner: object | None = None) -> None:
        """End what ``reserve`` began for the owner, or, without one, for anybody: wait for what is
        under way, which stays. Nothing is reserved for them any more.
        """
        with self._lock:
            if owner is None:
                self._reserved.clear()
                segments = [*self._coming]
            else:
                ended = self._reserved.pop(owner, None)
                segments = [s for s, (_, reserved) in self._coming.items() if reserved is ended]
            for segment in segments:
                segment.cancel()
            self._changed.wait_for(lambda: self._coming.keys().isdisjoint(segments))

    def _arrived(self, segment: Future[None]) -> None:
        with self._lock:
            del self._coming[segment]
            self._changed.notify_all()

    def give(self, pieces: Sequence[PinnedPiece]) -> None:
        """Takes back pieces that are not needed any more. Takes no lock: finalizers call it."""
        self._returned.extend(pieces)

    def trim(self) -> int:
        """Give memory that no saved content is in back to the system; bytes."""
        self.stop()
        with self._lock:
            self._collect()
            unused = [s for s in self._segments if s.free_bytes == s.nbytes]
            for segment in unused:
                give_back(segment.address, segment.nbytes, self._pinner)
                self._segments.remove(segment)
            return sum(segment.nbytes for segment in unused)

    def _take_free(self, most: int, whole: bool) -> PinnedPiece | None:
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
        rest = PinnedPiece(piece.address + size, piece.nbytes - size)
        free[at : at + 1] = [rest] if rest.nbytes else []
        return PinnedPiece(piece.address, size)

    def _bring(self, size: int, bind: Callable[[], None], reserved: dict[str, int]) -> None:
        """Add a segment; a refusal ends what else was begun for the reservation."""
        try:
            self._check_budget(size)
            bind()
            (address,) = obtain([size], self._pinner)
        # RuntimeError: as Python ends, threads take no more work
        except (MemoryError, BackendError, RuntimeError):
            with self._lock:
                segments = [*self._coming.items()]
            for segment, (_, owner) in segments:
                if owner is reserved:
                    segment.cancel()  # which leaves this one, as it runs
            return
        with self._lock:
            self._segments.append(_Segment(address, size, [PinnedPiece(address, size)]))

    def _grow(self, nbytes: int, whole: bool) -> list[PinnedPiece]:
        size = round_up(nbytes, HUGE_PAGE)
        self._check_budget(size)
        most = size if whole else SEGMENT
        sizes = [min(most, size - at) for at in range(0, size, most)]
        try:
            addresses = obtain(sizes, self._pinner)
        except (MemoryError, BackendError) as error:
            raise self._refusal(size, 0, str(error)) from error
        made = [_Segment(address, each) for address, each in zip(addresses, sizes, strict=True)]
        spare = size - nbytes
        if spare:
            made[-1].free.append(PinnedPiece(made[-1].address + made[-1].nbytes - spare, spare))
        self._segments += made
        return [PinnedPiece(s.address, s.nbytes - s.free_bytes) for s in made]

    def _check_budget(self, more: int) -> None:
        if self.budget_bytes is not None:
            left = self.budget_bytes - self.committed_bytes
            why = f"the budget is {format_bytes(self.budget_bytes)}"
        else:
            left = room_bytes()
            may = f"{format_bytes(max(0, left))} more may be taken"
            why = f"{may} of the machine's and the container's memory"
        if more > left:
            raise self._refusal(more, more - left, why)

    def _refusal(self, nbytes: int, missing: int, why: str) -> HostMemoryError:
        message = (
            f"{format_bytes(nbytes)} more of host memory are needed for saved content, which holds "
            f"{format_bytes(self.committed_bytes)}: {why}. Resume a saved tag first, "
            "raise pinned_arena.budget_bytes, or pause with content='disk'; nothing was changed."
        )
        return HostMemoryError(message, nbytes, missing, {"saved content": self.committed_bytes})

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            segment = self._segment_of(piece)
            free = joined(sorted([*segment.free, piece]))
            segment.free = [PinnedPiece(*part) for part in free]

    def _segment_of(self, piece: PinnedPiece) -> _Segment:
        return next(s for s in self._segments if 0 <= piece.address - s.address < s.nbytes)

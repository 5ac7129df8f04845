"""Manage the host memory for saved content, in one arena for each process and kind of pinning.

The memory is resident before it is used: in huge pages if possible, populated by several threads,
and pinned.
"""

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
from memsaver.system.libc import MAP_FAILED, fill_in_children, libc
from memsaver.system.limits import limit_remedy
from memsaver.system.threads import workers

HUGE_PAGE = 2 << 20
SHARE = 0.8  # of the available memory; the rest is left to other users
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 10, 14, 23
_CHUNK = 16 << 20
UNIT = 4096  # bytes: the alignment that direct I/O requires
SEGMENT = 1 << 30  # bytes: one segment is pinned while the next is populated
_AT_ONCE = 2  # segments that are obtained in the background: one populated, one pinned


_held: dict[int, int] = {}  # bytes by address; empty in a forked child
fill_in_children(_held)


class Pinner(Protocol):
    """An object that makes host memory reachable for a device's copy engines."""

    def pin(self, address: int, nbytes: int) -> None: ...
    def unpin(self, address: int) -> None: ...
    def __hash__(self) -> int: ...


def held_bytes() -> int:
    """Return the bytes this process has obtained, for saved content and KV cache tiers together."""
    return sum(tuple(_held.values()))


def room_bytes() -> int:
    """Return how many more bytes may be obtained.

    The total is limited to 0.8 of the bytes that machine and container would have available without
    this process's share.
    """
    held = held_bytes()
    return int(SHARE * (available_memory() + held)) - held


def obtain(sizes: Sequence[int], pinner: Pinner | None) -> list[int]:
    """Obtain adjacent ranges of resident host memory, all or none; return their addresses.

    ``sizes`` are multiples of HUGE_PAGE. One range is pinned, if there is a pinner, while the next
    are populated. A forked child does not have the memory.

    Raises:
        MemoryError: The system has too little memory.
        BackendError: The memory cannot be pinned.
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
    """Map ``nbytes`` of addresses that begin with a huge page."""
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    raw = libc().mmap(None, nbytes + HUGE_PAGE, access, flags, -1, 0)
    if raw == MAP_FAILED:
        code = ctypes.get_errno()
        remedy = limit_remedy(code) or "free host memory"
        raise MemoryError(f"mapping {format_bytes(nbytes)}: {os.strerror(code)}; {remedy}")
    address = round_up(raw, HUGE_PAGE)
    # whole huge pages only
    for start, end in ((raw, address), (address + nbytes, raw + nbytes + HUGE_PAGE)):
        if end > start:
            libc().munmap(start, end - start)
    libc().madvise(address, nbytes, _MADV_DONTFORK)
    # a kernel without huge pages refuses, and uses small pages
    libc().madvise(address, nbytes, _MADV_HUGEPAGE)
    return address


def give_back(address: int, nbytes: int, pinner: Pinner | None) -> None:
    if pinner is not None:
        pinner.unpin(address)
    libc().munmap(address, nbytes)
    _held.pop(address, None)


def _touch(address: int, nbytes: int) -> list[Future[None]]:
    """Populate in many threads: the kernel clears pages at only 2 GiB/s for each thread."""
    return [
        workers("touch").submit(_populate, start, min(_CHUNK, address + nbytes - start))
        for start in range(address, address + nbytes, _CHUNK)
    ]


def _populate(address: int, nbytes: int) -> None:
    """Populate page by page, because each call blocks other mappings of the process."""
    for page in range(address, address + nbytes, HUGE_PAGE):
        if libc().madvise(page, HUGE_PAGE, _MADV_POPULATE_WRITE) == 0:
            continue
        if (code := ctypes.get_errno()) != errno.EINVAL:
            raise MemoryError(f"no host memory: {os.strerror(code)}")
        ctypes.memset(page, 0, HUGE_PAGE)  # a kernel before 5.14


class PinnedPiece(NamedTuple):
    """A contiguous part of the arena."""

    address: int
    nbytes: int


@dataclass
class _Segment:
    """Memory that was pinned in one call."""

    address: int
    nbytes: int
    free: list[PinnedPiece] = field(default_factory=list)  # in order, never adjacent

    @property
    def free_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.free)


class PinnedArena:
    """Host memory that is pinned once and reused for saved content. Thread-safe.

    It holds at most ``budget_bytes``. If that is None, the arena and the tiers of the KV cache
    together hold at most 0.8 of the memory that machine and container have available, not counting
    5 % of their memory for Ray's memory monitor (`room_bytes`).
    """

    def __init__(self, pinner: Pinner | None, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._pinner = pinner
        self._segments: list[_Segment] = []
        # a queue, so that finalizers, which may run anywhere, need no lock
        self._returned: deque[PinnedPiece] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Reserved bytes by tag, for each owner.
        self._reserved: weakref.WeakKeyDictionary[object, dict[str, int]] = (
            weakref.WeakKeyDictionary()
        )
        # Bytes of each segment that is being obtained, and the reservation that needs it.
        self._coming: dict[Future[None], tuple[int, dict[str, int]]] = {}

    @property
    def committed_bytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments)

    @property
    def coming_bytes(self) -> int:
        """Return the bytes that ``reserve`` is obtaining."""
        return sum(size for size, _ in tuple(self._coming.values()))

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self.committed_bytes - sum(segment.free_bytes for segment in self._segments)

    def take(self, nbytes: int, whole: bool = False) -> list[PinnedPiece]:
        """Take pieces that have ``nbytes`` together, rounded up and aligned to UNIT.

        There are as few pieces as the free memory allows, and one piece if ``whole``.

        Raises:
            HostMemoryError: The arena may not grow that much. Nothing was taken.
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
                    left -= sum(piece.nbytes for piece in more)
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
        """Begin to obtain, in the background, memory that later calls of ``take`` will need.

        There will be room for ``sizes`` now, and for all reservations together. A ``take`` uses the
        memory that is there, and waits for memory on its way. A refusal is not raised here, but by
        the ``take`` that needs the memory. Reserving a tag of an owner again replaces its size.

        ``bind`` is called first in the background threads. ``saved`` are the bytes, by tag, of
        content that is in the arena now and needs no second room.
        """
        with self._lock:
            self._collect()
            reserved = self._reserved.setdefault(owner, {})
            reserved.update(sizes)
            free = sum(segment.free_bytes for segment in self._segments)
            wanted = sum(max(0, sizes[tag] - saved.get(tag, 0)) for tag in sizes)
            together = sum(sum(tags.values()) for tags in self._reserved.values())
            missing = max(wanted - free, together - self.committed_bytes)
            more = round_up(max(0, missing - self.coming_bytes), HUGE_PAGE)
            with contextlib.suppress(HostMemoryError):
                self._check_budget(self.coming_bytes + more)
                for at in range(0, more, SEGMENT):
                    size = min(SEGMENT, more - at)
                    segment = workers("reserve", _AT_ONCE).submit(
                        self._add_segment, size, bind, reserved
                    )
                    self._coming[segment] = size, reserved
                    segment.add_done_callback(self._segment_ended)

    def stop(self, owner: object | None = None) -> None:
        """Drop the reservation of an owner, or all of them.

        Segments that are being obtained are waited for, and stay.
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

    def _segment_ended(self, segment: Future[None]) -> None:
        with self._lock:
            del self._coming[segment]
            self._changed.notify_all()

    def give(self, pieces: Sequence[PinnedPiece]) -> None:
        """Return pieces to the arena, without a lock, because finalizers call this."""
        self._returned.extend(pieces)

    def trim(self) -> int:
        """Release memory without saved content to the system; return the bytes."""
        self.stop()
        with self._lock:
            self._collect()
            unused = [s for s in self._segments if s.free_bytes == s.nbytes]
            for segment in unused:
                give_back(segment.address, segment.nbytes, self._pinner)
                self._segments.remove(segment)
            return sum(segment.nbytes for segment in unused)

    def _take_free(self, most: int, whole: bool) -> PinnedPiece | None:
        """Take from the smallest free part that suffices, else the largest one unless ``whole``."""
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

    def _add_segment(self, size: int, bind: Callable[[], None], reserved: dict[str, int]) -> None:
        """Obtain a segment; a refusal cancels the other segments of the reservation."""
        try:
            self._check_budget(size)
            bind()
            (address,) = obtain([size], self._pinner)
        # RuntimeError: at exit, threads accept no more work
        except (MemoryError, BackendError, RuntimeError):
            with self._lock:
                segments = [*self._coming.items()]
            for segment, (_, reservation) in segments:
                if reservation is reserved:
                    segment.cancel()  # except for this one, which is running
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
        segments = [_Segment(address, n) for address, n in zip(addresses, sizes, strict=True)]
        spare, last = size - nbytes, segments[-1]
        if spare:
            last.free.append(PinnedPiece(last.address + last.nbytes - spare, spare))
        self._segments += segments
        return [PinnedPiece(s.address, s.nbytes - s.free_bytes) for s in segments]

    def _check_budget(self, more: int) -> None:
        if self.budget_bytes is not None:
            left = self.budget_bytes - self.committed_bytes
            reason = f"the budget is {format_bytes(self.budget_bytes)}"
        else:
            left = room_bytes()
            room = f"{format_bytes(max(0, left))} more may be taken"
            reason = f"{room} of the machine's and the container's memory"
        if more > left:
            raise self._refusal(more, more - left, reason)

    def _refusal(self, nbytes: int, missing: int, reason: str) -> HostMemoryError:
        message = (
            f"saved content needs {format_bytes(nbytes)} more host memory than the "
            f"{format_bytes(self.committed_bytes)} that it holds: {reason}. Resume a saved tag "
            "first, raise pinned_arena.budget_bytes, or pause with content='disk'; "
            "nothing was changed."
        )
        return HostMemoryError(message, nbytes, missing, {"saved content": self.committed_bytes})

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            segment = self._segment_of(piece)
            segment.free = [PinnedPiece(*part) for part in joined(sorted([*segment.free, piece]))]

    def _segment_of(self, piece: PinnedPiece) -> _Segment:
        return next(s for s in self._segments if 0 <= piece.address - s.address < s.nbytes)

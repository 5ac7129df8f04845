"""Host memory that is there before it is used: huge pages if any, touched by threads, pinned."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Protocol

from memsaver.common.layout import round_up
from memsaver.common.machine import MAP_FAILED, available_memory, libc, workers

HUGE_PAGE = 2 << 20
SHARE = 0.8  # of the memory that is available: others want some, too
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 10, 14, 23
_CHUNK = 16 << 20


_held: dict[int, int] = {}  # bytes by address; a child that is forked has none of them
os.register_at_fork(after_in_child=_held.clear)


class Pinner(Protocol):
    """Makes host memory reachable for a device's copy engines."""

    def pin(self, address: int, nbytes: int) -> None: ...
    def unpin(self, address: int) -> None: ...


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

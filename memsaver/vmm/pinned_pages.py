"""Host memory that is there before it is used: in huge pages where there are any, touched by many threads, pinned."""

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

from memsaver.common.libc import MAP_FAILED, libc
from memsaver.common.rounding import round_up
from memsaver.vmm.workers import workers

HUGE_PAGE = 2 << 20
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 10, 14, 23
_CHUNK = 16 << 20


class Pinner(Protocol):
    """Makes host memory reachable for a device's copy engines."""

    def pin(self, address: int, nbytes: int) -> None: ...
    def unpin(self, address: int) -> None: ...


def obtain(sizes: Sequence[int], pinner: Pinner | None) -> list[int]:
    """Addresses of so many bytes each (multiples of HUGE_PAGE), side by side, with memory behind every page; or none.

    While one is pinned the next are touched. A forked child does not have them. ``MemoryError``, ``BackendError``.
    """
    address = _map(sum(sizes))
    starts = [address + at for at in itertools.accumulate(sizes, initial=0)][:-1]
    with contextlib.ExitStack() as undo:
        undo.callback(libc().munmap, address, sum(sizes))
        touching = [_touch(start, nbytes) for start, nbytes in zip(starts, sizes, strict=True)]
        undo.callback(wait, [part for parts in touching for part in parts])
        for start, nbytes, parts in zip(starts, sizes, touching, strict=True):
            for part in parts:
                part.result()
            if pinner is not None:
                pinner.pin(start, nbytes)
                undo.callback(pinner.unpin, start)
        undo.pop_all()
    return starts


def _map(nbytes: int) -> int:
    """Addresses that begin with a huge page."""
    raw = libc().mmap(
        None, nbytes + HUGE_PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if raw == MAP_FAILED:
        raise MemoryError(f"mmap: {os.strerror(ctypes.get_errno())}")
    address = round_up(raw, HUGE_PAGE)
    for start, end in ((raw, address), (address + nbytes, raw + nbytes + HUGE_PAGE)):  # whole huge pages only
        if end > start:
            libc().munmap(start, end - start)
    libc().madvise(address, nbytes, _MADV_DONTFORK)
    libc().madvise(address, nbytes, _MADV_HUGEPAGE)  # refused where the kernel has none: then small pages
    return address


def give_back(address: int, nbytes: int, pinner: Pinner | None) -> None:
    if pinner is not None:
        pinner.unpin(address)
    libc().munmap(address, nbytes)


def _touch(address: int, nbytes: int) -> list[Future[None]]:
    """One thread gets 2 GiB/s from the kernel, which clears the pages; many get many times that."""
    starts = range(address, address + nbytes, _CHUNK)
    return [workers("touch").submit(_populate, start, min(_CHUNK, address + nbytes - start)) for start in starts]


def _populate(address: int, nbytes: int) -> None:
    if libc().madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    if (code := ctypes.get_errno()) != errno.EINVAL:
        raise MemoryError(f"no host memory: {os.strerror(code)}")
    ctypes.memset(address, 0, nbytes)  # a kernel before 5.14

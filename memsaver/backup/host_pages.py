"""Host memory that is there before it is used: in huge pages where there are any, touched by many threads, pinned."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache
from typing import Protocol

from memsaver.backup.workers import workers

HUGE_PAGE = 2 << 20
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 10, 14, 23
_MAP_FAILED = ctypes.c_void_p(-1).value
_CHUNK = 64 << 20


class Pinner(Protocol):
    """Makes host memory reachable for a device's copy engines."""

    def pin(self, address: int, nbytes: int) -> None: ...
    def unpin(self, address: int) -> None: ...


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def obtain(nbytes: int, pinner: Pinner | None) -> int:
    """Address of ``nbytes`` (a multiple of HUGE_PAGE) with memory behind every page; ``MemoryError``, ``BackendError``.

    A forked child does not have it.
    """
    raw = _libc().mmap(
        None, nbytes + HUGE_PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if raw == _MAP_FAILED:
        raise MemoryError(f"mmap: {os.strerror(ctypes.get_errno())}")
    address = -(-raw // HUGE_PAGE) * HUGE_PAGE
    for start, end in ((raw, address), (address + nbytes, raw + nbytes + HUGE_PAGE)):  # whole huge pages only
        if end > start:
            _libc().munmap(start, end - start)
    try:
        _libc().madvise(address, nbytes, _MADV_DONTFORK)
        _libc().madvise(address, nbytes, _MADV_HUGEPAGE)  # refused where the kernel has none: then small pages
        _touch(address, nbytes)
        if pinner is not None:
            pinner.pin(address, nbytes)
    except BaseException:
        _libc().munmap(address, nbytes)
        raise
    return address


def give_back(address: int, nbytes: int, pinner: Pinner | None) -> None:
    if pinner is not None:
        pinner.unpin(address)
    _libc().munmap(address, nbytes)


def _touch(address: int, nbytes: int) -> None:
    """One thread gets 2 GiB/s from the kernel, which clears the pages; many get many times that."""
    starts = range(address, address + nbytes, _CHUNK)
    list(workers("touch").map(lambda start: _populate(start, min(_CHUNK, address + nbytes - start)), starts))


def _populate(address: int, nbytes: int) -> None:
    if _libc().madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    if (code := ctypes.get_errno()) != errno.EINVAL:
        raise MemoryError(f"no host memory: {os.strerror(code)}")
    ctypes.memset(address, 0, nbytes)  # a kernel before 5.14

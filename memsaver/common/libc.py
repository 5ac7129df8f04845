"""Offers what Python does not of the C library: mapping at an address, exchanging two names."""

from __future__ import annotations

import ctypes
import os
from functools import cache

MAP_FAILED = ctypes.c_void_p(-1).value
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@cache
def libc() -> ctypes.CDLL:
    """Returns the C library with ``mmap``, ``munmap``, ``madvise`` and ``renameat2``;
    ``ctypes.get_errno()`` tells why one of them failed.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.renameat2.argtypes = [*(ctypes.c_int, ctypes.c_char_p) * 2, ctypes.c_uint]
    return library


def exchange_names(one: str, other: str) -> None:
    """Two files or folders of a file system swap names at once; OSError where none can (NFS)."""
    if libc().renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), one, None, other)

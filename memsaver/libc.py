"""What of the C library Python does not offer: mapping memory at an address of one's own."""

from __future__ import annotations

import ctypes
from functools import cache

MAP_FAILED = ctypes.c_void_p(-1).value


@cache
def libc() -> ctypes.CDLL:
    """With ``mmap``, ``munmap`` and ``madvise``; ``ctypes.get_errno()`` tells why one of them failed."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library

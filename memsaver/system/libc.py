"""Call the C library where Python has no function for it."""

from __future__ import annotations

import ctypes
from functools import cache

MAP_FAILED = ctypes.c_void_p(-1).value


@cache
def libc() -> ctypes.CDLL:
    """Return the C library; ``ctypes.get_errno()`` is the error of a call that failed."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.renameat2.argtypes = [*(ctypes.c_int, ctypes.c_char_p) * 2, ctypes.c_uint]
    return library

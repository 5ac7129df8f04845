"""Call the C library where Python has no function for it."""

import ctypes
import mmap
import os
from functools import cache

MAP_FAILED = ctypes.c_void_p(-1).value
NO_MEMORY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_NOREPLACE, _NORMAL = 0x100000, 0  # MAP_FIXED_NOREPLACE, MADV_NORMAL


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


def fill_in_children(ranges: dict[int, int]) -> None:
    """Make every access to the parent's ranges a segmentation fault in forked children.

    A child does not inherit the pages. If its own next mappings fell into the holes, old pointers
    would read them as the parent's data.

    Args:
        ranges: Bytes by address, at the time of the fork; a child empties it.
    """

    def fill() -> None:
        for address, nbytes in ranges.items():
            _fill_holes(address, nbytes)
        ranges.clear()

    os.register_at_fork(after_in_child=fill)


def _fill_holes(address: int, nbytes: int) -> None:
    if libc().mmap(address, nbytes, 0, NO_MEMORY | _NOREPLACE, -1, 0) != MAP_FAILED:
        return
    # The advice fails only where a page is unmapped.
    if libc().madvise(address, nbytes, _NORMAL) and nbytes > mmap.PAGESIZE:
        half = nbytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        _fill_holes(address, half)
        _fill_holes(address + half, nbytes - half)

"""torch's CPU allocations of a thread, sent to an arena while the thread is in a region."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache

from memsaver.native import build, shim


class _Functions(ctypes.Structure):
    _fields_ = [("alloc", ctypes.c_void_p), ("free_any", ctypes.c_void_p)]


@cache
def _hook() -> ctypes.CDLL:
    """Install the hook, once per process; raises ``CompilerError`` when it cannot be built."""
    lib = ctypes.CDLL(str(build.cpu_hook_library()))
    lib.ms_hook_install.argtypes, lib.ms_hook_install.restype = [_Functions], None
    table = shim.library()
    pointers = [
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (table.ms_alloc, table.ms_free_any)
    ]
    lib.ms_hook_install(_Functions(*pointers))
    return lib


@contextlib.contextmanager
def allocate_from(slot: int) -> Iterator[None]:
    """This thread's torch CPU allocations go to ``slot``; nested uses restore the outer one."""
    hook = _hook()
    previous = hook.ms_hook_enter(slot)
    try:
        yield
    finally:
        hook.ms_hook_enter(previous)

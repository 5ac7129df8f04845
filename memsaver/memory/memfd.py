"""Provide host memory as memfd extents, and send a thread's torch CPU allocations to an arena."""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch

from memsaver.errors import BackendError
from memsaver.memory.backend import Backend, Context, Transfer, pieces_of
from memsaver.native import build, shim
from memsaver.native.shim import Operation
from memsaver.system.host_memory import available_memory
from memsaver.system.libc import MAP_FAILED, NO_MEMORY, fill_in_children, libc
from memsaver.system.limits import limit_remedy
from memsaver.system.threads import workers

_THREADS = min(8, os.cpu_count() or 1)
_CHUNK = 8 << 20  # bytes: less is not worth another thread


class _Functions(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("alloc", "free_any", "make_room")]


_reserved: dict[int, int] = {}  # bytes by address
fill_in_children(_reserved)
_rooms: dict[int, weakref.WeakMethod[Callable[[int], bool]]] = {}  # by slot
_interrupts = threading.local()  # .noted: the exception of a signal handler in ``_make_room``


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
def _make_room(slot: int) -> bool:
    """Call the saver's method; note an interrupt for the region's end, as torch cannot raise it."""
    try:
        make_room = _rooms[slot]()
        return make_room is not None and make_room(slot)
    except BaseException as error:
        _interrupts.noted = error
        return False


@cache
def _hook() -> ctypes.CDLL:
    """Install the hook, once per process; raise ``CompilerError`` if it cannot be built."""
    lib = ctypes.CDLL(str(build.cpu_hook_library()))
    lib.ms_hook_install.argtypes, lib.ms_hook_install.restype = [_Functions], None
    lib.ms_hook_enter.restype, lib.ms_hook_leave.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    table = shim.library()
    pointers = [
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (table.ms_alloc, table.ms_free_any, _make_room)
    ]
    lib.ms_hook_install(_Functions(*pointers))
    return lib


@contextlib.contextmanager
def _allocate_from(slot: int) -> Iterator[None]:
    """Send this thread's torch CPU allocations to ``slot``; any thread may leave the context."""
    hook = _hook()
    region = hook.ms_hook_enter(slot)
    try:
        yield
    finally:
        hook.ms_hook_leave(region)
        if (interrupt := _interrupts.__dict__.pop("noted", None)) is not None:
            raise interrupt


class HostBackend(Backend):
    """Backend without a GPU: the same semantics on the kernel's shared-memory pages."""

    unit = 64  # c10's alignment of CPU tensors

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__(shim.HOST, mmap.PAGESIZE, limit_bytes)
        self.device = torch.device("cpu")
        self.device_key = "cpu"
        self.total_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE

    def reserve(self, nbytes: int) -> int:
        with self._call(Operation.RESERVE, nbytes):
            address = libc().mmap(None, nbytes, 0, NO_MEMORY, -1, 0)
            if address == MAP_FAILED:
                raise BackendError(
                    f"reserving {nbytes} bytes of addresses: {self.error_name(ctypes.get_errno())}"
                )
        _reserved[address] = nbytes
        return int(address)

    def unreserve(self, address: int, nbytes: int) -> None:
        if self.forked:
            return  # the child may have mapped something there
        _reserved.pop(address, None)
        with self._call(Operation.UNRESERVE, nbytes):
            if libc().munmap(address, nbytes):
                raise BackendError(
                    f"releasing addresses failed: {self.error_name(ctypes.get_errno())}"
                )

    def allocate_from(self, slot: int, make_room: Callable[[int], bool]) -> Context:
        _rooms[slot] = weakref.WeakMethod(make_room)
        return _allocate_from(slot)

    def copy(self, transfers: Sequence[Transfer]) -> None:
        """Copy (to, from, nbytes) transfers in several threads and wait for them."""
        chunks = list(pieces_of(transfers, _CHUNK))
        groups = [chunks[first::_THREADS] for first in range(min(_THREADS, len(chunks)))]
        if len(groups) == 1:
            codes = [shim.copy(self.phys, groups[0])]
        else:
            codes = list(workers("copy").map(partial(shim.copy, self.phys), groups))
        self._check("copy", max(codes, default=0))

    def names_limit(self, code: int) -> bool:
        return limit_remedy(code) is not None

    @property
    def device_free_bytes(self) -> int:
        return available_memory()

    def error_name(self, code: int) -> str:
        exhausted = "the machine or vm.max_map_count is exhausted" if code == errno.ENOMEM else None
        text = f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"
        return "; ".join(filter(None, (text, limit_remedy(code) or exhausted)))

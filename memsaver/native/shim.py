"""Call the functions that ``shim.h`` declares by ctypes, with the types of their prototypes."""

import ctypes
import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from memsaver.native import build
from memsaver.native.sources import HERE

HOST, CUDA = 0, 1
ACTIVE, PAUSED = 0, 1
E_LIMIT, E_DRIVER, E_RESERVATION, E_PAUSED, E_TABLE, E_FORKED = range(1, 7)
NO_LIMIT = 2**63
_RECENT = 1024


class Operation(enum.IntEnum):
    """A call of the CUDA driver or, on the host, of the kernel; numbered as in ``shim.h``."""

    CREATE = 0
    RELEASE = 1
    MAP = 2
    SET_ACCESS = 3
    UNMAP = 4
    RESIZE = 5
    COPY = 6
    EXPORT = 7
    IMPORT = 8
    RESERVE = 9
    UNRESERVE = 10
    SYNCHRONIZE = 11


_size = ctypes.c_size_t
_Item = TypeVar("_Item", bound=ctypes.Structure)


class Cause(ctypes.Structure):
    """Cause of a failed call.

    Attributes:
        code: One of ``E_*``; 0: no failure.
        driver: The error number of the driver or the kernel.
        requested: Bytes that the call asked for.
        missing: Bytes beyond the limit or the reservation; 0 if unknown.
    """

    _fields_ = [("code", ctypes.c_int), ("driver", ctypes.c_int)]
    _fields_ += [("requested", _size), ("missing", _size)]


class ExtentRecord(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_uint64) for name in ("handle", "id")), ("offset", _size)]
    _fields_ += [("nbytes", _size), ("shared", ctypes.c_int)]


class _Block(ctypes.Structure):
    _fields_ = [("offset", _size), ("nbytes", _size), ("requested", _size)]


class Stats(ctypes.Structure):
    """Snapshot of an arena; sizes in bytes, ``frees`` counted since the arena was created."""

    _names = ("base", "reserved", "committed", "top", "live", "extents", "blocks", "frees")
    _fields_ = [*((name, _size) for name in _names), ("state", ctypes.c_int)]


class Call(ctypes.Structure):
    """Record of a driver call: nanoseconds, bytes, ``Operation``, and the driver's error or 0."""

    _fields_ = [("ns", ctypes.c_uint64), ("nbytes", _size)]
    _fields_ += [("operation", ctypes.c_int), ("error", ctypes.c_int)]


class _Transfer(ctypes.Structure):
    _fields_ = [("to", ctypes.c_uint64), ("source", ctypes.c_uint64), ("nbytes", _size)]


class Driver(ctypes.Structure):
    """Entry points of the CUDA driver, for calls made under torch's allocator lock."""

    _calls = ("create", "release", "map", "unmap", "set_access", "export_fd", "import_fd", "copy")
    _context = ("push", "pop", "capture_mode", "capturing", "synchronize", "context")
    _fields_ = [(name, ctypes.c_void_p) for name in (*_calls, *_context, "prop", "access")]


@dataclass(frozen=True)
class Extent:
    """A piece of physical memory."""

    handle: int  # memfd or CUDA handle, valid in this process
    id: int  # the same in every process
    offset: int  # first byte in the arena; 0 in the page pool
    nbytes: int
    shared: bool = False  # whether another process has imported the extent


_PROTOTYPE = re.compile(r"^(\w+ \*?)(ms_\w+)\(([^)]*)\);", re.MULTILINE)
_TYPES: dict[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "long": ctypes.c_long,
    "size_t": _size,
    "uint64_t": ctypes.c_uint64,
}


def _type(declared: str) -> Any:
    return ctypes.c_void_p if "*" in declared else _TYPES[declared.split()[0]]


@cache
def library() -> ctypes.CDLL:
    """Load the shim, once per process."""
    lib = ctypes.CDLL(str(build.shim_library()))
    for result, name, arguments in _PROTOTYPE.findall((HERE / "shim.h").read_text()):
        function = getattr(lib, name)
        function.restype = _type(result)
        function.argtypes = [_type(argument) for argument in arguments.split(",")]
    return lib


@cache
def dlpack() -> Callable[..., Any]:
    """Return ``ms_dlpack(address, nbytes, device_type, device_id, keeper)``."""
    function = ctypes.PyDLL(path()).ms_dlpack  # called with the GIL held
    function.restype = ctypes.py_object
    function.argtypes = [_size, _size, ctypes.c_int, ctypes.c_int, ctypes.py_object]
    return function


def path() -> str:
    """Return the file of the loaded shim, for ``CUDAPluggableAllocator``."""
    return library()._name


def stats(slot: int) -> Stats:
    out = Stats()
    library().ms_get_stats(slot, ctypes.byref(out))
    return out


def cause(slot: int, clear: bool = False) -> Cause:
    """Return the cause of the last failed allocation in this slot (code 0: none)."""
    out = Cause()
    library().ms_get_cause(slot, ctypes.byref(out), int(clear))
    return out


def extents(slot: int) -> list[Extent]:
    return [to_extent(item) for item in read(library().ms_get_extents, slot, ExtentRecord)]


def set_extents(slot: int, items: Sequence[Extent]) -> None:
    if library().ms_set_extents(slot, to_array(items), len(items)):
        raise MemoryError("no host memory for the table of extents")


def extend(slot: int, items: Sequence[Extent]) -> None:
    """Append extents that are already mapped at the end of the arena."""
    if library().ms_extend(slot, to_array(items), len(items)):
        raise MemoryError("no host memory for the table of extents")


def discharge(phys: int, nbytes: int) -> None:
    library().ms_discharge(phys, nbytes)


def recent_calls(phys: int, since: int) -> tuple[int, list[Call]]:
    """Return how many calls there were, and the latest after number ``since``, 1,024 at most."""
    last, array = ctypes.c_uint64(since), (Call * _RECENT)()
    count = library().ms_get_recent(phys, ctypes.byref(last), array)
    return last.value, list(array[:count])


def copy(phys: int, transfers: Sequence[tuple[int, int, int]], stream: int = 0) -> int:
    """Copy (to, from, nbytes) transfers, on a GPU queued on ``stream``; return the error or 0."""
    array = (_Transfer * len(transfers))(*[_Transfer(*transfer) for transfer in transfers])
    return library().ms_copy(phys, array, len(transfers), stream)


def read(get: Callable[..., int], owner: int, kind: type[_Item]) -> list[_Item]:
    count = get(owner, None, 0)
    array = (kind * count)()
    return array[: min(count, get(owner, array, count))]


def to_extent(item: ExtentRecord) -> Extent:
    return Extent(item.handle, item.id, item.offset, item.nbytes, bool(item.shared))


def to_array(items: Sequence[Extent]) -> ctypes.Array[ExtentRecord]:
    return (ExtentRecord * len(items))(
        *[ExtentRecord(e.handle, e.id, e.offset, e.nbytes, int(e.shared)) for e in items]
    )


def blocks(slot: int) -> list[tuple[int, int]]:
    """Return (offset in the arena, bytes asked for) of each live block, in order of offset."""
    records = read(library().ms_get_blocks, slot, _Block)
    return [(block.offset, block.requested) for block in records]

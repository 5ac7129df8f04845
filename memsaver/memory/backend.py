"""Define the interface of backends and the parts that they share.

Extents and mappings go through the shim. Tensors over memory at an address are made by DLPack,
version 0 (dmlc/dlpack, include/dlpack/dlpack.h): torch accepts the given device, and calls back
when the storage dies.
"""

import contextlib
import ctypes
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Protocol

import torch

from memsaver.errors import BackendError, StateError
from memsaver.memory.pinned_arena import PinnedArena, Pinner
from memsaver.native import shim
from memsaver.ops.layout import round_up
from memsaver.system.interrupts import held

_CPU, _CUDA = 1, 2


def dlpack_tensor(address: int, nbytes: int, device: torch.device, keeper: object) -> torch.Tensor:
    """Return a uint8 tensor ``[nbytes]`` over an address, labeled as on ``device``.

    Its storage keeps ``keeper`` alive.
    """
    kind, index = (_CUDA, device.index) if device.type == "cuda" else (_CPU, 0)
    with held():  # an interrupt between the two calls would leak the keeper
        capsule = shim.dlpack()(address, nbytes, kind, index, keeper)
        return torch.utils.dlpack.from_dlpack(capsule)


class _Owner:
    """Object that lives as long as a tensor's storage."""


PIECE = 64 << 20
"""Bytes that an overlapped copy transfers at a time: 1.3 ms over a GPU's link."""

Transfer = tuple[int, int, int]
"""(to, from, nbytes)"""

Context = contextlib.AbstractContextManager[None]


def pieces_of(transfers: Iterable[Transfer], size: int) -> Iterator[Transfer]:
    """Cut transfers into pieces of at most `size` bytes."""
    for to, source, nbytes in transfers:
        for at in range(0, nbytes, size):
            yield to + at, source + at, min(size, nbytes - at)


class ShortOfMemory(Exception):
    """An extent cannot be created; the saver turns this into an attributed ``OutOfMemory``."""

    def __init__(self, cause: shim.Cause) -> None:
        super().__init__(f"code {cause.code}, driver {cause.driver}")
        self.cause = cause


class Waitable(Protocol):
    def synchronize(self) -> None: ...


@cache
def _pinned_arena(pinner: Pinner | None) -> PinnedArena:
    return PinnedArena(pinner)


os.register_at_fork(after_in_child=_pinned_arena.cache_clear)  # a child does not have its memory


class Backend(ABC):
    """Physical memory and addresses of one device.

    Extents, mappings and the byte limit are reached only through the shim. Some methods that
    differ by device are abstract. The others have the host's implementation here, which does not
    return before its work is done. Mapped sizes are multiples of ``granularity``.
    """

    device: torch.device
    device_key: str  # name of the device in every process: "cpu" or the UUID of a GPU
    unit: int  # bytes: allocations are rounded up to a multiple
    total_bytes: int  # memory of the device
    pinner: Pinner | None = None  # pins host memory for the device; None: no pinning

    def __init__(
        self,
        kind: int,
        granularity: int,
        limit_bytes: int | None,
        driver: shim.Driver | None = None,
    ) -> None:
        self.granularity = granularity
        self._overlapped: list[Future[None]] = []  # begun by ``copy_overlapped``
        self._driver = driver  # keeps the argument structures alive
        limit = shim.NO_LIMIT if limit_bytes is None else limit_bytes
        phys = shim.library().ms_phys_new(
            kind, granularity, limit, ctypes.byref(driver) if driver else None
        )
        if not phys:
            raise MemoryError("no host memory for the saver's tables")
        self.phys: int = phys

    @property
    def limit_bytes(self) -> int | None:
        limit: int = shim.library().ms_phys_limit(self.phys)
        return None if limit >= shim.NO_LIMIT else limit

    @limit_bytes.setter
    def limit_bytes(self, nbytes: int | None) -> None:
        shim.library().ms_phys_set_limit(self.phys, shim.NO_LIMIT if nbytes is None else nbytes)

    @property
    def committed_bytes(self) -> int:
        """Return the bytes of all extents that this backend owns and has not released."""
        return shim.library().ms_phys_committed(self.phys)

    @property
    def free_bytes(self) -> int:
        """Return the bytes that limit and device allow to commit; torch's cache counts as free."""
        limit, free = self.limit_bytes, self.device_free_bytes + self.cached_bytes
        return free if limit is None else min(free, limit - self.committed_bytes)

    @property
    @abstractmethod
    def device_free_bytes(self) -> int:
        """Return the free bytes of the device."""

    @property
    def cached_bytes(self) -> int:
        """Return the bytes that torch releases to the device when its cache is emptied."""
        return 0

    @property
    def put_off_bytes(self) -> int:
        """Return the bytes of dead tensors that torch does not reuse yet."""
        return 0

    def free_put_off(self) -> None:
        """Free dead tensors that torch does not reuse yet, where their work is done."""

    def round_up(self, nbytes: int) -> int:
        """Round up to whole pages."""
        return round_up(nbytes, self.granularity)

    def create(self, nbytes: int) -> shim.Extent:
        """Create an extent; retained extents are released if necessary.

        Raises:
            ShortOfMemory: The limit or the driver refuses it.
        """
        record, cause = shim.ExtentRecord(), shim.Cause()
        if shim.library().ms_create(self.phys, nbytes, ctypes.byref(record), ctypes.byref(cause)):
            raise ShortOfMemory(cause)
        return shim.to_extent(record)

    def release(self, handle: int, nbytes: int) -> None:
        """Release an extent; ``nbytes`` is 0 for an imported one."""
        self._check("release", shim.library().ms_release(self.phys, handle, nbytes))

    def export_fd(self, handle: int) -> int:
        """Return a descriptor, owned by the caller, that keeps an extent's memory alive."""
        fd = ctypes.c_int()
        self._check("export", shim.library().ms_export(self.phys, handle, ctypes.byref(fd)))
        return fd.value

    def import_fd(self, fd: int) -> int:
        """Import the memory of a descriptor and return its handle.

        ``fd`` is closed when the handle is released, or on an error.
        """
        handle = ctypes.c_uint64()
        self._check("import", shim.library().ms_import(self.phys, fd, ctypes.byref(handle)))
        return handle.value

    def map(self, address: int, nbytes: int, handle: int, writable: bool = True) -> None:
        self._check(
            "map", shim.library().ms_map(self.phys, address, nbytes, handle, 0, int(writable))
        )

    def set_access(self, address: int, nbytes: int) -> None:
        self._check("set access", shim.library().ms_set_access(self.phys, address, nbytes))

    @property
    def forked(self) -> bool:
        """Return whether this is a forked child, which does not have its parent's memory."""
        return bool(shim.library().ms_forked(self.phys))

    def require_own_process(self) -> None:
        """Raise ``StateError`` in a forked child."""
        if self.forked:
            raise StateError(
                "this is a forked child, where the saver is inert; make a MemorySaver in the child"
            )

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap a range; do nothing in a forked child, which may have other memory there."""
        self._check("unmap", shim.library().ms_unmap(self.phys, address, nbytes))

    @abstractmethod
    def error_name(self, code: int) -> str: ...
    def names_limit(self, code: int) -> bool:
        """Return whether `error_name` names a limit of the process, which is then the remedy."""
        return False

    @abstractmethod
    def reserve(self, nbytes: int) -> int: ...
    @abstractmethod
    def unreserve(self, address: int, nbytes: int) -> None: ...
    def close(self) -> None:
        """Release resources other than memory; the saver makes no more copies."""

    def bind_thread(self) -> None:
        """Prepare a worker thread for calls of this backend."""

    def allow_captures(self) -> Context:
        """Return a context in which this thread's calls do not break another thread's capture."""
        return contextlib.nullcontext()

    def synchronize(self, copies: bool = True) -> None:
        """Wait for the device's work and, if ``copies``, for overlapped copies.

        A finalizer must not wait for copies, because it may run in the thread that copies (see
        `after_copies`).
        """
        with self._call(shim.Operation.SYNCHRONIZE):
            pass  # the host's work has ended when its calls return

    def after_copies(self, call: Callable[[], None]) -> bool:
        """Schedule ``call`` after the running overlapped copies; return False if there are none."""
        running = [copy for copy in self._overlapped if not copy.done()]
        for copy in running[-1:]:
            copy.add_done_callback(lambda _: call())
        return bool(running)

    @property
    def capturing(self) -> bool:
        """Return whether this thread captures a graph, so that it must not wait for the device."""
        return False

    def view(self, address: int, nbytes: int) -> tuple[torch.Tensor, object]:
        """Return a uint8 tensor ``[nbytes]`` over an address, and an object its storage owns."""
        owner = _Owner()
        return self.window(address, nbytes, owner), owner

    def window(self, address: int, nbytes: int, keeper: object) -> torch.Tensor:
        """Return a uint8 tensor ``[nbytes]`` over an address that is mapped while ``keeper`` lives.

        Its storage keeps ``keeper`` alive. The tensor is labeled as on this device, even if the
        memory is another GPU's: with the CUDA array interface, torch would ask the driver for the
        device, and copy.
        """
        return dlpack_tensor(address, nbytes, self.device, keeper)

    @abstractmethod
    def allocate_from(self, slot: int, make_room: Callable[[int], bool]) -> Context:
        """Send this thread's torch allocations to the arena of ``slot``.

        A backend that supports it calls ``make_room``, a saver's method, with the slot after an
        allocation failed. The method returns whether to retry.
        """

    def free_dead_blocks(self, slot: int) -> None:
        """Free the blocks that torch keeps of ended regions, whose tensors have died."""

    @property
    def pinned_arena(self) -> PinnedArena:
        """Return the process's arena of saved content for this kind of device."""
        return _pinned_arena(self.pinner)

    @abstractmethod
    def copy(self, transfers: Sequence[Transfer]) -> None:
        """Copy (to, from, nbytes) transfers and wait for them."""

    def start_copy(self, transfers: Sequence[Transfer], inward: bool = False) -> Waitable | None:
        """Begin to copy transfers after the work that is queued on the current stream.

        ``inward`` tells whether they go to the device. Return an object to wait for, or None if the
        copy is done.
        """
        self.copy(transfers)
        return None

    def copy_overlapped(
        self, transfers: Sequence[Transfer], keeper: object, done: Callable[[float], None]
    ) -> Waitable | None:
        """Begin to copy, in pieces, after the work that is queued on the current stream.

        Other copies can run between the pieces. `synchronize` waits for the copy, too. ``keeper``
        is kept alive until the copy is done. Then ``done`` is called, in any thread, with the
        seconds that the copy took, unless it failed. Return an object to wait for, or None if the
        copy is done.
        """
        started = time.perf_counter()
        self.copy(transfers)
        done(time.perf_counter() - started)
        return None

    def feed(
        self,
        pieces: Iterable[Sequence[Transfer]],
        queued: Callable[[Waitable | None], None],
        inward: bool,
    ) -> None:
        """Copy piece after piece, with other copies between them, and wait for all pieces.

        ``queued`` is called for every piece with an object to wait for, or None if the piece is
        done. ``inward`` tells whether the pieces go to the device.
        """
        for piece in pieces:
            self.copy(piece)
            queued(None)

    def reclaim(self) -> None:
        """Release torch's cached blocks to the device."""

    def other_holders(self) -> dict[str, int]:
        """Return the other holders of the device's memory: bytes by name."""
        return {}

    @contextlib.contextmanager
    def _call(self, operation: shim.Operation, nbytes: int = 0) -> Iterator[None]:
        """Count and time a driver call made outside of the shim, or fail it if injected."""
        started, error = time.perf_counter_ns(), shim.library().ms_fault(self.phys)
        try:
            self._check(operation.name.lower(), error)
            yield
        except BaseException:
            error = error or -1
            raise
        finally:
            elapsed = time.perf_counter_ns() - started
            shim.library().ms_record(self.phys, operation, nbytes, elapsed, error)

    def _check(self, what: str, code: int) -> None:
        if code:
            raise BackendError(f"{what} on {self.device} failed: {self.error_name(code)}")


class Reservation:
    """An address range without memory, reserved until ``close``."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self._backend = backend
        self.nbytes = nbytes
        self.address = backend.reserve(nbytes)

    def close(self) -> None:
        self._backend.unreserve(self.address, self.nbytes)

"""Defines what backends offer, and the parts both share: extents and mappings through the shim, and
tensors over memory at an address by DLPack, version 0 (dmlc/dlpack, include/dlpack/dlpack.h): torch
takes the device as it is told, and tells when they are dead.
"""

from __future__ import annotations

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
    """Return a uint8 tensor ``[nbytes]`` at an address, said to be on ``device``; it keeps
    ``keeper``.
    """
    kind, index = (_CUDA, device.index) if device.type == "cuda" else (_CPU, 0)
    with held():  # from here on the keeper is the tensor's, which lets go of it
        capsule = shim.dlpack()(address, nbytes, kind, index, keeper)
        return torch.utils.dlpack.from_dlpack(capsule)


class _Owner:
    """Lives as long as a tensor's storage."""


PIECE = 64 << 20
"""Bytes that are copied at a time beside other work: 1.3 ms over a GPU's link."""

Transfer = tuple[int, int, int]
"""(to, from, nbytes)"""


class ShortOfMemory(Exception):
    """An extent could not be made; the saver turns this into an attributed ``OutOfMemory``."""

    def __init__(self, cause: shim.Cause) -> None:
        super().__init__(f"code {cause.code}, driver {cause.driver}")
        self.cause = cause


class Waitable(Protocol):
    def synchronize(self) -> None: ...


@cache
def _pinned_arena(pinner: Pinner | None) -> PinnedArena:
    return PinnedArena(pinner)


os.register_at_fork(after_in_child=_pinned_arena.cache_clear)  # its memory does not come along


class Backend(ABC):
    """Physical memory and addresses of one device: what differs is abstract, or done at once as the
    host does it; the rest goes through the shim, which is the only way to extents, mappings and the
    byte limit. Sizes are bytes; what is mapped, multiples of ``granularity``.
    """

    device: torch.device
    device_key: str
    unit: int
    total_bytes: int
    pinner: Pinner | None = None

    def __init__(
        self,
        kind: int,
        granularity: int,
        limit_bytes: int | None,
        driver: shim.Driver | None = None,
    ) -> None:
        self.granularity = granularity
        self._overlapped: list[Future[None]] = []  # what ``copy_overlapped`` has begun
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
        """Bytes of all extents this backend made and has not released."""
        committed: int = shim.library().ms_phys_committed(self.phys)
        return committed

    @property
    def free_bytes(self) -> int:
        """Bytes that can be made now, as limit and device tell; torch's cache counts as free."""
        limit, free = self.limit_bytes, self.device_free_bytes + self.cached_bytes
        return free if limit is None else min(free, limit - self.committed_bytes)

    @property
    @abstractmethod
    def device_free_bytes(self) -> int:
        """Bytes of the device that nobody holds."""

    @property
    def cached_bytes(self) -> int:
        """Bytes that torch gives back to the device when its cache is emptied."""
        return 0

    @property
    def put_off_bytes(self) -> int:
        """Bytes of tensors that have died, and that torch does not use again yet."""
        return 0

    def free_put_off(self) -> None:
        """Have torch use such tensors' memory again as far as their work is done."""

    def round_up(self, nbytes: int) -> int:
        """Rounds up to whole pages."""
        return round_up(nbytes, self.granularity)

    def create(self, nbytes: int) -> shim.Extent:
        """A new extent; the page pool makes room where it must. Raises ``ShortOfMemory``."""
        made, cause = shim.ExtentRecord(), shim.Cause()
        if shim.library().ms_create(self.phys, nbytes, ctypes.byref(made), ctypes.byref(cause)):
            raise ShortOfMemory(cause)
        return shim.to_extent(made)

    def release(self, handle: int, nbytes: int) -> None:
        """Give an extent back; ``nbytes`` is 0 for an imported one."""
        self._check("release", shim.library().ms_release(self.phys, handle, nbytes))

    def export_fd(self, handle: int) -> int:
        """A descriptor of an extent's memory, the caller's; it keeps the memory alive."""
        fd = ctypes.c_int()
        self._check("export", shim.library().ms_export(self.phys, handle, ctypes.byref(fd)))
        return fd.value

    def import_fd(self, fd: int) -> int:
        """A handle of the memory that ``fd`` stands for; takes ``fd``, also when it raises."""
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
        """Is this a forked child of the process that made it? Its memory did not come along."""
        return bool(shim.library().ms_forked(self.phys))

    def require_own_process(self) -> None:
        """Raise ``StateError`` in a forked child."""
        if self.forked:
            raise StateError(
                "this is a forked child, where the saver is inert; make a MemorySaver of its own"
            )

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps; does nothing in a forked child, which may have something of its own there."""
        self._check("unmap", shim.library().ms_unmap(self.phys, address, nbytes))

    @abstractmethod
    def error_name(self, code: int) -> str: ...
    @abstractmethod
    def reserve(self, nbytes: int) -> int: ...
    @abstractmethod
    def unreserve(self, address: int, nbytes: int) -> None: ...
    def close(self) -> None:
        """Give back what the backend holds beside memory; its saver makes no more copies."""

    def bind_thread(self) -> None:
        """Make a thread of our own ready for calls of this backend."""

    def allow_captures(self) -> contextlib.AbstractContextManager[None]:
        """Allow this thread's calls inside while another thread captures a graph."""
        return contextlib.nullcontext()

    def synchronize(self, copies: bool = True) -> None:
        """Wait for the device's work, and for what ``copy_overlapped`` has begun. copies: a
        finalizer does not wait for that: it may run in the thread that copies (`after_copies`).
        """
        with self._call(shim.Operation.SYNCHRONIZE):
            pass  # the host's has ended when its calls return

    def after_copies(self, call: Callable[[], None]) -> bool:
        """Have ``call`` called, by the last of the threads that copy now; False: none does."""
        running = [copy for copy in self._overlapped if not copy.done()]
        for copy in running[-1:]:
            copy.add_done_callback(lambda _: call())
        return bool(running)

    @property
    def capturing(self) -> bool:
        """Return whether this thread captures a graph, in which it must not wait for the device."""
        return False

    def view(self, address: int, nbytes: int) -> tuple[torch.Tensor, object]:
        """Return a uint8 tensor ``[nbytes]`` over an address, and an object that lives with its
        storage.
        """
        owner = _Owner()
        return self.window(address, nbytes, owner), owner

    def window(self, address: int, nbytes: int, keeper: object) -> torch.Tensor:
        """Return a uint8 tensor ``[nbytes]`` over an address that is mapped while ``keeper`` lives,
        which its storage keeps.

        The tensor says that it is on this device, whichever GPU the memory is of: by the CUDA array
        interface torch would ask the driver for that, and copy.
        """
        return dlpack_tensor(address, nbytes, self.device, keeper)

    @abstractmethod
    def allocate_from(
        self, slot: int, make_room: Callable[[int], bool]
    ) -> contextlib.AbstractContextManager[None]:
        """Send this thread's torch allocations to an arena. make_room: a saver's method,
        called with the slot, where that can be, for one that failed; True: it is tried again.
        """

    def free_dead_blocks(self, slot: int) -> None:
        """Free what torch keeps of ended regions, whose tensors have died since."""

    @property
    def pinned_arena(self) -> PinnedArena:
        """Return where content is saved; one of the process for each pinner."""
        return _pinned_arena(self.pinner)

    @abstractmethod
    def copy(self, transfers: Sequence[Transfer]) -> None:
        """Copy (to, from, nbytes) each; done when it returns."""

    def start_copy(self, transfers: Sequence[Transfer], inward: bool = False) -> Waitable | None:
        """Begin to copy after what is queued on the current stream.

        Args:
            transfers: (to, from, nbytes) each.
            inward: Towards the device.

        Returns:
            What to wait for; None: it is done.
        """
        self.copy(transfers)
        return None

    def copy_overlapped(
        self, transfers: Sequence[Transfer], keeper: object, done: Callable[[float], None]
    ) -> Waitable | None:
        """Begin to copy after what is queued on the current stream, so that others' copies go
        between; `synchronize` waits for it, too.

        Args:
            transfers: (to, from, nbytes) each.
            keeper: Lives until then.
            done: Is told the seconds that the copy took, in any thread, unless it failed.

        Returns:
            What to wait for; None: it is done.
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
        """Copy one piece after the other, so that others' copies go between; all is done when it
        returns.

        Args:
            pieces: (to, from, nbytes) each of several pieces.
            queued: Is told for every piece what to wait for; None: it is done.
            inward: Towards the device.
        """
        for piece in pieces:
            self.copy(piece)
            queued(None)

    def reclaim(self) -> None:
        """Give torch's cached blocks back to the device."""

    def other_holders(self) -> dict[str, int]:
        """Return who else holds memory of the device, in bytes by name."""
        return {}

    def inject_fault(self, after: int, error: int) -> int:
        """For tests: driver call number ``after`` from now (0: none) fails once, with the driver's
        ``error`` number.

        Returns how many calls were made since the last injection. The shim's own calls count like
        Python's.
        """
        calls: int = shim.library().ms_inject(self.phys, after, error)
        return calls

    @contextlib.contextmanager
    def _call(self, operation: shim.Operation, nbytes: int = 0) -> Iterator[None]:
        """Counts and times every driver call outside of the shim, which fails where injected."""
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
    """An address range without memory; ``close`` is its exact undo."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self._backend = backend
        self.nbytes = nbytes
        self.address = backend.reserve(nbytes)

    def close(self) -> None:
        self._backend.unreserve(self.address, self.nbytes)

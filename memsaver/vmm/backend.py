"""What a backend must offer, and the part that both share: extents and mappings through the shim."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from memsaver.common.rounding import round_up
from memsaver.errors import BackendError
from memsaver.native import shim

if TYPE_CHECKING:
    import torch

    from memsaver.backup.on_host import Waitable
    from memsaver.vmm.pinned_arena import HostArena
    from memsaver.vmm.pinned_pages import Pinner


class ShortOfMemory(Exception):
    """An extent could not be made; the saver turns this into an attributed ``OutOfMemory``."""

    def __init__(self, cause: shim.Cause) -> None:
        super().__init__(f"code {cause.code}, driver {cause.driver}")
        self.cause = cause


class Backend(Protocol):
    """Physical memory and addresses of one device. Sizes are bytes and multiples of ``granularity`` where mapped."""

    device: torch.device
    device_key: str
    granularity: int
    unit: int
    total_bytes: int
    phys: int

    limit_bytes: int | None

    @property
    def committed_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def device_free_bytes(self) -> int: ...
    def round_up(self, nbytes: int) -> int: ...
    def reserve(self, nbytes: int) -> int: ...
    def unreserve(self, address: int, nbytes: int) -> None: ...
    def create(self, nbytes: int) -> shim.Extent: ...
    def release(self, handle: int, nbytes: int) -> None: ...
    def map(self, address: int, nbytes: int, handle: int, writable: bool = True) -> None: ...
    def set_access(self, address: int, nbytes: int) -> None: ...
    def unmap(self, address: int, nbytes: int) -> None: ...
    def export_fd(self, handle: int) -> int: ...
    def import_fd(self, fd: int) -> int: ...
    def bind_thread(self) -> None: ...
    def synchronize(self) -> None: ...
    @property
    def forked(self) -> bool: ...
    @property
    def capturing(self) -> bool: ...
    def view(self, address: int, nbytes: int) -> tuple[torch.Tensor, object]: ...
    def window(self, address: int, nbytes: int, keeper: object) -> torch.Tensor: ...
    @property
    def host_arena(self) -> HostArena: ...
    def copy(self, transfers: Sequence[tuple[int, int, int]]) -> None: ...
    def start_copy(self, transfers: Sequence[tuple[int, int, int]], inward: bool = False) -> Waitable | None: ...
    def reclaim(self) -> None: ...
    def other_holders(self) -> dict[str, int]: ...
    def error_name(self, code: int) -> str: ...


class ShimBackend:
    """Extents and mappings, and the byte limit, through the shim: the only way to physical memory."""

    device: torch.device

    def __init__(self, kind: int, granularity: int, limit_bytes: int | None, driver: shim.Driver | None = None) -> None:
        self.granularity = granularity
        self._driver = driver  # keeps the argument structures alive
        limit = shim.NO_LIMIT if limit_bytes is None else limit_bytes
        phys = shim.library().ms_phys_new(kind, granularity, limit, ctypes.byref(driver) if driver else None)
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
        """What could be made now, as far as limit and device say; torch's cache counts as free."""
        limit, free = self.limit_bytes, self.device_free_bytes + self.cached_bytes
        return free if limit is None else min(free, limit - self.committed_bytes)

    @property
    def device_free_bytes(self) -> int:
        """What nobody holds of the device."""
        raise NotImplementedError

    @property
    def cached_bytes(self) -> int:
        """What torch holds of the device and no tensor uses."""
        return 0

    def round_up(self, nbytes: int) -> int:
        """To whole pages."""
        return round_up(nbytes, self.granularity)

    def create(self, nbytes: int) -> shim.Extent:
        """A new extent, for which the page pool makes room where it must; raises ``ShortOfMemory``."""
        made = shim.create(self.phys, nbytes)
        if isinstance(made, shim.Cause):
            raise ShortOfMemory(made)
        return made

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
        self._check("map", shim.library().ms_map(self.phys, address, nbytes, handle, 0, int(writable)))

    def set_access(self, address: int, nbytes: int) -> None:
        self._check("set access", shim.library().ms_set_access(self.phys, address, nbytes))

    @property
    def forked(self) -> bool:
        """Is this a forked child of the process that made it? Its memory did not come along."""
        return bool(shim.library().ms_forked(self.phys))

    def unmap(self, address: int, nbytes: int) -> None:
        """Nothing in a forked child, which may have something of its own there."""
        self._check("unmap", shim.library().ms_unmap(self.phys, address, nbytes))

    def error_name(self, code: int) -> str:
        raise NotImplementedError

    def inject_fault(self, after: int, error: int) -> int:
        """For tests: driver call number ``after`` from now (0: none) fails once, with the driver's ``error`` number.

        Returns how many calls were made since the last injection. The shim's own calls count like Python's.
        """
        calls: int = shim.library().ms_inject(self.phys, after, error)
        return calls

    @contextlib.contextmanager
    def _call(self, operation: shim.Operation, nbytes: int = 0) -> Iterator[None]:
        """Around every driver call that does not go through the shim: counted, timed, and failing where injected."""
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


def make_backend(device: torch.device, limit_bytes: int | None = None) -> Backend:
    """The backend of a device; raises ``ValueError`` for a device type that has none."""
    if device.type == "cpu":
        from memsaver.vmm.memfd import HostBackend

        return HostBackend(limit_bytes)
    if device.type == "cuda":
        from memsaver.vmm.cuda import CudaBackend

        return CudaBackend(device, limit_bytes)
    raise ValueError(f"device {str(device)!r} is not supported: use 'cpu' or 'cuda:N'")


def make_pinner(device: torch.device) -> Pinner | None:
    """What makes host memory reachable for a device, whose context must be current; None: all of it is."""
    if device.type != "cuda":
        return None
    from memsaver.vmm.cuda import CudaPinner

    return CudaPinner()

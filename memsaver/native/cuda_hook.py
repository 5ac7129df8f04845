"""Send a thread's torch CUDA allocations to an arena, through a ``MemPool`` of its segments."""

import contextlib
import threading
from collections.abc import Iterator
from functools import cache

import torch

from memsaver.errors import StateError
from memsaver.native import shim
from memsaver.system.threads import forkable

# Guards the state below; re-entrant, as garbage collection may end a region in a locked section.
_lock = forkable(threading.RLock())
Handle = tuple[int, int]
_open = threading.local()  # the ``_Regions`` of this thread, by device


@cache
def _allocator(slot: int) -> torch.cuda.memory.CUDAPluggableAllocator:
    """Return the allocator of a slot; torch may free segments through it, so it is never freed."""
    names = f"ms_cuda_alloc_{slot:02x}", f"ms_cuda_free_{slot:02x}"
    return torch.cuda.memory.CUDAPluggableAllocator(shim.path(), *names)


def new_pool(slot: int, device: torch.device) -> torch.cuda.MemPool:
    """Return a new pool of segments of ``slot``; dropping it releases its freed blocks."""
    with _lock:  # functools.cache alone may call it twice
        allocator = _allocator(slot)
    with torch.cuda.device(device):  # torch creates the pool for the current device
        return torch.cuda.MemPool(allocator.allocator())


@contextlib.contextmanager
def allocate_from(slot: int, device: torch.device) -> Iterator[None]:
    """Send this thread's torch CUDA allocations to ``slot`` through a new pool.

    Any thread may leave the context.
    """
    if not _in_use and _most_is_cached(device):
        empty_cache(device)  # torch before 2.13 keeps its cache while a pool is in use
    # create cuBLAS's workspace, which torch keeps forever, outside of the tag
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()
    with _in_new_pool(slot, device):
        yield


def free_dead_blocks(slot: int, device: torch.device) -> None:
    """Free the blocks that torch keeps of ended regions, of any tag, whose tensors have died."""
    with _in_new_pool(slot, device):
        pass


def empty_cache(device: torch.device) -> None:
    """Release torch's cached memory on all devices.

    torch unmaps expandable segments of a device other than the current one while queued work still
    uses them (pytorch#196258), so wait for that work first.
    """
    cached = {index for index in range(torch.cuda.device_count()) if _reserved(index)}
    if cached - {device.index}:
        for segment in torch.cuda.memory_snapshot(include_traces=False):
            if segment["is_expandable"] and segment["device"] in cached:
                cached.remove(segment["device"])
                torch.cuda.synchronize(segment["device"])
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def _most_is_cached(device: torch.device) -> bool:
    """Return whether torch caches more of the device's memory than the driver has free."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return cached > torch.cuda.mem_get_info(device)[0]


def _reserved(index: int) -> int:
    stats = torch.cuda.memory_stats_as_nested_dict(index)
    return int(stats["reserved_bytes"]["all"]["current"])


def free_put_off(device: torch.device) -> None:
    """Free dead blocks of this thread's open region whose use on a second stream has ended.

    torch before 2.13 checks such blocks only while no pool is in use.
    """
    if any(regions.served for regions in _own_regions()):
        with outside_regions(), contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(1, device=device)  # any allocation makes torch check


def others_open() -> bool:
    """Return whether other threads have open regions, during which torch may keep its cache."""
    return _in_use > sum(regions.served for regions in _own_regions())


@contextlib.contextmanager
def outside_regions() -> Iterator[None]:
    """Leave the pools that this thread is in, and enter them again at the end."""
    resting = [regions for regions in _own_regions() if regions.rest()]
    try:
        yield
    finally:
        for regions in resting:
            regions.serve()


def _own_regions() -> "list[_Regions]":
    return list(_open.__dict__.values())


@contextlib.contextmanager
def _in_new_pool(slot: int, device: torch.device) -> Iterator[None]:
    """Enter a new pool and free the dead blocks of ended regions, whose memory it can then use."""
    regions = _open.__dict__.setdefault(str(device), _Regions(device.index))
    with contextlib.ExitStack() as undo:
        pool = _new_open_pool(slot, device)
        undo.callback(regions.serve)
        undo.callback(_retire, pool)
        undo.callback(regions.leave, pool)
        regions.enter(pool)
        empty_cache(device)  # before 2.13, only that of dropped pools
        yield


class _Regions:
    """Stack of the pools that one thread is in on one device, outermost first.

    Of nested pools torch would allocate from the outermost, so only the innermost one is *served*,
    that is, entered in torch.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._thread = threading.current_thread()
        self._pools: list[Handle] = []
        self._served: Handle | None = None

    @property
    def served(self) -> bool:
        return self._served is not None

    def enter(self, pool: Handle) -> None:
        self._pools.append(pool)
        self.rest()
        self.serve()

    def leave(self, pool: Handle) -> None:
        """Leave a pool, from any thread and in any order; call `serve` next."""
        self._pools.remove(pool)
        if self._served == pool:
            self.rest()

    def rest(self) -> bool:
        """Stop serving; return whether a pool was served."""
        global _in_use
        with _lock:
            pool, self._served = self._served, None
            if pool is not None:
                _in_use -= 1
                torch._C._cuda_endAllocateToPool(self._device, pool)
                torch._C._cuda_releasePool(self._device, pool)
        return pool is not None

    def serve(self) -> None:
        """Serve the innermost pool if none is served; raise ``StateError`` in another thread."""
        global _in_use
        if self._served is not None or not self._pools:
            return
        if threading.current_thread() is not self._thread:  # torch enters the current thread only
            raise StateError(
                f"thread {threading.current_thread().name!r} left a region inside another one "
                f"of thread {self._thread.name!r}, whose allocations are on no tag until it "
                "enters or leaves a region; leave regions where they were entered"
            )
        with _lock:
            torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, self._pools[-1])
            self._served = self._pools[-1]
            _in_use += 1


# torch aborts when a pool is dropped while any pool is in use on the device. So pools of ended
# regions wait here until no thread is in a pool. Nothing else, such as a traceback's frames, may
# hold the last reference.
pools: list[torch.cuda.MemPool] = []
_open_pools: dict[Handle, torch.cuda.MemPool] = {}
_in_use = 0  # number of served pools


def _new_open_pool(slot: int, device: torch.device) -> Handle:
    pool = new_pool(slot, device)
    _open_pools[pool.id] = pool
    return pool.id


def retire(pool: torch.cuda.MemPool) -> None:
    """Drop a pool once no thread is in a pool, without a lock, because finalizers call this."""
    pools.append(pool)


def _retire(pool: Handle) -> None:
    retire(_open_pools.pop(pool))
    with _lock:
        if not _in_use:
            pools.clear()

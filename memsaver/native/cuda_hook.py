"""torch's CUDA allocations of a thread, sent to an arena: a ``MemPool`` of the shim's segments."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache

import torch

from memsaver.errors import StateError
from memsaver.native import shim
from memsaver.system.threads import forkable

# of everything below; a collector may end a region in the middle of it
_lock = forkable(threading.RLock())
Handle = tuple[int, int]
_open = threading.local()  # by device: the ``_Regions`` of this thread


@cache
def _allocator(slot: int) -> torch.cuda.memory.CUDAPluggableAllocator:
    """The symbol pair of a slot; kept for life: torch frees segments through it at any time."""
    names = f"ms_cuda_alloc_{slot:02x}", f"ms_cuda_free_{slot:02x}"
    return torch.cuda.memory.CUDAPluggableAllocator(shim.path(), *names)


def new_pool(slot: int, device: torch.device) -> torch.cuda.MemPool:
    """A pool of segments of ``slot``; freed blocks go back when the pool is dropped."""
    with _lock:  # functools.cache alone may call twice
        allocator = _allocator(slot)
    with torch.cuda.device(device):  # torch makes the pool for the current one
        return torch.cuda.MemPool(allocator.allocator())


@contextlib.contextmanager
def allocate_from(slot: int, device: torch.device) -> Iterator[None]:
    """This thread's torch CUDA allocations go to ``slot`` through a pool of their own, until any
    thread leaves.
    """
    if not _in_use and _most_is_cached(device):
        empty_cache(device)  # once a pool is in use, torch before 2.13 keeps its cache
    # makes cuBLAS's workspace, which torch keeps for ever, outside of the tag
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()
    with _in_new_pool(slot, device):
        yield


def free_dead_blocks(slot: int, device: torch.device) -> None:
    """Free the blocks of ended regions, of any tag, whose tensors have died; torch keeps them."""
    with _in_new_pool(slot, device):
        pass


def empty_cache(device: torch.device) -> None:
    """Have torch give back what it caches, of all devices.

    Expandable segments of another device than the current one are unmapped while work that uses
    them is queued (pytorch#196258): that work is waited for here.
    """
    others = {index for index in range(torch.cuda.device_count()) if _reserved(index)}
    if others - {device.index}:
        for segment in torch.cuda.memory_snapshot(include_traces=False):
            if segment["is_expandable"] and segment["device"] in others:
                others.remove(segment["device"])
                torch.cuda.synchronize(segment["device"])
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def _most_is_cached(device: torch.device) -> bool:
    """Return whether torch's cache holds more of the device than the driver has to give."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return cached > torch.cuda.mem_get_info(device)[0]


def _reserved(index: int) -> int:
    stats = torch.cuda.memory_stats_as_nested_dict(index)
    return int(stats["reserved_bytes"]["all"]["current"])


def free_put_off(device: torch.device) -> None:
    """Free what died in this thread's open region after use on a second stream, as far as that is
    done: before version 2.13 torch looks at such blocks only where no pool is in use.
    """
    if any(regions.served for regions in _mine()):
        with outside_regions(), contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(1, device=device)  # any allocation has torch look


def others_open() -> bool:
    """Return whether regions of other threads are open, in which torch may keep its cache."""
    return _in_use > sum(regions.served for regions in _mine())


@contextlib.contextmanager
def outside_regions() -> Iterator[None]:
    """Leave the pools that this thread is in, and enter them again at the end."""
    resting = [regions for regions in _mine() if regions.rest()]
    try:
        yield
    finally:
        for regions in resting:
            regions.serve()


def _mine() -> list[_Regions]:
    return list(_open.__dict__.values())


@contextlib.contextmanager
def _in_new_pool(slot: int, device: torch.device) -> Iterator[None]:
    """Dead blocks of ended regions are freed first: a region of every step finds them again."""
    regions = _open.__dict__.setdefault(str(device), _Regions(device.index))
    with contextlib.ExitStack() as undo:
        pool = _new_open_pool(slot, device)
        undo.callback(regions.serve)
        undo.callback(_retire, pool)
        undo.callback(regions.leave, pool)
        regions.enter(pool)
        empty_cache(device)  # of dropped pools only, before 2.13
        yield


class _Regions:
    """Ids of the pools that one thread is in on one device, outermost first.

    torch serves nested pools outermost first, so it is told of the innermost only.
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
        """Leave, in any thread and order; what is around it is served by `serve`."""
        self._pools.remove(pool)
        if self._served == pool:
            self.rest()

    def rest(self) -> bool:
        """Leave what is served; False: nothing was."""
        global _in_use
        with _lock:
            pool, self._served = self._served, None
            if pool is not None:
                _in_use -= 1
                torch._C._cuda_endAllocateToPool(self._device, pool)
                torch._C._cuda_releasePool(self._device, pool)
        return pool is not None

    def serve(self) -> None:
        """Enter the innermost, where none is served. ``StateError``: it is another thread's."""
        global _in_use
        if self._served is not None or not self._pools:
            return
        if threading.current_thread() is not self._thread:  # torch lets a thread enter itself
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
# regions wait here until no thread is in a pool; nothing else (a traceback's frames, say) may hold
# the last reference.
pools: list[torch.cuda.MemPool] = []
_open_pools: dict[Handle, torch.cuda.MemPool] = {}
_in_use = 0  # pools that threads are in


def _new_open_pool(slot: int, device: torch.device) -> Handle:
    pool = new_pool(slot, device)
    _open_pools[pool.id] = pool
    return pool.id


def retire(pool: torch.cuda.MemPool) -> None:
    """Drop a pool when no thread is in a pool. Takes no lock: finalizers call it."""
    pools.append(pool)


def _retire(pool: Handle) -> None:
    retire(_open_pools.pop(pool))
    with _lock:
        if not _in_use:
            pools.clear()

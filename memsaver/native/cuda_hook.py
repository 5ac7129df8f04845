"""torch's CUDA allocations of a thread, sent to an arena: a ``MemPool`` of the shim's segments."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache

import torch

from memsaver.common.machine import forkable
from memsaver.errors import StateError
from memsaver.native import shim

# of everything below; a collector may end a region in the middle of it
_lock = forkable(threading.RLock())
Handle = tuple[int, int]
_open = threading.local()  # by device: the ``_Regions`` of this thread


@cache
def _allocator(slot: int) -> torch.cuda.memory.CUDAPluggableAllocator:
    """The symbol pair of a slot; kept for life: torch frees segments through it at any time."""
    names = f"ms_cuda_alloc_{slot:02x}", f"ms_cuda_free_{slot:02x}"
    return torch.cuda.memory.CUDAPluggableAllocator(shim.path(), *names)


def new_pool(slot: int) -> torch.cuda.MemPool:
    """A pool of segments of ``slot``; freed blocks go back when the pool is dropped."""
    with _lock:  # functools.cache alone may call twice
        allocator = _allocator(slot)
    return torch.cuda.MemPool(allocator.allocator())


@contextlib.contextmanager
def allocate_from(slot: int, device: torch.device) -> Iterator[None]:
    """This thread's torch CUDA allocations go to ``slot`` through a pool of their own, until any
    thread leaves.
    """
    # makes cuBLAS's workspace, which torch keeps for ever, outside of the tag
    torch.cuda.current_blas_handle()
    with _in_new_pool(slot, device):
        yield


def free_dead_blocks(slot: int, device: torch.device) -> None:
    """Free the blocks of ended regions, of any tag, whose tensors have died; torch keeps them."""
    with _in_new_pool(slot, device):
        pass


@contextlib.contextmanager
def _in_new_pool(slot: int, device: torch.device) -> Iterator[None]:
    """Dead blocks of ended regions are freed first: a region of every step finds them again."""
    regions = _open.__dict__.setdefault(str(device), _Regions(device.index))
    with contextlib.ExitStack() as undo:
        pool = _new_open_pool(slot)
        undo.callback(_retire)
        undo.callback(regions.leave, pool)
        regions.enter(pool)
        # while a pool is in use, it leaves torch's own cache alone: dropped pools only
        torch.cuda.empty_cache()
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

    def enter(self, pool: Handle) -> None:
        self._pools.append(pool)
        self._serve()

    def leave(self, pool: Handle) -> None:
        """Leave, in any thread and order. ``StateError``: done, but the one around it rests."""
        self._pools.remove(pool)
        self._serve()

    def _serve(self) -> None:
        wanted = self._pools[-1] if self._pools else None
        if wanted == self._served:
            return
        if self._served is not None:
            torch._C._cuda_endAllocateToPool(self._device, self._served)
            torch._C._cuda_releasePool(self._device, self._served)
            self._served = None
        if wanted is not None:
            if threading.current_thread() is not self._thread:  # torch lets a thread enter itself
                raise StateError(
                    f"thread {threading.current_thread().name!r} left a region inside another one "
                    f"of thread {self._thread.name!r}, whose allocations are on no tag until it "
                    "enters or leaves a region; leave regions where they were entered"
                )
            torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, wanted)
            self._served = wanted


# torch aborts when a pool is dropped while any pool is in use on the device. So pools of ended
# regions wait here until no region of the process is open; nothing else (a traceback's frames, say)
# may hold the last reference.
pools: list[torch.cuda.MemPool] = []
_open_regions = 0


def _new_open_pool(slot: int) -> Handle:
    global _open_regions
    pool = new_pool(slot)
    with _lock:
        _open_regions += 1
        pools.append(pool)
    return pool.id


def retire(pool: torch.cuda.MemPool) -> None:
    """Drop a pool when no region of the process is open. Takes no lock: finalizers call it."""
    pools.append(pool)


def _retire() -> None:
    global _open_regions
    with _lock:
        _open_regions -= 1
        if not _open_regions:
            pools.clear()

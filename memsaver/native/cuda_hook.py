"""torch's CUDA allocations of a thread, sent to an arena: a ``MemPool`` of the shim's segments."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache

import torch

from memsaver.native import shim

_lock = threading.Lock()  # of everything below
_open = threading.local()  # .stack: the pools this thread is in, outermost first


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
    """This thread's torch CUDA allocations go to ``slot`` through a pool of their own.

    torch serves nested pools outermost first, so the outer one is left while an inner one is open.
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
    stack: list[torch.cuda.MemPool] = _open.__dict__.setdefault("stack", [])
    with contextlib.ExitStack() as undo:
        if stack:
            _leave(stack[-1], device)
            undo.callback(_enter, stack[-1], device)
        stack.append(_new_open_pool(slot))
        undo.callback(_retire)
        undo.callback(stack.pop)
        _enter(stack[-1], device)
        undo.callback(_leave, stack[-1], device)
        # while a pool is in use, it leaves torch's own cache alone: dropped pools only
        torch.cuda.empty_cache()
        yield


# torch aborts when a pool is dropped while any pool is in use on the device. So pools of ended
# regions wait here until no region of the process is open; nothing else (a traceback's frames, say)
# may hold the last reference.
pools: list[torch.cuda.MemPool] = []
_open_regions = 0


def _new_open_pool(slot: int) -> torch.cuda.MemPool:
    global _open_regions
    pool = new_pool(slot)
    with _lock:
        _open_regions += 1
        pools.append(pool)
    return pool


def retire(pool: torch.cuda.MemPool) -> None:
    """Drop a pool when no region of the process is open. Takes no lock: finalizers call it."""
    pools.append(pool)


def _retire() -> None:
    global _open_regions
    with _lock:
        _open_regions -= 1
        if not _open_regions:
            pools.clear()


def _enter(pool: torch.cuda.MemPool, device: torch.device) -> None:
    torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool.id)


def _leave(pool: torch.cuda.MemPool, device: torch.device) -> None:
    torch._C._cuda_endAllocateToPool(device.index, pool.id)
    torch._C._cuda_releasePool(device.index, pool.id)

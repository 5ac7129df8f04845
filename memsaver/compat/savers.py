"""Parts of the drop-ins: one saver per device, regions that a thread can leave, graph pools."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from memsaver.memory.torch_allocator import check_capture
from memsaver.native import cuda_hook
from memsaver.saver import MemorySaver
from memsaver.system.interrupts import Finalizer
from memsaver.types import Content

_thread = threading.local()  # .regions: the regions that the thread is in, outermost first
Handle = tuple[int, int]
Key = tuple[object, ...]  # (device, tag, the caller's handle), or (our own handle,)


def current_device() -> torch.device:
    """Return the current CUDA device, or the CPU if there is no GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Savers:
    """Owner of one ``MemorySaver(device(), **options)`` per device, created on first use.

    A forked child starts without savers. Iteration yields the savers of this process, in the order
    of their creation.
    """

    def __init__(self, device: Callable[[], torch.device] = current_device, **options: Any) -> None:
        self._device = device
        self._options = options
        # Keyed by process, because a forked child must not drop its parent's savers.
        self._made: dict[tuple[int, torch.device], MemorySaver] = {}

    def current(self) -> MemorySaver:
        key = os.getpid(), self._device()
        if key not in self._made:
            self._made.setdefault(key, MemorySaver(key[1], **self._options))
        return self._made[key]

    def __iter__(self) -> Iterator[MemorySaver]:
        return iter([saver for (pid, _), saver in list(self._made.items()) if pid == os.getpid()])

    def set_disk_dir(self, path: Path) -> None:
        """Set the directory for content ``"disk"`` from the next pause on."""
        self._options["disk_dir"] = path
        for saver in self:
            saver.disk_dir = path


def _regions() -> "list[Region]":
    return _thread.__dict__.setdefault("regions", [])


class Region:
    """A saver's region that its thread can leave and enter again before the region ends."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._inside: contextlib.ExitStack | None = None
        self._among: list[Region] = []  # the regions of the thread that entered this one

    def enter(self) -> None:
        inside = contextlib.ExitStack()
        inside.enter_context(self._make())
        self._inside = inside

    def leave(self, *error: Any) -> bool:
        """Leave the saver's region, which may raise a better error than the given one."""
        inside, self._inside = self._inside, None
        return inside is not None and bool(inside.__exit__(*(error or (None, None, None))))

    def __enter__(self) -> None:
        self.enter()
        self._among = _regions()
        self._among.append(self)

    def __exit__(self, *error: Any) -> bool:
        self._among.remove(self)
        return self.leave(*error)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Suspend this thread's regions: allocations inside are torch's own."""
    left = _regions()
    with contextlib.ExitStack() as back:
        for region in reversed(left):
            region.leave()
            back.callback(region.enter)  # runs in reverse order: the outermost region first
        _thread.regions = []
        back.callback(setattr, _thread, "regions", left)
        yield


class GraphPools:
    """Memory pools of captured graphs, each kept alive by the graphs captured with it."""

    def __init__(self) -> None:
        self._pools: weakref.WeakValueDictionary[Key, torch.cuda.MemPool] = (
            weakref.WeakValueDictionary()
        )

    @contextlib.contextmanager
    def capture(
        self,
        graph: torch.cuda.CUDAGraph,
        saver: MemorySaver,
        tag: str,
        content: Content,
        pool: Handle | None,
        stream: torch.cuda.Stream | None,
        capture_error_mode: str,
    ) -> Iterator[None]:
        """Capture a graph like ``torch.cuda.graph``, with its memory on a tag.

        `pool` is a handle from ``torch.cuda.graph_pool_handle()`` or another graph's ``pool()``.
        Graphs with the same handle share a pool on the tag. Memory that torch has behind the handle
        is not used.
        """
        check_capture(tag)
        memory = self._pool(saver, tag, content, pool)
        identity: Any = memory.id  # torch.cuda.graph has its own type for pool handles
        mode: Any = capture_error_mode
        capturing = torch.cuda.graph(graph, pool=identity, stream=stream, capture_error_mode=mode)
        with torch.cuda.stream(capturing.capture_stream):
            # Creates cuBLAS's workspace, which torch keeps forever, outside of the tag.
            torch.cuda.current_blas_handle()
        # torch aborts if a pool is dropped while a region is open.
        Finalizer(graph, cuda_hook.retire, memory)
        with capturing:
            yield

    def _pool(
        self, saver: MemorySaver, tag: str, content: Content, handle: Handle | None
    ) -> torch.cuda.MemPool:
        keys: list[Key] = [] if handle is None else [(saver.device, tag, handle), (handle,)]
        for key in keys:
            if (known := self._pools.get(key)) is not None:
                return known
        pool = saver.mem_pool(tag, content)
        for key in [(pool.id,), *keys[:1]]:
            self._pools[key] = pool
        return pool

"""Parts of the drop-ins: a saver a device, regions that a thread can leave, graphs on a tag."""

from __future__ import annotations

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

_thread = threading.local()  # .regions: those that the thread is in, outermost first
Handle = tuple[int, int]
Key = tuple[object, ...]  # (device, tag, the caller's handle), or (our own handle,)


def current_device() -> torch.device:
    """The current CUDA device; the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Savers:
    """One ``MemorySaver`` a device, made when asked for. A forked child begins with none."""

    def __init__(self, device: Callable[[], torch.device] = current_device, **options: Any) -> None:
        """device: tells which is the current one. options: of every ``MemorySaver``."""
        self._device = device
        self._options = options
        # a child must not drop its parent's
        self._made: dict[tuple[int, torch.device], MemorySaver] = {}

    def current(self) -> MemorySaver:
        key = os.getpid(), self._device()
        if key not in self._made:
            self._made.setdefault(key, MemorySaver(key[1], **self._options))
        return self._made[key]

    def __iter__(self) -> Iterator[MemorySaver]:
        """Those of this process, in the order in which they were made."""
        return iter([saver for (pid, _), saver in list(self._made.items()) if pid == os.getpid()])

    def set_disk_dir(self, path: Path) -> None:
        """Sets where content ``"disk"`` is saved from now on."""
        self._options["disk_dir"] = path
        for saver in self:
            saver.disk_dir = path


def _regions() -> list[Region]:
    regions: list[Region] = _thread.__dict__.setdefault("regions", [])
    return regions


class Region:
    """A saver's region that can be left, and entered anew, before it ends."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._inside: contextlib.ExitStack | None = None
        self._among: list[Region] = []  # those of the thread that entered it

    def enter(self) -> None:
        inside = contextlib.ExitStack()
        inside.enter_context(self._make())
        self._inside = inside

    def leave(self, *error: Any) -> bool:
        """``error`` goes through the saver's region, which may have a better one to raise."""
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
    """Lets what this thread allocates inside be torch's own; its regions go on afterwards.

    Raises ``StateError`` at the end if a region's tag was paused meanwhile, and is not resumed.
    """
    left = _regions()
    with contextlib.ExitStack() as back:
        for region in reversed(left):
            region.leave()
            back.callback(region.enter)  # the outermost first: it was left last
        _thread.regions = []
        back.callback(setattr, _thread, "regions", left)
        yield


class GraphPools:
    """Pools of captured graphs. One lives as long as a graph that was captured with it."""

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
        content: str,
        pool: Handle | None,
        stream: torch.cuda.Stream | None,
        capture_error_mode: str,
    ) -> Iterator[None]:
        """Like ``torch.cuda.graph``, on ``tag``.

        pool: from ``torch.cuda.graph_pool_handle()`` or another graph's ``pool()``: graphs captured
        with the same one share a pool of the tag. Memory that lies behind such a handle elsewhere
        is not used. ``StateError`` where NCCL would register the tag's pages with other ranks.
        """
        check_capture(tag)
        memory = self._pool(saver, tag, content, pool)
        identity: Any = memory.id  # typed as torch.cuda.graph's own kind of pool
        mode: Any = capture_error_mode
        capturing = torch.cuda.graph(graph, pool=identity, stream=stream, capture_error_mode=mode)
        with torch.cuda.stream(capturing.capture_stream):
            # makes cuBLAS's workspace, which torch keeps for ever, outside of the tag
            torch.cuda.current_blas_handle()
        # torch aborts if a pool goes while a region is open
        Finalizer(graph, cuda_hook.retire, memory)
        with capturing:
            yield

    def _pool(
        self, saver: MemorySaver, tag: str, content: str, handle: Handle | None
    ) -> torch.cuda.MemPool:
        keys: list[Key] = [] if handle is None else [(saver.device, tag, handle), (handle,)]
        for key in keys:
            if (known := self._pools.get(key)) is not None:
                return known
        pool = saver.mem_pool(tag, content)
        for key in [(pool.id,), *keys[:1]]:
            self._pools[key] = pool
        return pool

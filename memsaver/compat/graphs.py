"""CUDA graphs whose memory is on a tag."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from memsaver.common.finalizers import Finalizer
from memsaver.native import cuda_hook
from memsaver.saver import MemorySaver
from memsaver.vmm.registrations import check_capture

Handle = tuple[int, int]
Key = tuple[object, ...]  # (device, tag, the caller's handle), or (our own handle,)


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

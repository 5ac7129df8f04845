"""Decode steps as CUDA graphs: captured once for a ladder of batch sizes, replayed ever after.

Everything a graph allocates lies on tag `cuda_graph`. What a replay reads is the weights, the KV
cache, buffers that live outside every tag (inputs, rotary tables, the request table, what ranks
exchange), and memory of the tag that the same replay wrote before: so the tag's content need not
survive a pause, only its addresses.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from memsaver.vmm import clear_workspaces
from rollout.types import CUDA_GRAPH

if TYPE_CHECKING:
    from memsaver import MemorySaver

_INPUTS = 3  # token ids, positions, rows of the request table

Decode = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(token ids, positions, rows: int64 [B]; logits [B, vocab] to be written). Launches work only,
never waits.
"""


def ladder(max_running: int) -> tuple[int, ...]:
    """Batch sizes of graphs: padding costs at most 31 rows, or doubles a batch below 16."""
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, max_running + 1, 32)]
    return (*(size for size in sizes if size < max_running), max_running)


class DecodeGraphs:
    """One graph a batch size; padding is row 0 of the request table, which has page 0 only."""

    def __init__(
        self,
        decode: Decode,
        sizes: Sequence[int],
        vocab_size: int,
        dtype: torch.dtype,
        saver: MemorySaver,
    ) -> None:
        """Captures all graphs. The memory that `decode` reads must be mapped, whatever it holds.

        torch.OutOfMemoryError carries a note on what to lower.
        """
        self.sizes = tuple(sorted(set(sizes)))
        largest = self.sizes[-1]
        self._host = torch.zeros((_INPUTS, largest), dtype=torch.int64, pin_memory=True)
        self._staged = self._host.numpy()
        self._inputs = torch.zeros((_INPUTS, largest), dtype=torch.int64, device=saver.device)
        self._logits = saver.empty((largest, vocab_size), dtype, tag=CUDA_GRAPH)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = saver.mem_pool(CUDA_GRAPH)  # after the graphs: they are dropped before it
        self.captures = self.replays = 0
        stream = torch.cuda.Stream(saver.device)
        with _no_collection():
            # the largest first: the smaller ones fit into the memory it leaves
            for size in reversed(self.sizes):
                try:
                    self._graphs[size] = self._capture(decode, size, stream)
                except torch.OutOfMemoryError as error:
                    text = f"capturing a CUDA graph for {size} requests"
                    error.add_note(f"{text}: lower kv_tokens or max_running")
                    raise

    @property
    def max_batch(self) -> int:
        return self.sizes[-1]

    def addresses(self) -> dict[str, int]:
        """Returns where replays read their inputs and write their results: the same for life."""
        return {"inputs": self._inputs.data_ptr(), "logits": self._logits.data_ptr()}

    def replay(self, ids: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Logits [n, vocab] of n requests' next tokens, valid until the next replay."""
        count = len(ids)
        size = self.sizes[bisect_left(self.sizes, count)]
        staged = self._staged[:, :size]
        staged[:, count:] = 0
        for line, values in zip(staged, (ids, positions, rows), strict=True):
            line[:count] = np.fromiter(values, dtype=np.int64, count=count)
        self._inputs[:, :size].copy_(self._host[:, :size], non_blocking=True)
        self._graphs[size].replay()
        self.replays += 1
        return self._logits[:count]

    def _capture(
        self, decode: Decode, size: int, stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        ids, positions, rows = self._inputs[:, :size]
        logits = self._logits[:size]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            # compiles kernels, which is not allowed while capturing
            decode(ids, positions, rows, logits)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        clear_workspaces()  # it takes a new one from the graph's pool while capturing
        pool: Any = self._pool.id  # typed as torch.cuda.graph's own kind of pool
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            decode(ids, positions, rows, logits)
        clear_workspaces()  # and from elsewhere afterwards
        self.captures += 1
        return graph


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage first: torch aborts when old graphs die inside of a capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

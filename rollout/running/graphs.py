"""CUDA graphs of decode steps, captured once for a ladder of batch sizes.

All memory that a graph allocates lies on tag `cuda_graph`. A replay reads the weights, the KV
cache, buffers outside of every tag (inputs, last tokens, rotary tables, the request table, buffers
of collectives), and memory of the tag that the same replay has written. Therefore only the tag's
addresses must survive a pause, not its content.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcache.allocators import Int64Array
from memsaver import MemorySaver
from memsaver.memory import clear_workspaces
from rollout.tag_names import CUDA_GRAPH

_INPUTS = 2  # positions, rows of the request table

Decode = Callable[[Tensor, Tensor, Tensor], None]
"""(positions, rows: int64 [B]; logits [B, vocab], the output) -> None.

The function only launches work, and never waits for the device.
"""


def ladder(max_running: int) -> tuple[int, ...]:
    """Return batch sizes for graphs; padding adds at most 31 rows, or doubles a batch below 16."""
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, max_running + 1, 32)]
    return (*(size for size in sizes if size < max_running), max_running)


class DecodeGraphs:
    """CUDA graphs of decode steps, one per batch size.

    Padding uses row 0 of the request table, which contains only page 0.
    """

    def __init__(
        self,
        decode: Decode,
        sizes: Sequence[int],
        vocab_size: int,
        dtype: torch.dtype,
        saver: MemorySaver,
    ) -> None:
        """Capture `decode` for each batch size, with logits [size, vocab_size] of `dtype`.

        The memory that `decode` reads must be mapped, with any content. A torch.OutOfMemoryError
        gets a note that names the options to lower.
        """
        self.sizes = tuple(sorted(set(sizes)))
        largest = self.sizes[-1]
        # Two buffers, because the step before may still wait for the copy from its own.
        shape = (2, _INPUTS * largest)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]
        self._inputs = torch.zeros(shape[1], dtype=torch.int64, device=saver.device)
        self._logits = saver.empty((largest, vocab_size), dtype, tag=CUDA_GRAPH)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = saver.mem_pool(CUDA_GRAPH)  # assigned after _graphs, to be dropped after them
        self.captures = self.replays = 0
        stream = torch.cuda.Stream(saver.device)
        with _no_collection():
            # The largest graph first: smaller graphs fit into the memory that it frees.
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
        """Return the fixed addresses of the replays' inputs and results."""
        return {"inputs": self._inputs.data_ptr(), "logits": self._logits.data_ptr()}

    def replay(self, positions: Int64Array, rows: Int64Array) -> Tensor:
        """Return the logits [n, vocab] of n requests' next tokens, valid until the next replay."""
        count = len(rows)
        size = self.sizes[bisect_left(self.sizes, count)]
        buffer = self.replays % 2
        self._copied[buffer].synchronize()
        host = self._host[buffer, : _INPUTS * size]
        staged = host.numpy().reshape(_INPUTS, size)
        staged[:, count:] = 0
        staged[:, :count] = positions, rows
        self._inputs[: len(host)].copy_(host, non_blocking=True)
        self._copied[buffer].record(torch.cuda.current_stream(self._inputs.device))
        self._graphs[size].replay()
        self.replays += 1
        return self._logits[:count]

    def _capture(
        self, decode: Decode, size: int, stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        positions, rows = self._inputs[: _INPUTS * size].view(_INPUTS, size)
        logits = self._logits[:size]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            # Compiles kernels, which is not allowed during a capture.
            decode(positions, rows, logits)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        clear_workspaces()  # cuBLAS then allocates its workspace in the graph's pool
        pool: Any = self._pool.id  # torch.cuda.graph declares another type
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            decode(positions, rows, logits)
        clear_workspaces()  # and outside of the pool after the capture
        self.captures += 1
        return graph


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now and not inside the block: torch aborts when a graph dies in a capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

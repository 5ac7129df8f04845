"""CUDA graphs of steps, captured once for a ladder of sizes.

`DecodeGraphs` compute one token of each request, and `PromptGraphs` also parts of prompts: a step
has hundreds of launches, which take the host longer than they take the device if they are few rows
of a small model.

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
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcache.allocators import Int64Array
from memsaver import MemorySaver
from memsaver.memory import clear_workspaces
from rollout.ops.torch_attention import BatchShape
from rollout.tag_names import CUDA_GRAPH

Decode = Callable[[Tensor, Tensor, Tensor], None]
"""(positions, rows: int64 [B]; logits [B, vocab], the output) -> None.

The function only launches work, and never waits for the device.
"""

Compute = Callable[[Tensor, Tensor, Tensor], None]
"""(tokens, requests: see `pack_prompts`; hidden states [T, hidden], the output) -> None.

The function only launches work, and never waits for the device.
"""


def ladder(max_running: int) -> tuple[int, ...]:
    """Return batch sizes for graphs; padding adds at most 31 rows, or doubles a batch below 16."""
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, max_running + 1, 32)]
    return (*(size for size in sizes if size < max_running), max_running)


def token_ladder(most: int) -> tuple[int, ...]:
    """Return numbers of tokens for graphs of steps with prompts, at most `most`.

    Padding adds at most an eighth, or 63 tokens.
    """
    sizes, size = [], 64
    while size < most:
        sizes.append(size)
        size += max(64, 1 << size.bit_length() - 4)  # an eighth of the power of two below
    return (*sizes, most) if most else ()


def pack_prompts(
    ids: Int64Array, positions: Int64Array, shape: BatchShape, size: int, most: int
) -> Int64Array:
    """Pack a step of at most `size` tokens and `most` requests of either kind for a replay.

    Args:
        ids: Tokens of the prompts; those of decoding samples are on the device.
        positions: Position of every token, decoding samples first.
        shape: Shape of the step.
        size: Tokens of the graph.
        most: Decode requests of the graph, and prefill chunks.

    Returns:
        `tokens` [3, size], then `requests` [4, 2 * most], flattened. The first has the id of each
        token (-1: the row's last token), its position and its row; padding is token 0 of row 0. The
        second is `TritonPlan.meta`.
    """
    packed = np.zeros(3 * size + 8 * most, dtype=np.int64)
    tokens, requests = packed[: 3 * size].reshape(3, size), packed[3 * size :].reshape(4, -1)
    decoding, count = shape.num_decode, len(positions)
    tokens[0, :decoding] = -1
    tokens[0, decoding:count] = ids
    tokens[1, :count] = positions
    tokens[2, :count] = np.repeat(shape.rows, shape.q_lens)
    numbers = np.array([shape.rows, shape.q_lens, shape.kv_lens, shape.q_lens])
    numbers[1] = np.cumsum(numbers[3]) - numbers[3]
    requests[1, most:] = count  # of padding
    requests[:, :decoding] = numbers[:, :decoding]
    requests[:, most : most + numbers.shape[1] - decoding] = numbers[:, decoding:]
    return packed


class GraphPool:
    """Memory of CUDA graphs on tag `cuda_graph`; a capture reuses what earlier ones have freed.

    Attributes:
        captures: Number of graphs that were captured.
    """

    def __init__(self, saver: MemorySaver) -> None:
        self.saver = saver
        self._pool = saver.mem_pool(CUDA_GRAPH)
        self._stream = torch.cuda.Stream(saver.device)
        self.captures = 0

    def capture(self, run: Callable[[], None], what: str) -> torch.cuda.CUDAGraph:
        """Capture `run`, which is called twice. The memory that it reads is mapped.

        A torch.OutOfMemoryError gets a note that says `what` was captured.
        """
        stream = self._stream
        try:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                run()  # compiles kernels, which is not allowed during a capture
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            clear_workspaces()  # cuBLAS then allocates its workspace in the graph's pool
            pool: Any = self._pool.id  # torch.cuda.graph declares another type
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                run()
            clear_workspaces()  # and outside of the pool after the capture
        except torch.OutOfMemoryError as error:
            error.add_note(f"capturing a CUDA graph for {what}: lower kv_tokens or max_running")
            raise
        self.captures += 1
        return graph


class _Inputs:
    """Numbers that a graph reads, int64 at a fixed address."""

    def __init__(self, count: int, device: torch.device) -> None:
        # Two buffers, because the step before may still wait for the copy from its own.
        self._host = torch.zeros((2, count), dtype=torch.int64, pin_memory=True)
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]
        self.on_device = torch.zeros(count, dtype=torch.int64, device=device)
        self._turn = 0

    def send(self, values: Int64Array) -> None:
        """Copy the numbers to the device, in the order of the current stream."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        copied.synchronize()
        host = self._host[self._turn, : len(values)]
        host.numpy()[:] = values
        self.on_device[: len(host)].copy_(host, non_blocking=True)
        copied.record(torch.cuda.current_stream(self.on_device.device))


class DecodeGraphs:
    """CUDA graphs of decode steps, one per batch size.

    Padding uses row 0 of the request table, which contains only page 0.

    Attributes:
        replays: Number of steps.
    """

    def __init__(
        self,
        decode: Decode,
        sizes: Sequence[int],
        vocab_size: int,
        dtype: torch.dtype,
        pool: GraphPool,
    ) -> None:
        """Capture `decode` for each batch size, with logits [size, vocab_size] of `dtype`."""
        self.sizes = tuple(sorted(set(sizes)))
        largest, saver = self.sizes[-1], pool.saver
        self._inputs = _Inputs(2 * largest, saver.device)
        self._logits = saver.empty((largest, vocab_size), dtype, tag=CUDA_GRAPH)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = pool  # assigned after _graphs, to be dropped after them
        self.replays = 0
        with _no_collection():
            # The largest graph first: smaller graphs fit into the memory that it frees.
            for size in reversed(self.sizes):
                positions, rows = self._inputs.on_device[: 2 * size].view(2, size)
                run = partial(decode, positions, rows, self._logits[:size])
                self._graphs[size] = pool.capture(run, f"{size} requests")

    @property
    def max_batch(self) -> int:
        return self.sizes[-1]

    def addresses(self) -> dict[str, int]:
        """Return the fixed addresses of the replays' inputs and results."""
        inputs = self._inputs.on_device.data_ptr()
        return {"inputs": inputs, "logits": self._logits.data_ptr()}

    def replay(self, positions: Int64Array, rows: Int64Array) -> Tensor:
        """Return the logits [n, vocab] of n requests' next tokens, valid until the next replay."""
        count = len(rows)
        size = self.sizes[bisect_left(self.sizes, count)]
        staged = np.zeros((2, size), dtype=np.int64)
        staged[:, :count] = positions, rows
        self._inputs.send(staged.reshape(-1))
        self._graphs[size].replay()
        self.replays += 1
        return self._logits[:count]


class PromptGraphs:
    """CUDA graphs of steps with parts of prompts, one per number of tokens.

    Attributes:
        sizes: Numbers of tokens.
        replays: Number of steps.
    """

    def __init__(
        self,
        compute: Compute,
        sizes: Sequence[int],
        max_running: int,
        hidden_size: int,
        dtype: torch.dtype,
        pool: GraphPool,
    ) -> None:
        """Capture `compute` for each number of tokens, of at most `max_running` requests."""
        self.sizes, self._max_running = tuple(sizes), max_running
        largest, saver = self.sizes[-1], pool.saver
        self._inputs = _Inputs(3 * largest + 8 * self._requests(largest), saver.device)
        self._hidden = saver.empty((largest, hidden_size), dtype, tag=CUDA_GRAPH)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = pool  # assigned after _graphs, to be dropped after them
        self.replays = 0
        with _no_collection():
            for size in reversed(self.sizes):
                packed = self._inputs.on_device[: 3 * size + 8 * self._requests(size)]
                tokens, requests = packed[: 3 * size].view(3, -1), packed[3 * size :].view(4, -1)
                run = partial(compute, tokens, requests, self._hidden[:size])
                self._graphs[size] = pool.capture(run, f"{size} tokens")

    def _requests(self, size: int) -> int:
        return min(size, self._max_running)

    @property
    def max_tokens(self) -> int:
        return self.sizes[-1]

    def replay(self, ids: Int64Array, positions: Int64Array, shape: BatchShape) -> Tensor:
        """Return the hidden states [T, hidden] of a step's tokens, valid until the next replay.

        Arguments are those of `pack_prompts`.
        """
        count = len(positions)
        size = self.sizes[bisect_left(self.sizes, count)]
        self._inputs.send(pack_prompts(ids, positions, shape, size, self._requests(size)))
        self._graphs[size].replay()
        self.replays += 1
        return self._hidden[:count]


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

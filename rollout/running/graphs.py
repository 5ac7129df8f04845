"""CUDA graphs of steps, captured once for a ladder of sizes.

`DecodeGraphs` compute and choose one token of each request. While the requests stay the same, a
step needs nothing from the host but its launch, and the slots of its tokens in the request table.
`PromptGraphs` also compute parts of prompts. A step has hundreds of launches, which would take the
host longer than the device, except for many rows of a large model.

All memory that a graph allocates lies on tag `cuda_graph`. A replay reads the weights, the KV
cache, buffers outside of every tag (inputs, last tokens, rotary tables, the request table, buffers
of collectives), and memory of the tag that the same replay has written. Therefore only the tag's
addresses must survive a pause, not its content.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvcache.allocators import Int64Array
from memsaver.graph_pool import GraphPool, no_collection
from rollout.ops.token_sampling import SLOTS, HostResults, Sent, divisors
from rollout.ops.torch_attention import BatchShape
from rollout.running.graph_inputs import DecodeInputs, GraphInputs, pack_decodes, pack_prompts
from rollout.tag_names import CUDA_GRAPH

Decode = Callable[[DecodeInputs, Tensor, HostResults], None]
"""(inputs of B rows; logits [B, vocab] and next tokens, the outputs) -> None.

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


def _capture(
    pool: GraphPool, sizes: Sequence[int], step: Callable[[int], Callable[[], None]], unit: str
) -> dict[int, torch.cuda.CUDAGraph]:
    """Capture a graph of each size; `sizes` ascend.

    `step` returns what the graph of a size does, which is done twice. The memory that it reads must
    be mapped. A torch.OutOfMemoryError gets a note that names the size in `unit`.
    """
    with no_collection():
        # The largest graph first: smaller graphs fit into the memory that it frees.
        return {size: _of_size(pool, step(size), f"{size} {unit}") for size in reversed(sizes)}


def _of_size(pool: GraphPool, run: Callable[[], None], what: str) -> torch.cuda.CUDAGraph:
    stream = pool.stream
    try:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            run()  # compiles kernels, which is not allowed during a capture
        stream.synchronize()
        return pool.capture(run)
    except torch.OutOfMemoryError as error:
        error.add_note(f"capturing a CUDA graph for {what}: lower kv_tokens or max_running")
        raise


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
        self._inputs = GraphInputs(DecodeInputs.words(largest), saver.device)
        self._results = HostResults.of(largest, saver.device)
        # Whoever waits for a blocking event sleeps, and gets a busy core sooner.
        self._chosen = [torch.cuda.Event(blocking=True) for _ in range(SLOTS)]
        self._logits = saver.empty((largest, vocab_size), dtype, tag=CUDA_GRAPH)
        self._graphs = _capture(pool, self.sizes, partial(self._step, decode), "requests")
        self.pool = pool  # assigned after _graphs, to be dropped after them
        self._results.turn.zero_()  # captures have run steps
        self.replays = 0

    def _step(self, decode: Decode, size: int) -> Callable[[], None]:
        none = np.empty(0, dtype=np.int64)
        self._inputs.send(pack_decodes(none, none, none.reshape(0, 3), *divisors(none), size))
        inputs = DecodeInputs.of(self._inputs.on_device, size)
        return partial(decode, inputs, self._logits[:size], self._results)

    @property
    def max_batch(self) -> int:
        return self.sizes[-1]

    def addresses(self) -> dict[str, int]:
        """Return the fixed addresses of the replays' inputs and results."""
        inputs = self._inputs.on_device.data_ptr()
        return {"inputs": inputs, "logits": self._logits.data_ptr()}

    def padded(self, count: int) -> int:
        """Return the rows of the graph that computes `count` rows."""
        return self.sizes[bisect_left(self.sizes, count)]

    def replay(self, count: int, packed: Int64Array | None) -> tuple[Tensor, Sent]:
        """Compute and choose the next tokens of `count` rows.

        Args:
            count: Number of rows.
            packed: Result of `pack_decodes`; None: the rows of the last replay go on.

        Returns:
            The logits [count, vocab], valid until the next replay, and the tokens, until as many
            replays later as `HostResults` has slots.
        """
        if packed is not None:
            self._inputs.send(packed)
        self._graphs[self.padded(count)].replay()
        slot = self.replays % SLOTS
        self.replays += 1
        self._chosen[slot].record(torch.cuda.current_stream(self._logits.device))
        tokens, logprobs, _ = self._results
        sent = Sent(tokens[slot, :count], logprobs[slot, :count], self._chosen[slot])
        return self._logits[:count], sent


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
        self._inputs = GraphInputs(3 * largest + 8 * self._requests(largest), saver.device)
        self._hidden = saver.empty((largest, hidden_size), dtype, tag=CUDA_GRAPH)
        self._graphs = _capture(pool, self.sizes, partial(self._step, compute), "tokens")
        self.pool = pool  # assigned after _graphs, to be dropped after them
        self.replays = 0

    def _step(self, compute: Compute, size: int) -> Callable[[], None]:
        packed = self._inputs.on_device[: 3 * size + 8 * self._requests(size)]
        tokens, requests = packed[: 3 * size].view(3, -1), packed[3 * size :].view(4, -1)
        return partial(compute, tokens, requests, self._hidden[:size])

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

"""Turn a scheduled step into tensors, run the decoder (as a CUDA graph if possible), and sample.

Decode graphs are captured once, for a ladder of batch sizes. All memory that a graph allocates lies
on tag `cuda_graph`. A replay reads the weights, the KV cache, buffers outside of every tag (inputs,
rotary tables, the request table, buffers of collectives), and memory of the tag that the same
replay has written. Therefore only the tag's addresses must survive a pause, not its content.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcache.allocators import to_device
from memsaver import MemorySaver
from memsaver.memory import clear_workspaces
from memsaver.system.devices import Impl, use_triton
from rollout.model.decoder import MLP, Decoder, Experts, ModelConfig
from rollout.model.mixers.base import AttentionPlan, Batch, LayerParts
from rollout.ops.row_wise import linear, row_invariant_products
from rollout.ops.token_sampling import SamplingBatch, Sent, likeliest, sample, send, to_host
from rollout.ops.torch_attention import BatchShape, plan_torch
from rollout.ops.triton_attention import plan_decode, plan_triton
from rollout.parallel import TensorParallel
from rollout.serving.kv_cache import Cache
from rollout.serving.samples import RoutedExperts, Sample, Step
from rollout.tag_names import CUDA_GRAPH
from rollout.weights.store import WeightStore

_Plan = Callable[[int | None, Tensor | None], AttentionPlan]
"""(window, mapping) -> where attention finds the tokens, see `plan_torch`."""
_INPUTS = 3  # token ids, positions, rows of the request table
Decode = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(token ids, positions, rows: int64 [B]; logits [B, vocab], the output) -> None.

The function only launches work, and never waits for the device.
"""


class ModelRunner:
    """The engine's computation: forward passes and sampling. It keeps no state of requests."""

    def __init__(
        self,
        config: ModelConfig,
        store: WeightStore,
        cache: Cache,
        *,
        attention: Impl,
        ranks: TensorParallel,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.device = cache.table.device
        parts = LayerParts(
            store=store,
            layout=cache.layout,
            pool=cache.pool,
            table=cache.table,
            sparsity=cache.sparsity,
            ranks=ranks,
            norm_eps=config.rms_norm_eps,
            zero_centred_norms=config.zero_centred_norms,
        )
        self.decoder = Decoder(config, parts)
        self._cache, self._table = cache, cache.table
        self._window, self._sliding = cache.window, cache.sliding
        self._triton = use_triton(attention, self.device)
        self.graphs: DecodeGraphs | None = None
        self.recorder: RoutingRecorder | None = None

    @property
    def capturable(self) -> bool:
        """Return whether decode steps can be captured as CUDA graphs."""
        layers = all(mixer.capturable for mixer in self.config.mixers)
        return self._triton and self._cache.capturable and layers

    def record_routing(self, tokens: int) -> None:
        """Record the experts of each step's tokens, at most `tokens`, in `recorder`.

        Call this before any capture.
        """
        self.recorder = RoutingRecorder(self.decoder.mlps, tokens, self.device)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], saver: MemorySaver) -> None:
        """Capture CUDA graphs, which replace decode steps of at most max(sizes) samples."""
        dtype = self.decoder.lm_head.dtype
        self.ranks.stage_captures(self.config.vocab_size, dtype, self.device)
        with row_invariant_products(self.device):
            self.graphs = DecodeGraphs(self.decode, sizes, self.config.vocab_size, dtype, saver)

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Return the logits [R, vocab] of a step's decoding samples, then of its prefills that end.

        The logits are valid until the next call.
        """
        ids, positions, ends, shape = _pack(step)
        if self.graphs is not None and not step.chunks and len(ids) <= self.graphs.max_batch:
            for load in step.loads:
                load.wait()
            return self.graphs.replay(ids, positions, shape.rows)
        slots = [step.decode_slots] if step.decode else []
        slots += [chunk.slots for chunk in step.chunks]
        plan = plan_triton if self._triton else plan_torch
        parts = (ids, positions, ends, shape.rows)
        at = to_device(np.concatenate(parts).astype(np.int64), self.device).split(
            [len(part) for part in parts]
        )
        batch = self._batch(
            functools.partial(plan, shape, self._table.req_to_token),
            positions=at[1],
            slots=torch.cat(slots),
            rows=at[3],
            shape=shape,
            loads=step.loads,
        )
        with row_invariant_products(self.device):
            part = linear(self.decoder(at[0], batch)[at[2]], self.decoder.lm_head)
            return self.ranks.join(part, self.config.vocab_size)

    def decode(self, ids: Tensor, positions: Tensor, rows: Tensor, logits: Tensor) -> None:
        """Compute one token of each request from device tensors only, as a graph records it."""
        table = self._table.req_to_token
        slots, plan = table[rows, positions].long(), plan_decode(rows, positions, table)
        batch = self._batch(
            lambda window, mapping: replace(plan, window=window, mapping=mapping),
            positions=positions,
            slots=slots,
            rows=rows,
        )
        hidden, head = self.decoder(ids, batch), self.decoder.lm_head
        if self.ranks.size == 1:
            linear(hidden, head, out=logits)
        else:
            logits.copy_(self.ranks.join(linear(hidden, head), self.config.vocab_size))

    def _batch(self, plan: _Plan, **fields: Any) -> Batch:
        batch = Batch(plan=plan(self._window, None), **fields)
        if self._sliding is None:
            return batch
        window, mapping = self._sliding
        sliding = replace(batch, slots=mapping[batch.slots], plan=plan(window, mapping))
        return replace(batch, sliding=sliding)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> Sent:
        """Start to draw the next token of each sample, or to take a forced one, and score it.

        `logits` are the result of `forward`, and `rows` has each sample's row of them. Several
        samples may use the same row.
        """
        batch = SamplingBatch.build(
            temperature=[member.params.temperature for member in samples],
            top_k=[member.params.top_k for member in samples],
            top_p=[member.params.top_p for member in samples],
            counters=[(member.seed, member.index, len(member.output)) for member in samples],
            forced=[
                member.params.forced[len(member.output)]
                if len(member.output) < len(member.params.forced)
                else -1
                for member in samples
            ],
            device=self.device,
        )
        chosen = self._chosen(logits, rows)
        return to_host(*sample(chosen, batch, choices=self.config.choices))

    @torch.inference_mode()
    def candidates(
        self, logits: Tensor, rows: Sequence[int], count: int
    ) -> list[list[tuple[int, float]]]:
        """Return the `count` likeliest (token, log-prob) pairs of each of `rows`, best first."""
        best = likeliest(self._chosen(logits, rows), count, self.config.choices)
        chosen = zip(*to_host(*best).lists(), strict=True)
        return [list(zip(ids, values, strict=True)) for ids, values in chosen]

    def _chosen(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        if list(rows) == list(range(len(logits))):
            return logits
        return logits[torch.tensor(rows, device=self.device)]


def _pack(step: Step) -> tuple[list[int], list[int], list[int], BatchShape]:
    """Pack a step into one batch.

    Return the tokens' ids and positions, the indices of the tokens whose logits are needed, and the
    shape of the batch.
    """
    ids = [sample.output[-1] for sample in step.decode]
    kv_lens = [sample.length for sample in step.decode]
    positions, ends = [length - 1 for length in kv_lens], list(range(len(ids)))
    for chunk in step.chunks:
        stop = chunk.start + chunk.length
        ids += chunk.sample.tokens(chunk.start, stop)
        positions += range(chunk.start, stop)
        kv_lens.append(stop)
        if chunk.last:
            ends.append(len(ids) - 1)
    members = [*step.decode, *(chunk.sample for chunk in step.chunks)]
    shape = BatchShape(
        rows=[sample.handle.row for sample in members if sample.handle is not None],
        q_lens=[1] * len(step.decode) + [chunk.length for chunk in step.chunks],
        kv_lens=kv_lens,
        num_decode=len(step.decode),
    )
    return ids, positions, ends, shape


class RoutingRecorder:
    """Buffer that receives the experts of a step's tokens from the layers; it is on no tag.

    CUDA graphs always write to the same addresses.
    """

    def __init__(self, mlps: Iterable[MLP], tokens: int, device: torch.device) -> None:
        """Allocate the buffer for steps of at most `tokens` tokens."""
        layers = [mlp for mlp in mlps if isinstance(mlp, Experts)]
        config = layers[0].config
        dtype = torch.uint8 if config.experts <= 256 else torch.int16
        shape = (len(layers), tokens, config.top_k)
        self._written = torch.zeros(shape, dtype=dtype, device=device)
        for layer, part in zip(layers, self._written, strict=True):
            layer.routed = part

    def take(self, tokens: int) -> StepRouting:
        """Copy the experts of the step's tokens; on a GPU, start the copy to the host."""
        written = self._written[:, :tokens].transpose(0, 1)
        if not written.is_cuda:
            return StepRouting(written.numpy().copy())
        sent = send(written.contiguous())
        stream = torch.cuda.current_stream(written.device)
        return StepRouting(np.empty_like(sent.numpy()), sent, stream)


@dataclass(eq=False)
class StepRouting:
    """Experts of a step's packed tokens."""

    experts: RoutedExperts  # undefined before `arrive` if they come from a GPU
    sent: Tensor | None = None  # pinned target of the copy from the GPU
    stream: torch.cuda.Stream | None = None  # of that copy

    def arrive(self, *, waited: bool) -> None:
        """Fill `experts`; `waited` says whether the host has already waited for the step's end."""
        if self.sent is not None and self.stream is not None:
            if not waited:
                self.stream.synchronize()
            np.copyto(self.experts, self.sent.numpy())
            self.sent = None


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
        self._host = torch.zeros((_INPUTS, largest), dtype=torch.int64, pin_memory=True)
        self._staged = self._host.numpy()
        self._inputs = torch.zeros((_INPUTS, largest), dtype=torch.int64, device=saver.device)
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

    def replay(self, ids: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Return the logits [n, vocab] of n requests' next tokens, valid until the next replay."""
        count = len(ids)
        size = self.sizes[bisect_left(self.sizes, count)]
        # The copy of the last step from this buffer has ended, because the host has read the tokens
        # of that step. So the buffer can be written again without an event.
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
            # Compiles kernels, which is not allowed during a capture.
            decode(ids, positions, rows, logits)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        clear_workspaces()  # cuBLAS then allocates its workspace in the graph's pool
        pool: Any = self._pool.id  # torch.cuda.graph declares another type
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            decode(ids, positions, rows, logits)
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

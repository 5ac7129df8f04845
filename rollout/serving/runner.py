"""Turns a scheduled step into tensors, runs the decoder (as a CUDA graph if it can), samples.

Decode graphs are captured once for a ladder of batch sizes, and replayed ever after. Everything a
graph allocates lies on tag `cuda_graph`. What a replay reads is the weights, the KV cache, buffers
that live outside every tag (inputs, rotary tables, the request table, what ranks exchange), and
memory of the tag that the same replay wrote before: so the tag's content need not survive a pause,
only its addresses.
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
from rollout.ops.sampling import SamplingBatch, deliver, likeliest, sample, send
from rollout.ops.torch_attention import BatchShape, plan_torch
from rollout.ops.triton_attention import plan_decode, plan_triton
from rollout.parallel import TensorParallel
from rollout.serving.kv_cache import Cache
from rollout.serving.samples import RoutedExperts, Sample, Step
from rollout.tag_names import CUDA_GRAPH
from rollout.weights.store import WeightStore

_Plan = Callable[[int | None, Tensor | None], AttentionPlan]
"""(window, mapping) -> how attention finds the tokens: see `plan_torch`."""
_INPUTS = 3  # token ids, positions, rows of the request table
Decode = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(token ids, positions, rows: int64 [B]; logits [B, vocab] to be written). Launches work only,
never waits.
"""


class ModelRunner:
    """The computing half of the engine. Keeps no state of requests."""

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
        self._ranks = ranks
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
        """Tells whether decode steps can be CUDA graphs."""
        layers = all(mixer.capturable for mixer in self.config.mixers)
        return self._triton and self._cache.capturable and layers

    def record_routing(self, tokens: int) -> None:
        """Has steps of so many tokens leave experts with `recorder`; before any capture."""
        self.recorder = RoutingRecorder(self.decoder.mlps, tokens, self.device)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], saver: MemorySaver) -> None:
        """Makes decode steps of at most max(sizes) samples graph replays from here on."""
        dtype = self.decoder.lm_head.dtype
        self._ranks.stage_captures(self.config.vocab_size, dtype, self.device)
        with row_invariant_products(self.device):
            self.graphs = DecodeGraphs(self.decode, sizes, self.config.vocab_size, dtype, saver)

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Logits [R, vocab] until the next call: of decode samples, then of prefills that end."""
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
            return self._ranks.join(part, self.config.vocab_size)

    def decode(self, ids: Tensor, positions: Tensor, rows: Tensor, logits: Tensor) -> None:
        """One token of each request, from device tensors alone: what a graph records."""
        table = self._table.req_to_token
        slots, plan = table[rows, positions].long(), plan_decode(rows, positions, table)
        batch = self._batch(
            lambda window, mapping: replace(plan, window=window, mapping=mapping),
            positions=positions,
            slots=slots,
            rows=rows,
        )
        hidden, head = self.decoder(ids, batch), self.decoder.lm_head
        if self._ranks.size == 1:
            linear(hidden, head, out=logits)
        else:
            logits.copy_(self._ranks.join(linear(hidden, head), self.config.vocab_size))

    def _batch(self, plan: _Plan, **fields: Any) -> Batch:
        """fields: of `Batch`, as they are."""
        batch = Batch(plan=plan(self._window, None), **fields)
        if self._sliding is None:
            return batch
        window, mapping = self._sliding
        sliding = replace(batch, slots=mapping[batch.slots], plan=plan(window, mapping))
        return replace(batch, sliding=sliding)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]
    ) -> tuple[list[int], list[float]]:
        """The next token of each sample, from its row of the logits, and its log-probability."""
        batch = SamplingBatch.build(
            temperature=[each.params.temperature for each in samples],
            top_k=[each.params.top_k for each in samples],
            top_p=[each.params.top_p for each in samples],
            counters=[(each.seed, each.index, len(each.output)) for each in samples],
            device=self.device,
        )
        tokens, logprobs = deliver(*sample(self._chosen(logits, rows), batch))
        return tokens.tolist(), logprobs.tolist()

    @torch.inference_mode()
    def candidates(
        self, logits: Tensor, rows: Sequence[int], count: int
    ) -> list[list[tuple[int, float]]]:
        """The `count` likeliest next tokens of each of `rows`, in order, and log-probabilities."""
        tokens, logprobs = deliver(*likeliest(self._chosen(logits, rows), count))
        each_row = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        return [list(zip(ids, values, strict=True)) for ids, values in each_row]

    def _chosen(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        if list(rows) == list(range(len(logits))):
            return logits
        return logits[torch.tensor(rows, device=self.device)]


def _pack(step: Step) -> tuple[list[int], list[int], list[int], BatchShape]:
    """Token ids and positions of the packed batch, indices of the tokens with logits, and the
    batch in numbers.
    """
    ids = [each.output[-1] for each in step.decode]
    kv_lens = [each.length for each in step.decode]
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
        rows=[each.handle.row for each in members if each.handle is not None],
        q_lens=[1] * len(step.decode) + [chunk.length for chunk in step.chunks],
        kv_lens=kv_lens,
        num_decode=len(step.decode),
    )
    return ids, positions, ends, shape


class RoutingRecorder:
    """Holds what layers leave, outside of every tag: CUDA graphs write to one place for life."""

    def __init__(self, mlps: Iterable[MLP], tokens: int, device: torch.device) -> None:
        """tokens: most of a step."""
        layers = [mlp for mlp in mlps if isinstance(mlp, Experts)]
        config = layers[0].config
        dtype = torch.uint8 if config.experts <= 256 else torch.int16
        shape = (len(layers), tokens, config.top_k)
        self._written = torch.zeros(shape, dtype=dtype, device=device)
        for layer, part in zip(layers, self._written, strict=True):
            layer.routed = part

    def take(self, tokens: int) -> StepRouting:
        """Copy those of the step's tokens; on a GPU they are on their way to the host."""
        found = self._written[:, :tokens].transpose(0, 1)
        if not found.is_cuda:
            return StepRouting(found.numpy().copy())
        sent = send(found.contiguous())
        stream = torch.cuda.current_stream(found.device)
        return StepRouting(np.empty_like(sent.numpy()), sent, stream)


@dataclass(eq=False)
class StepRouting:
    """experts: of a step's packed tokens, once they `arrive`. sent: pinned, on this stream."""

    experts: RoutedExperts
    sent: Tensor | None = None
    stream: torch.cuda.Stream | None = None

    def arrive(self, *, waited: bool) -> None:
        """waited: the host has seen the end of the step."""
        if self.sent is not None and self.stream is not None:
            if not waited:
                self.stream.synchronize()
            np.copyto(self.experts, self.sent.numpy())
            self.sent = None


def ladder(max_running: int) -> tuple[int, ...]:
    """Return batch sizes for graphs: padding adds at most 31 rows, or doubles a batch below 16."""
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

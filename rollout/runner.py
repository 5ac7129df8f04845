"""Turns a scheduled step into tensors, runs the decoder (by CUDA graph where it can), and samples."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache import MHATokenToKVPool, ReqToTokenPool
from kvcache.allocators.paged import to_device
from memsaver import MemorySaver
from memsaver.ops.dispatch import Impl
from rollout.graphs import DecodeGraphs
from rollout.model.config import ModelConfig
from rollout.model.decoder import DecoderWeights, forward
from rollout.model.rotary import RotaryTables
from rollout.ops.attention import AttentionPlan, BatchShape, paged_attention, plan_attention, plan_decode
from rollout.ops.rotary import rotate_and_store
from rollout.sampler import SamplingBatch, sample
from rollout.scheduler import Sample, Step
from rollout.weights import WeightStore


class ModelRunner:
    """The computing half of the engine. Keeps no state of requests."""

    def __init__(
        self,
        config: ModelConfig,
        store: WeightStore,
        pool: MHATokenToKVPool,
        table: ReqToTokenPool,
        *,
        attention: Impl,
    ) -> None:
        self.config = config
        self.device = pool.device
        self._weights = DecoderWeights.of(store, config)
        self._pool = pool
        self._table = table
        self._attention = attention
        self._scale = config.head_dim**-0.5
        self._rotary = RotaryTables.build(config.rope, config.head_dim, table.max_context_len, pool.device)
        self.graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], saver: MemorySaver) -> None:
        """From here on decode steps of at most max(sizes) samples are graph replays."""
        self.graphs = DecodeGraphs(self._decode, sizes, self.config.vocab_size, self._weights.lm_head.dtype, saver)

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Logits [R, vocab] in the model's dtype, valid until the next call: a row for every decode sample, then one
        for every chunk that ends a prefill."""
        ids, positions, ends = _pack(step)
        if self.graphs is not None and not step.chunks and len(ids) <= self.graphs.max_batch:
            return self.graphs.replay(ids, positions, _rows(step))
        slots = ([step.decode_slots] if step.decode else []) + [
            chunk.sample.slots[chunk.start : chunk.start + chunk.length] for chunk in step.chunks
        ]
        plan = plan_attention(_shape(step), self._table.req_to_token, self._attention)
        at = to_device(np.array(ids + positions + ends), self.device).split([len(ids), len(ids), len(ends)])
        hidden = self._hidden(at[0], at[1], torch.cat(slots), plan)
        return F.linear(hidden[at[2]], self._weights.lm_head)

    def _decode(self, ids: Tensor, positions: Tensor, rows: Tensor, logits: Tensor) -> None:
        """One token of each request, from device tensors alone: what a graph records."""
        table = self._table.req_to_token
        hidden = self._hidden(ids, positions, table[rows, positions].long(), plan_decode(rows, positions, table))
        torch.mm(hidden, self._weights.lm_head.t(), out=logits)

    def _hidden(self, ids: Tensor, positions: Tensor, slots: Tensor, plan: AttentionPlan) -> Tensor:
        """Normed hidden states [T, hidden]; keys and values of the tokens are in the cache afterwards."""
        cos, sin = self._rotary.cos, self._rotary.sin

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self._pool.get_kv_buffer(layer)
            q = rotate_and_store(q, k, v, positions, slots, cos, sin, *cache)
            return paged_attention(q, *cache, plan, self._scale)

        return forward(self.config, self._weights, ids, attend=attend)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> tuple[list[int], list[float]]:
        """The next token of each sample, from its row of the logits, and its log-probability."""
        batch = SamplingBatch.build(
            temperature=[each.params.temperature for each in samples],
            top_k=[each.params.top_k for each in samples],
            top_p=[each.params.top_p for each in samples],
            counters=[(each.seed, each.index, len(each.output)) for each in samples],
            device=self.device,
        )
        if list(rows) != list(range(len(logits))):
            logits = logits[torch.tensor(rows, device=self.device)]
        tokens, logprobs = torch.stack([each.double() for each in sample(logits, batch)]).tolist()  # one transfer
        return [int(token) for token in tokens], logprobs


def _pack(step: Step) -> tuple[list[int], list[int], list[int]]:
    """Token ids and positions of the packed batch, and the indices of the tokens whose logits are wanted."""
    ids = [each.output[-1] for each in step.decode]
    positions = [each.length - 1 for each in step.decode]
    ends = list(range(len(ids)))
    for chunk in step.chunks:
        stop = chunk.start + chunk.length
        ids += chunk.sample.tokens(chunk.start, stop)
        positions += range(chunk.start, stop)
        if chunk.last:
            ends.append(len(ids) - 1)
    return ids, positions, ends


def _rows(step: Step) -> list[int]:
    members = [*step.decode, *(chunk.sample for chunk in step.chunks)]
    return [each.handle.row for each in members if each.handle is not None]


def _shape(step: Step) -> BatchShape:
    ends = [chunk.start + chunk.length for chunk in step.chunks]
    return BatchShape(
        rows=_rows(step),
        q_lens=[1] * len(step.decode) + [chunk.length for chunk in step.chunks],
        kv_lens=[each.length for each in step.decode] + ends,
        num_decode=len(step.decode),
    )

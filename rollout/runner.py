"""Turns a scheduled step into tensors, runs the decoder, and samples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcache import MHATokenToKVPool, ReqToTokenPool
from kvcache.ops.dispatch import Impl
from rollout.model.config import ModelConfig
from rollout.model.decoder import DecoderWeights, forward
from rollout.model.rotary import RotaryTables
from rollout.ops.attention import BatchShape, paged_attention, plan_attention
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

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """fp32 logits [R, vocab]: a row for every decode sample, then one for every chunk that ends a prefill."""
        ids, positions, ends = _pack(step)
        slots = ([step.decode_slots] if step.decode else []) + [
            chunk.sample.slots[chunk.start : chunk.start + chunk.length] for chunk in step.chunks
        ]
        where = torch.cat(slots)
        plan = plan_attention(_shape(step), self._table.req_to_token, self._attention)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._pool.set_kv_buffer(layer, where, k, v)
            return paged_attention(q, *self._pool.get_kv_buffer(layer), plan, self._scale)

        on_device = [torch.tensor(each, dtype=torch.int64, device=self.device) for each in (ids, positions, ends)]
        return forward(self.config, self._weights, self._rotary, *on_device, attend=attend)

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
        tokens, logprobs = sample(logits, batch)
        return tokens.tolist(), logprobs.tolist()


def _pack(step: Step) -> tuple[list[int], list[int], list[int]]:
    """Token ids and positions of the packed batch, and the indices of the tokens whose logits are wanted."""
    ids = [each.tokens(each.length - 1, each.length)[0] for each in step.decode]
    positions = [each.length - 1 for each in step.decode]
    ends = list(range(len(ids)))
    for chunk in step.chunks:
        stop = chunk.start + chunk.length
        ids += chunk.sample.tokens(chunk.start, stop)
        positions += range(chunk.start, stop)
        if chunk.last:
            ends.append(len(ids) - 1)
    return ids, positions, ends


def _shape(step: Step) -> BatchShape:
    members = [*step.decode, *(chunk.sample for chunk in step.chunks)]
    rows = [each.handle.row for each in members if each.handle is not None]
    ends = [chunk.start + chunk.length for chunk in step.chunks]
    return BatchShape(
        rows=rows,
        q_lens=[1] * len(step.decode) + [chunk.length for chunk in step.chunks],
        kv_lens=[each.length for each in step.decode] + ends,
        num_decode=len(step.decode),
    )

"""Turn a scheduled step into tensors, run the decoder (as a CUDA graph if possible), and sample."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcache.allocators import Int64Array, to_device
from kvcache.tiers import HostTransfer
from memsaver import MemorySaver
from memsaver.graph_pool import GraphPool
from memsaver.system.devices import Impl, use_triton
from rollout.model.decoder import Decoder, ModelConfig
from rollout.model.mixers.base import AttentionPlan, Batch, LayerParts
from rollout.ops.low_rank import Choice
from rollout.ops.row_wise import linear, row_invariant_products
from rollout.ops.token_sampling import (
    HostResults,
    SamplingBatch,
    Sent,
    are_special,
    divisors,
    likeliest,
    sample,
    to_host,
)
from rollout.ops.torch_attention import BatchShape, plan_torch
from rollout.ops.triton_attention import TritonPlan, plan_decode, plan_triton
from rollout.parallel import TensorParallel
from rollout.running.graph_inputs import DecodeInputs, pack_decodes
from rollout.running.graphs import DecodeGraphs, PromptGraphs
from rollout.running.step_routing import RoutingRecorder
from rollout.scheduling.kv_cache import Cache
from rollout.scheduling.sample_rows import SampleRows
from rollout.scheduling.samples import Step
from rollout.tag_names import CUDA_GRAPH
from rollout.weights.adapters import AdapterPages
from rollout.weights.store import WeightStore

_TOLD_AT_ONCE = 32  # rows whose likeliest tokens are found together: fp32 copies of their logits
_Plan = Callable[[int | None, Tensor | None], AttentionPlan]
"""(window, mapping) -> where attention finds the tokens, see `plan_torch`."""


class _Replayed(NamedTuple):
    """A decode step that ran as a graph, which draws tokens without filters."""

    rows: Int64Array
    positions: Int64Array
    plain: bool  # whether no row was special when the rows were sent
    sent: Sent  # the graph's tokens


class ModelRunner:
    """The engine's computation: forward passes and sampling.

    Attributes:
        last_tokens: The last token of each row of the request table, int64 on the device. The next
            step continues from there, and need not wait until the host knows it.
        slots: The slot of each row's adapter, int64 on the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        store: WeightStore,
        cache: Cache,
        *,
        rows: SampleRows,
        attention: Impl,
        ranks: TensorParallel,
        adapters: AdapterPages | None = None,
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
            adapters=adapters,
        )
        self.decoder = Decoder(config, parts)
        self._cache, self._table = cache, cache.table
        self._window, self._sliding = cache.window, cache.sliding
        self._triton = use_triton(attention, self.device)
        self._rows = rows
        self.last_tokens = torch.zeros(self._table.size + 1, dtype=torch.int64, device=self.device)
        self._adapters, self.slots = adapters, torch.zeros_like(self.last_tokens)
        self._told_slots = np.zeros(len(self.slots), np.int64)  # what the device knows of `slots`
        self._replayed: _Replayed | None = None  # by the last forward
        self._states: Tensor | None = None  # hidden states of its tokens, if it was no replay
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.recorder: RoutingRecorder | None = None

    @property
    def capturable(self) -> bool:
        """Return whether steps can be captured as CUDA graphs."""
        layers = all(mixer.capturable for mixer in self.config.mixers)
        return self._triton and self._cache.capturable and layers

    def record_routing(self, tokens: int) -> None:
        """Record the experts of each step's tokens, at most `tokens`, in `recorder`.

        Call this before any capture.
        """
        self.recorder = RoutingRecorder(self.decoder.mlps, tokens, self.device)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], tokens: Sequence[int], saver: MemorySaver) -> None:
        """Capture CUDA graphs of steps.

        Args:
            sizes: Numbers of samples of decode steps.
            tokens: Numbers of tokens of steps with prompts; may be empty.
            saver: Saver on whose tag the graphs' memory lies.
        """
        config, dtype = self.config, self.decoder.lm_head.dtype
        self.ranks.stage_captures(config.vocab_size, dtype, self.device)
        pool = GraphPool(saver, CUDA_GRAPH)
        with row_invariant_products(self.device):
            if tokens:
                size = self._table.size, config.hidden_size
                self.prompt_graphs = PromptGraphs(self.compute, tokens, *size, dtype, pool)
            self.graphs = DecodeGraphs(self.decode, sizes, config.vocab_size, dtype, pool)

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Return the logits [R, vocab] of a step's decoding samples, then of its prefills that end.

        The logits are valid until the next call.
        """
        self._tell_last(step.rows[~self._rows.on_device[step.rows]])
        if self._adapters is not None:
            begun = np.array([chunk.sample.row for chunk in step.chunks], dtype=np.int64)
            self._tell_slots(np.concatenate([step.rows, begun]))
        last, self._replayed = self._replayed, None
        if self.graphs is not None and not step.chunks and len(step.rows) <= self.graphs.max_batch:
            _await(step.loads)
            return self._replay(self.graphs, step, last)
        ids, positions, ends, shape = _pack(step)
        graphs = self.prompt_graphs
        if graphs is not None and len(positions) <= graphs.max_tokens:
            _await(step.loads)
            hidden = self._states = graphs.replay(ids, positions, shape)
            return self._logits(hidden, to_device(ends, self.device))
        slots = [step.decode_slots] if step.decode else []
        slots += [chunk.slots for chunk in step.chunks]
        plan = plan_triton if self._triton else plan_torch
        parts = (ids, positions, ends, np.array(shape.rows))
        at = to_device(np.concatenate(parts), self.device).split([len(part) for part in parts])
        batch = self._batch(
            functools.partial(plan, shape, self._table.req_to_token),
            positions=at[1],
            slots=torch.cat(slots),
            rows=at[3],
            shape=shape,
            adapters=self._choice(np.repeat(shape.rows, shape.q_lens)),
            loads=step.loads,
        )
        tokens = torch.cat([self.last_tokens[at[3][: shape.num_decode]], at[0]])
        with row_invariant_products(self.device):
            hidden = self._states = self.decoder(tokens, batch)
        return self._logits(hidden, at[2])

    def _logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        with row_invariant_products(self.device):
            part = linear(hidden[at], self.decoder.lm_head)
        return self.ranks.join(part, self.config.vocab_size)

    def _replay(self, graphs: DecodeGraphs, step: Step, last: _Replayed | None) -> Tensor:
        """Return the logits of a decode step, which begins from the inputs that the last one left.

        The scheduler makes a new array for each change of the samples that decode.
        """
        rows, positions, count = step.rows, step.lengths - 1, len(step.rows)
        if last and last.rows is rows and np.array_equal(last.positions + 1, positions):
            logits, sent = graphs.replay(count, None)
            self._replayed = last._replace(positions=positions, sent=sent)
            return logits
        given = self._rows.sampling(rows)
        heat, greedy = divisors(given["temperature"])
        names = ("top_k", "top_p", "forced", "min_p", "adjusted")
        special = are_special(greedy, *(given[name] for name in names))
        size = graphs.padded(count)
        packed = pack_decodes(positions, rows, given["counters"], heat, greedy, size)
        logits, sent = graphs.replay(count, packed)
        self._replayed = _Replayed(rows, positions, not special.any(), sent)
        return logits

    def _tell_last(self, rows: Int64Array) -> None:
        """Send last tokens that the device has not chosen: of beams, and after a swap."""
        if len(rows):
            last = [self._rows.sample(row).output[-1] for row in rows.tolist()]
            places, tokens = to_device(np.stack([rows, np.array(last)]), self.device)
            self.last_tokens.index_copy_(0, places, tokens)

    def _tell_slots(self, rows: Int64Array) -> None:
        """Send the slots of rows that have new samples."""
        rows = rows[self._rows.slot[rows] != self._told_slots[rows]]
        if len(rows):
            places, slots = to_device(np.stack([rows, self._rows.slot[rows]]), self.device)
            self.slots.index_copy_(0, places, slots)
            self._told_slots[rows] = self._rows.slot[rows]

    def _choice(self, rows: Int64Array | Tensor) -> Choice | None:
        """Return the adapters of tokens of these rows."""
        if self._adapters is None:
            return None
        at = rows if isinstance(rows, Tensor) else to_device(rows, self.device)
        return Choice.of(self.slots[at], self._adapters.scales)

    def decode(self, inputs: DecodeInputs, logits: Tensor, results: HostResults) -> None:
        """Compute and draw the next token of each row from device tensors only, for a graph.

        `logits` [B, vocab] and `results` receive the logits and the tokens.
        """
        positions, rows, counters, temperature, greedy = inputs
        plan = plan_decode(rows, positions, self._table.req_to_token)
        hidden = self._hidden(self.last_tokens[rows], positions, rows, plan)
        head = self.decoder.lm_head
        if self.ranks.size == 1:
            linear(hidden, head, out=logits)
        else:
            logits.copy_(self.ranks.join(linear(hidden, head), self.config.vocab_size))
        sampling = SamplingBatch.plain(temperature, greedy, counters)
        drawn = sample(logits, sampling, choices=self.config.choices)
        results.add(*drawn, rows, self.last_tokens, positions, counters)

    def compute(self, tokens: Tensor, requests: Tensor, hidden: Tensor) -> None:
        """Compute decodes and parts of prompts from device tensors only, as a graph records it.

        `tokens` and `requests` are those of `pack_prompts`, and `hidden` [T, hidden] receives the
        hidden states.
        """
        (ids, positions, rows), most = tokens, requests.shape[1] // 2
        plan = TritonPlan(
            req_to_token=self._table.req_to_token,
            meta=requests.int(),
            num_decode=most,
            num_prefill=most,
            num_query_tokens=len(ids),
            padded=True,
        )
        known = torch.where(ids < 0, self.last_tokens[rows], ids)
        hidden.copy_(self._hidden(known, positions, rows, plan))

    def _hidden(self, ids: Tensor, positions: Tensor, rows: Tensor, plan: TritonPlan) -> Tensor:
        """Return the hidden states of tokens at `positions` of `rows`, of the request table."""
        batch = self._batch(
            lambda window, mapping: replace(plan, window=window, mapping=mapping),
            positions=positions,
            slots=plan.req_to_token[rows, positions].long(),
            rows=plan.meta[0],
            adapters=self._choice(rows),
        )
        return self.decoder(ids, batch)

    def _batch(self, plan: _Plan, **fields: Any) -> Batch:
        batch = Batch(plan=plan(self._window, None), **fields)
        if self._sliding is None:
            return batch
        window, mapping = self._sliding
        sliding = replace(batch, slots=mapping[batch.slots], plan=plan(window, mapping))
        return replace(batch, sliding=sliding)

    @torch.inference_mode()
    def sample(self, logits: Tensor, at: Int64Array, rows: Int64Array) -> Sent:
        """Start to draw the next token of each of `rows`, or to take a forced one, and score it.

        `logits` are the result of `forward`, and `at` has each row's place in them. Several rows
        may use the same place. The next step continues from these tokens.
        """
        replayed = self._replayed
        if replayed is not None and replayed.plain and replayed.rows is rows:
            self._rows.launched(rows)
            return replayed.sent
        given, changes = self._rows.sampling(rows), self._rows.adjustments(rows)
        sampling = SamplingBatch.build(**given, adjustments=changes, device=self.device)
        chosen = self._chosen(logits, at)
        tokens, logprobs = sample(chosen, sampling, choices=self.config.choices)
        self.last_tokens.index_copy_(0, to_device(rows, self.device), tokens)
        self._rows.launched(rows)
        return to_host(tokens, logprobs)

    @torch.inference_mode()
    def likeliest(self, logits: Tensor, at: Int64Array, rows: Int64Array) -> Sent:
        """Start to find the likeliest tokens at each place, as many as any of `rows` tells.

        Their log-probabilities are at the row's temperature, as those of the tokens of `sample`.
        """
        heat, choices = divisors(self._rows.temperatures(rows))[0], self.config.choices
        count, best = min(int(self._rows.top[rows].max()), choices), []
        for start in range(0, len(rows), _TOLD_AT_ONCE):
            part = slice(start, start + _TOLD_AT_ONCE)
            scale = torch.from_numpy(heat[part, None]).to(self.device)
            best.append(likeliest(self._chosen(logits, at[part]) / scale, count, choices))
        return to_host(*map(torch.cat, zip(*best, strict=True)))

    def take_states(self) -> Tensor | None:
        """Return the hidden states of the last forward's tokens, once; a decode graph has none."""
        states, self._states = self._states, None
        return states

    @torch.inference_mode()
    def score(self, states: Tensor, first: int, following: Sequence[int], count: int) -> Sent:
        """Start to score tokens of a prompt, which the last forward has computed.

        Args:
            states: Hidden states of all tokens of the step.
            first: Place of the token before them among all tokens of the step.
            following: The tokens.
            count: Number of likeliest tokens to add at each place.

        Returns:
            Tokens and log-probabilities [tokens, 1 + count], each token itself first.
        """
        own, parts = to_device(np.array(following), self.device), []
        count = min(count, self.config.choices)
        for start in range(0, len(following), _TOLD_AT_ONCE):
            tokens = own[start : start + _TOLD_AT_ONCE, None]
            at = torch.arange(len(tokens), device=self.device) + first + start
            logits = self._logits(states, at).float()
            best = likeliest(logits, count, self.config.choices)
            values = torch.log_softmax(logits, dim=-1).gather(1, tokens)
            parts.append((torch.cat([tokens, best[0]], 1), torch.cat([values, best[1]], 1)))
        return to_host(*map(torch.cat, zip(*parts, strict=True)))

    def wait(self) -> None:
        """Wait until all that was launched has been computed, and experts have arrived."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        if self.recorder is not None:
            self.recorder.arrive()

    @torch.inference_mode()
    def candidates(
        self, logits: Tensor, at: Int64Array, count: int
    ) -> list[list[tuple[int, float]]]:
        """Return the `count` likeliest (token, log-prob) pairs at each place, best first."""
        best = likeliest(self._chosen(logits, at), count, self.config.choices)
        chosen = zip(*(part.tolist() for part in to_host(*best).arrays()), strict=True)
        return [list(zip(ids, values, strict=True)) for ids, values in chosen]

    def _chosen(self, logits: Tensor, at: Int64Array) -> Tensor:
        if np.array_equal(at, np.arange(len(logits))):
            return logits
        return logits[to_device(at, self.device)]


def _await(loads: Sequence[HostTransfer]) -> None:
    """Make the current stream wait for copies, before a graph that reads all layers."""
    for load in loads:
        load.wait()


def _pack(step: Step) -> tuple[Int64Array, Int64Array, Int64Array, BatchShape]:
    """Pack a step into one batch.

    Return the ids of the chunks' tokens, the positions of all tokens, the indices of the tokens
    whose logits are needed, and the shape of the batch.
    """
    ids: list[int] = []
    kv_lens, decoding = step.lengths.tolist(), len(step.rows)
    positions, ends = (step.lengths - 1).tolist(), list(range(decoding))
    for chunk in step.chunks:
        stop = chunk.start + chunk.length
        ids += chunk.sample.tokens(chunk.start, stop)
        positions += range(chunk.start, stop)
        kv_lens.append(stop)
        if chunk.last:
            ends.append(len(positions) - 1)
    shape = BatchShape(
        rows=[*step.rows.tolist(), *(chunk.sample.row for chunk in step.chunks)],
        q_lens=[1] * decoding + [chunk.length for chunk in step.chunks],
        kv_lens=kv_lens,
        num_decode=decoding,
    )
    tokens, at, last = (np.array(part, dtype=np.int64) for part in (ids, positions, ends))
    return tokens, at, last, shape

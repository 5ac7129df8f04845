"""Sampling: counter-based random numbers and inverse-CDF selection, one row a sample.

The number drawn for a token depends on (seed, sample index, position) only, and every row is
computed on its own: batch, chunking and preemption do not change what a sample draws.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memsaver.common.hash import splitmix64
from memsaver.common.layout import round_up
from memsaver.common.machine import Impl, use_triton

_UNIFORM_BITS = 48  # short of double's 53, so that u * total stays below total
_ALIGNMENT = 16  # bytes, of every tensor in a packed transfer


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """Per row: temperature fp32 [R, 1] (1 where greedy), greedy bool [R], top_k int64 [R], top_p
    fp64 [R], counters int64 [R, 3] (seed, sample index, position). The flags say whether any row
    needs that step.
    """

    temperature: Tensor
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    counters: Tensor
    any_random: bool
    filtered_rows: Tensor | None

    @classmethod
    def build(
        cls,
        *,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        counters: Sequence[tuple[int, int, int]],
        device: torch.device,
    ) -> "SamplingBatch":
        greedy = [value == 0 for value in temperature]
        filtered = [
            i
            for i, (k, p) in enumerate(zip(top_k, top_p, strict=True))
            if (k or p < 1) and not greedy[i]
        ]
        host = [
            torch.tensor([value or 1.0 for value in temperature], dtype=torch.float32).unsqueeze(1),
            torch.tensor(greedy, dtype=torch.bool),
            torch.tensor(top_k, dtype=torch.int64),
            torch.tensor(top_p, dtype=torch.float64),
            torch.tensor(counters, dtype=torch.int64),
            torch.tensor(filtered, dtype=torch.int64),
        ]
        scale, is_greedy, k, p, counts, filtered_rows = _to_device(host, device)
        return cls(
            temperature=scale,
            greedy=is_greedy,
            top_k=k,
            top_p=p,
            counters=counts,
            any_random=not all(greedy),
            filtered_rows=filtered_rows if filtered else None,
        )

    def only_filtered(self, rows: Tensor) -> "SamplingBatch":
        """The batch of `rows`, int64 [F], all of them filtered."""
        return replace(
            self,
            temperature=self.temperature[rows],
            greedy=self.greedy[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            counters=self.counters[rows],
            filtered_rows=torch.arange(len(rows), device=rows.device),
        )


def _to_device(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Small CPU tensors on the device; on CUDA views of one buffer, by one transfer."""
    if device.type != "cuda":
        return [each.to(device) for each in tensors]
    staging = torch.empty(
        sum(_aligned_size(each) for each in tensors), dtype=torch.uint8, pin_memory=True
    )
    for view, each in zip(_views(staging, tensors), tensors, strict=True):
        view.copy_(each)
    return list(_views(staging.to(device, non_blocking=True), tensors))


def _aligned_size(tensor: Tensor) -> int:
    return round_up(tensor.nbytes, _ALIGNMENT)


def _views(buffer: Tensor, like: list[Tensor]) -> Iterator[Tensor]:
    """Consecutive parts of a uint8 buffer, with the dtypes and shapes of `like`."""
    start = 0
    for each in like:
        yield buffer[start : start + each.nbytes].view(each.dtype).view(each.shape)
        start += _aligned_size(each)


def uniform(counters: Tensor) -> Tensor:
    """fp64 [R] in [0, 1) from int64 counters [R, C]: a hash of the whole row."""
    state = splitmix64(counters[:, 0])
    for column in range(1, counters.shape[1]):
        state = splitmix64(state ^ counters[:, column])
    bits = (state >> (64 - _UNIFORM_BITS)) & ((1 << _UNIFORM_BITS) - 1)
    return bits.double() * 2.0**-_UNIFORM_BITS


def sample(logits: Tensor, batch: SamplingBatch, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """Tokens int64 [R] and their log-probabilities fp32 [R], on the device, from logits [R, vocab].

    logits: fp32, bf16 or fp16, converted to fp32 first; rows anywhere, elements of a row
    contiguous. Log-probability: log_softmax(logits / temperature)[token], before top-k and top-p;
    temperature 1 for greedy rows.
    """
    if not use_triton(impl, logits.device):
        return _sample_torch(logits, batch)
    from rollout.ops.sample_triton import sample_triton

    tokens, logprobs = sample_triton(logits, batch.temperature, batch.greedy, batch.counters)
    rows = batch.filtered_rows
    # the fused kernels know no filters; they do these rows too, to keep one grid for every batch
    if rows is not None:
        tokens[rows], logprobs[rows] = _sample_torch(logits[rows], batch.only_filtered(rows))
    return tokens, logprobs


def _sample_torch(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    logprobs = torch.log_softmax(logits / batch.temperature, dim=-1)
    tokens = logits.argmax(dim=-1)
    if batch.any_random:
        tokens = torch.where(batch.greedy, tokens, _draw(logprobs, batch))
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens, int64 [R, count], in order, and log-probabilities fp32."""
    logprobs, tokens = torch.log_softmax(logits.float(), dim=-1).topk(count, dim=-1)
    return tokens, logprobs


def _draw(logprobs: Tensor, batch: SamplingBatch) -> Tensor:
    """Inverse CDF in vocabulary order: the first token that takes the sum past u * total.

    A row with NaN gives any token of the vocabulary.
    """
    probs = logprobs.exp()
    if batch.filtered_rows is not None:
        rows = batch.filtered_rows
        probs[rows] = keep_top(probs[rows], batch.top_k[rows], batch.top_p[rows])
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform(batch.counters).unsqueeze(1) * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).squeeze(1).clamp_(max=cdf.shape[1] - 1)


def keep_top(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """probs [R, vocab] with 0 outside top-k, then outside top-p of the rest, not renormalised.

    top_k int64 [R], 0 is off. top_p fp64 [R]: the smallest set of likeliest tokens that reaches
    top_p of what top-k left; never empty. Among equal probabilities the lower token id goes first.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[-1]).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= limit, 0.0)
    mass = ordered.cumsum(dim=-1, dtype=torch.float64)
    before = mass - ordered
    ordered = ordered.masked_fill(before >= top_p.unsqueeze(1) * mass[:, -1:], 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ordered)

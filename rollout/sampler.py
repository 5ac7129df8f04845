"""Sampling: counter-based random numbers and inverse-CDF selection, one row a sample.

The number drawn for a token depends on (seed, sample index, position) only, and every row is computed on its own: the
batch a sample happens to be in, chunking and preemption do not change what it draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.ops.hash import splitmix64

_UNIFORM_BITS = 48  # short of double's 53, so that u * total stays below total


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """Per row: temperature fp32 [R, 1] (1 where greedy), greedy bool [R], top_k int64 [R], top_p fp64 [R],
    counters int64 [R, 3] (seed, sample index, position). The flags say whether any row needs that step."""

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
        filtered = [i for i, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if (k or p < 1) and not greedy[i]]
        return cls(
            temperature=torch.tensor([value or 1.0 for value in temperature], device=device).unsqueeze(1),
            greedy=torch.tensor(greedy, device=device),
            top_k=torch.tensor(top_k, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
            counters=torch.tensor(counters, dtype=torch.int64, device=device),
            any_random=not all(greedy),
            filtered_rows=torch.tensor(filtered, device=device) if filtered else None,
        )


def uniform(counters: Tensor) -> Tensor:
    """fp64 [R] in [0, 1) from int64 counters [R, C]: a hash of the whole row."""
    state = splitmix64(counters[:, 0])
    for column in range(1, counters.shape[1]):
        state = splitmix64(state ^ counters[:, column])
    bits = (state >> (64 - _UNIFORM_BITS)) & ((1 << _UNIFORM_BITS) - 1)
    return bits.double() * 2.0**-_UNIFORM_BITS


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Tokens int64 [R] and their log-probabilities fp32 [R] from fp32 logits [R, vocab].

    Log-probability: log_softmax(logits / temperature)[token], before top-k and top-p; temperature 1 for greedy rows.
    """
    logprobs = torch.log_softmax(logits / batch.temperature, dim=-1)
    tokens = logits.argmax(dim=-1)
    if batch.any_random:
        tokens = torch.where(batch.greedy, tokens, _draw(logprobs, batch))
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _draw(logprobs: Tensor, batch: SamplingBatch) -> Tensor:
    """Inverse CDF in vocabulary order: the first token whose cumulative probability exceeds u * total."""
    probs = logprobs.exp()
    if batch.filtered_rows is not None:
        rows = batch.filtered_rows
        probs[rows] = keep_top(probs[rows], batch.top_k[rows], batch.top_p[rows])
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform(batch.counters).unsqueeze(1) * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).squeeze(1)


def keep_top(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """probs [R, vocab] with everything outside top-k, then outside top-p of the rest, set to 0 (not renormalised).

    top_k int64 [R], 0 is off. top_p fp64 [R]: the smallest set of likeliest tokens that reaches top_p of what top-k
    left; never empty. Among equal probabilities the lower token id goes first.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[-1]).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= limit, 0.0)
    mass = ordered.cumsum(dim=-1, dtype=torch.float64)
    before = mass - ordered
    ordered = ordered.masked_fill(before >= top_p.unsqueeze(1) * mass[:, -1:], 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ordered)

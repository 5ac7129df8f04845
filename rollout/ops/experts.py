"""Chooses the experts of a token, and computes what they make of it: dispatch, and the torch
references.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memsaver.common.machine import Impl, use_triton
from rollout.ops.activation import silu_mul


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Says how a router's logits choose and weigh experts.

    normalise: a token's weights add up to 1 before they are multiplied by `scale`. sigmoid: scores
    are that of each logit; otherwise a softmax over all. groups: experts are in so many equal ones,
    of which the `top_groups` best count, each judged by the sum of its `judges` best scores.
    """

    top_k: int
    normalise: bool
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    judges: int = 1
    scale: float = 1.0

    def choose(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Experts int64 [T, top_k], best first, and their weights, fp32 [T, top_k], from a router's
        logits [T, E]. bias: fp32 [E], added to scores where experts are compared, not weighed.

        The choice is torch's, as in transformers: experts that are equally good are told apart
        alike. It launches work only, and never waits.
        """
        scores = self._scores(logits)
        compared = scores if bias is None else scores + bias
        if self.top_groups < self.groups:
            compared = self._in_best_groups(compared)
        found, ids = compared.topk(self.top_k, dim=-1)
        return ids, self._weights(found if compared is scores else scores.gather(-1, ids))

    def weigh(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Weights of experts that were chosen elsewhere: fp32 [T, top_k], as `choose` has them."""
        return self._weights(self._scores(logits).gather(-1, ids))

    def _scores(self, logits: Tensor) -> Tensor:
        if self.sigmoid:
            return logits.float().sigmoid()
        return torch.softmax(logits, dim=-1, dtype=torch.float32)

    def _weights(self, scores: Tensor) -> Tensor:
        if self.normalise:
            total = scores.sum(-1, keepdim=True)
            scores = scores / (total + 1e-20 if self.sigmoid else total)
        return scores if self.scale == 1 else scores * self.scale

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        grouped = scores.unflatten(-1, (self.groups, -1))
        judged = grouped.topk(self.judges, dim=-1).values.sum(-1)
        best = judged.topk(self.top_groups, dim=-1).indices
        out = torch.ones_like(judged, dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)


class Share(NamedTuple):
    """The experts that are held, of `total` ones: those from number `first` on."""

    first: int
    total: int


def mix_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    impl: Impl = "auto",
    share: Share | None = None,
) -> Tensor:
    """Sum of weights[t, j] * down[e] @ silu_mul(gate_up[e] @ x[t]), e = ids[t, j], over j.

    x: contiguous [T, H]. ids: int64 [T, k], no expert twice in a row. weights: [T, k], of x's dtype
    or fp32. gate_up: contiguous [E, 2I, H], gate rows first; down: contiguous [E, H, I], both of
    x's dtype. share: they are these of all experts, and pairs of others count 0; None: they are
    all. Returns contiguous [T, H] of x's dtype.

    Rounding points are those of transformers' `grouped_mm` and `batched_mm`: every product to x's
    dtype, the weighted one to the wider of both, the sum in fp32. By the kernels a token's result
    depends on no other token, and they launch the same work whatever `ids` says; the reference
    waits for them.
    """
    share = share or Share(0, len(down))
    if use_triton(impl, x.device):
        from rollout.ops.experts_triton import mix_experts_triton

        return mix_experts_triton(x, ids, weights, gate_up, down, *share)
    out = x.new_zeros((*ids.shape, x.shape[1]))
    for expert in set(ids.unique().tolist()) & {*range(share.first, share.first + len(down))}:
        token, choice = (ids == expert).nonzero(as_tuple=True)
        inner = silu_mul(F.linear(x[token], gate_up[expert - share.first]), "torch")
        out[token, choice] = F.linear(inner, down[expert - share.first])
    return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)

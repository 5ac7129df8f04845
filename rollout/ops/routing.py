"""Selection of a token's experts from a router's logits, in torch or Triton.

In both, the bits of a token do not depend on the other tokens of a call. Experts with equal scores
are ordered by id, which `torch.topk` does not promise.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from memsaver.system.devices import Impl, use_triton
from rollout.ops.row_wise import accurate_exp

_ROUTED = 4  # tokens of a program that selects experts


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Selection and weights of experts from a router's logits.

    Experts form `groups` equal groups. A token's experts are selected from the `top_groups` groups
    with the best scores; the score of a group is the sum of its `judges` best scores.
    """

    top_k: int  # experts per token
    normalise: bool  # divide a token's weights by their sum before `scale` multiplies them
    sigmoid: bool = False  # scores are sigmoids of the logits; otherwise a softmax over all logits
    groups: int = 1
    top_groups: int = 1
    judges: int = 1
    scale: float = 1.0  # factor of the weights

    def choose(
        self, logits: Tensor, bias: Tensor | None = None, impl: Impl = "auto"
    ) -> tuple[Tensor, Tensor]:
        """Select experts and compute their weights from a router's logits [T, E].

        `bias`, fp32 [E], is added to the scores that select experts, not to their weights. Experts
        are ordered by score, descending, then by id. The method only launches work and never
        synchronizes.

        Returns:
            Experts int64 [T, top_k], best first, and their weights fp32 [T, top_k].
        """
        compared = None
        if bias is not None or self.top_groups < self.groups:
            compared = self._compared(logits, bias)
        if use_triton(impl, logits.device):
            return self._choose_triton(logits, compared)
        scores = self._scores(logits)
        ids = _highest(scores if compared is None else compared, self.top_k)
        return ids, self._weights(scores.gather(-1, ids))

    def weigh(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Compute the fp32 weights of experts `ids`, int64 [T, top_k], as `choose` does."""
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

    def _compared(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Return scores with the bias, -inf outside of the best groups, fp32 [T, E]."""
        scores = self._scores(logits)
        scores = scores if bias is None else scores + bias
        if self.top_groups == self.groups:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        judged = grouped.topk(self.judges, dim=-1).values.sum(-1)
        out = torch.ones_like(judged, dtype=torch.bool)
        out = out.scatter(-1, _highest(judged, self.top_groups), False)
        return grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)

    def _choose_triton(self, logits: Tensor, compared: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens, experts = logits.shape
        ids = torch.empty((tokens, self.top_k), dtype=torch.int64, device=logits.device)
        weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        if tokens:
            logits = logits.contiguous()
            with torch.cuda.device_of(logits):
                _choose[(triton.cdiv(tokens, _ROUTED),)](
                    logits, logits if compared is None else compared, ids, weights, tokens, experts,
                    float(self.scale), COMPARED=compared is not None, SIGMOID=self.sigmoid,
                    NORMALISE=self.normalise, TOP_K=self.top_k, ROWS=_ROUTED,
                    EXPERTS=triton.next_power_of_2(experts),
                    CHOICES=triton.next_power_of_2(self.top_k), enable_fp_fusion=False,
                )  # fmt: skip
        return ids, weights


def _highest(scores: Tensor, count: int) -> Tensor:
    """Return the places of the `count` highest scores of each row, best first, then by place."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


@triton.jit(do_not_specialize=["tokens"])
def _choose(  # type: ignore[no-untyped-def]
    logits, compared, ids, weights, tokens, experts, scale, COMPARED: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Select experts by `compared`, or by their scores, and weight them. Programs: (ROWS tokens).

    See `Routing.choose`. If a logit is NaN, ids are only sure to be in range.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (token < tokens)[:, None]
    token = tl.minimum(token, tokens - 1).to(tl.int64)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    real = expert < experts
    logit = tl.load(logits + token * experts + expert, mask=real, other=0.0).to(tl.float32)
    if SIGMOID:
        score = tl.div_rn(1.0, 1.0 + accurate_exp(-logit))
    else:
        top = tl.max(tl.where(real, logit, float("-inf")), 1)
        power = tl.where(real, accurate_exp(logit - top[:, None]), 0.0)
        score = tl.div_rn(power, tl.sum(power, 1)[:, None] + tl.zeros_like(power))
    left = score
    if COMPARED:
        left = tl.load(compared + token * experts + expert, mask=real, other=0.0)
    left = tl.where(real, left, float("-inf"))
    choice = tl.arange(0, CHOICES)[None, :]
    chosen = tl.zeros((ROWS, CHOICES), tl.int64)
    weight = tl.zeros((ROWS, CHOICES), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for number in tl.static_range(TOP_K):
        value, best = tl.max(left, 1, return_indices=True)  # of equal scores, the lowest index
        mine = expert == best[:, None]
        if COMPARED:
            value = tl.sum(tl.where(mine, score, 0.0), 1)
        total += value
        here = choice == number
        chosen = tl.where(here, tl.minimum(best, experts - 1).to(tl.int64)[:, None], chosen)
        weight = tl.where(here, value[:, None], weight)
        left = tl.where(mine, float("-inf"), left)
    if NORMALISE:
        if SIGMOID:
            total += 1e-20
        weight = tl.div_rn(weight, total[:, None] + tl.zeros_like(weight))
    stored = inside & (choice < TOP_K)
    tl.store(ids + token * TOP_K + choice, chosen, mask=stored)
    tl.store(weights + token * TOP_K + choice, weight * scale, mask=stored)

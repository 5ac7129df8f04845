"""Chooses the experts of a token, and computes what they make of it: dispatch, and the torch
references.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from memsaver.common.dispatch import Impl, use_triton
from rollout.ops.activation import silu_mul


def top_experts(logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Experts int64 [T, top_k], likeliest first, and their probabilities, fp32 [T, top_k], from a
    router's logits [T, E]. normalise: these add up to 1.

    The choice is torch's, as in transformers: experts that are equally likely are told apart alike.
    It launches work only, and never waits.
    """
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    weights, ids = scores.topk(top_k, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True) if normalise else weights


def mix_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, impl: Impl = "auto"
) -> Tensor:
    """Sum of weights[t, j] * down[e] @ silu_mul(gate_up[e] @ x[t]), e = ids[t, j], over j.

    x: contiguous [T, H]. ids: int64 [T, k], no expert twice in a row. weights: [T, k], of x's dtype
    or fp32. gate_up: contiguous [E, 2I, H], gate rows first; down: contiguous [E, H, I], both of
    x's dtype. Returns contiguous [T, H] of x's dtype.

    Rounding points are those of transformers' `grouped_mm` and `batched_mm`: every product to x's
    dtype, the weighted one to the wider of both, the sum in fp32. By the kernels a token's result
    depends on no other token, and they launch the same work whatever `ids` says; the reference
    waits for them.
    """
    if use_triton(impl, x.device):
        from rollout.ops.experts_triton import mix_experts_triton

        return mix_experts_triton(x, ids, weights, gate_up, down)
    out = x.new_zeros((*ids.shape, x.shape[1]))
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        inner = silu_mul(F.linear(x[token], gate_up[expert]), "torch")
        out[token, choice] = F.linear(inner, down[expert])
    return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)

"""Tokens to their experts and back, and the experts' gated activation, each with its gradient.

The products between them are torch's. What surrounds those moves more bytes than they do in
transformers' own forward; here every row of a pair is written once a step of the way, and a token's
gradient is the sum of its pairs' by their places, without sorting or atomics.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memsaver.common.machine import Impl, use_triton
from rollout.ops.norm_and_activation import silu_mul


class Pairs(NamedTuple):
    """Holds the pairs of T tokens and their k choices in the order of their experts.

    number: int64 [T * k], the pair (token * k + choice) in each place. place: int64 [T, k], of each
    pair. ends: int32 [experts], the place after each expert's last.
    """

    number: Tensor
    place: Tensor
    ends: Tensor


def sort_pairs(ids: Tensor, experts: int) -> Pairs:
    """Sorts pairs by expert, tokens in order, without waiting. ids: int64 [T, k] < `experts`."""
    ordered, number = ids.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=ids.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    place = torch.empty_like(number)
    place.scatter_(0, number, torch.arange(len(number), device=ids.device))
    return Pairs(number, place.view(ids.shape), ends)


def spread(x: Tensor, pairs: Pairs, impl: Impl = "auto") -> Tensor:
    """Returns [T * k, H]: the token of each place. x: [T, H]."""
    out: Tensor = _Spread.apply(x, pairs, impl)
    return out


def combine(y: Tensor, weights: Tensor, pairs: Pairs, impl: Impl = "auto") -> Tensor:
    """Returns [T, H]: the sum of each token's rows of `y`, weighed.

    y: [T * k, H], by place. weights: [T, k], of y's dtype or fp32. The weighed row is rounded to
    the wider of both dtypes, the sum computed in fp32 and rounded to y's, as transformers does.
    """
    out: Tensor = _Combine.apply(y, weights, pairs, impl)
    return out


def silu_gate(gate_up: Tensor, impl: Impl = "auto") -> Tensor:
    """Returns silu(gate) * up, [S, I], factors rounded. gate_up: contiguous [S, 2I], gate first."""
    out: Tensor = _SiluGate.apply(gate_up, impl)
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Pairs, impl: Impl) -> Tensor:
        ctx.save_for_backward(pairs.place)
        ctx.impl = impl
        return x.index_select(0, pairs.number // pairs.place.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return token_sum(grad.contiguous(), *ctx.saved_tensors, None, ctx.impl), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, pairs: Pairs, impl: Impl) -> Tensor:
        ctx.save_for_backward(y, weights, pairs.number)
        ctx.impl = impl
        return token_sum(y, pairs.place, weights, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *pair_gradients(grad.contiguous(), *ctx.saved_tensors, ctx.impl), None, None


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, impl: Impl) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.impl = impl
        return gated(gate_up, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gated_gradient(grad.contiguous(), *ctx.saved_tensors, ctx.impl), None


# Operations of torch's own registry, as in token_scores.py: the planner's tensors without memory
# pass them as a kernel that makes what it returns. All inputs are contiguous.


@torch.library.custom_op("trainer_bridge::token_sum", mutates_args=())
def token_sum(y: Tensor, place: Tensor, weights: Tensor | None, impl: str = "auto") -> Tensor:
    """Returns [T, H]: row t is the sum of rows place[t] of `y`, times weights[t] where there are
    any; rounded as `combine` says.
    """
    if use_triton(impl, y.device):  # type: ignore[arg-type]
        from trainer_bridge.ops.experts_triton import token_sum_triton

        return token_sum_triton(y, place, weights)
    rows = y[place]
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    return rows.sum(1).to(y.dtype)


@token_sum.register_fake
def _(y: Tensor, place: Tensor, *_: Any) -> Tensor:
    return y.new_empty((len(place), y.shape[1]))


@torch.library.custom_op("trainer_bridge::pair_gradients", mutates_args=())
def pair_gradients(
    grad: Tensor, y: Tensor, weights: Tensor, number: Tensor, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of y and weights, like these, from that of `combine`, [T, H]."""
    if use_triton(impl, y.device):  # type: ignore[arg-type]
        from trainer_bridge.ops.experts_triton import pair_gradients_triton

        return pair_gradients_triton(grad, y, weights, number)
    rows = grad[number // weights.shape[1]].to(torch.promote_types(y.dtype, torch.float32))
    of_weights = torch.empty_like(weights)
    of_weights.view(-1)[number] = (rows * y).sum(-1).to(weights.dtype)
    return (rows * weights.flatten()[number].unsqueeze(-1)).to(y.dtype), of_weights


@pair_gradients.register_fake
def _(grad: Tensor, y: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(weights)


@torch.library.custom_op("trainer_bridge::gated", mutates_args=())
def gated(gate_up: Tensor, impl: str = "auto") -> Tensor:
    """Returns what `silu_gate` does."""
    return silu_mul(gate_up, impl)  # type: ignore[arg-type]


@gated.register_fake
def _(gate_up: Tensor, *_: Any) -> Tensor:
    return gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))


@torch.library.custom_op("trainer_bridge::gated_gradient", mutates_args=())
def gated_gradient(grad: Tensor, gate_up: Tensor, impl: str = "auto") -> Tensor:
    """Returns the gradient of gate_up from that of `silu_gate`, computed in fp32, rounded once."""
    if use_triton(impl, gate_up.device):  # type: ignore[arg-type]
        from trainer_bridge.ops.experts_triton import gated_gradient_triton

        return gated_gradient_triton(grad, gate_up)
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    (gate, up), grad = gate_up.to(wide).chunk(2, dim=-1), grad.to(wide)
    share = gate.sigmoid()
    of_gate = grad * up * share * (1 + gate * (1 - share))
    return torch.cat([of_gate, grad * gate * share], dim=-1).to(gate_up.dtype)


@gated_gradient.register_fake
def _(grad: Tensor, gate_up: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(gate_up)

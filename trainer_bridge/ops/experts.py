"""Dispatch of tokens to experts and back, with gradients.

A pair is a token and one of the experts chosen for it. torch computes the matrix products. In
transformers' forward the operations around the products move more bytes than the products. Here
each of these operations writes the row of a pair once, and a token's gradient is summed over the
places of its pairs, without sorting or atomics.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from memsaver.system.devices import Impl, use_triton
from trainer_bridge.ops.operation import operation, warps

_BLOCK = 2048  # elements of a row per iteration


class ExpertRows(NamedTuple):
    """The pairs of T tokens and their k choices, sorted by expert."""

    number: Tensor  # int64 [T * k], the pair (token * k + choice) at each place
    place: Tensor  # int64 [T, k], the place of each pair
    ends: Tensor  # int32 [experts], the place after each expert's last pair


def sort_pairs(ids: Tensor, experts: int) -> ExpertRows:
    """Sort pairs of int64 `ids` [T, k] by expert, then by token, without host synchronization."""
    ordered, number = ids.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=ids.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    place = torch.empty_like(number)
    place.scatter_(0, number, torch.arange(len(number), device=ids.device))
    return ExpertRows(number, place.view(ids.shape), ends)


def spread(x: Tensor, pairs: ExpertRows, impl: Impl = "auto") -> Tensor:
    """Copy rows [T, H] of tokens to the places of their pairs, [T * k, H]."""
    return _Spread.apply(x, pairs, impl)


def combine(y: Tensor, weights: Tensor, pairs: ExpertRows, impl: Impl = "auto") -> Tensor:
    """Compute the weighted sum, [T, H] of y's dtype, of each token's rows.

    `y` is [T * k, H], rows of pairs by place. `weights` are [T, k], of y's dtype or fp32. As in
    transformers, a weighted row is rounded to the wider of both dtypes, and the sum is computed in
    fp32 and rounded to the dtype of `y`.
    """
    return _Combine.apply(y, weights, pairs, impl)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: ExpertRows, impl: Impl) -> Tensor:
        ctx.save_for_backward(pairs.place)
        ctx.impl = impl
        return x.index_select(0, pairs.number // pairs.place.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return token_sum(grad.contiguous(), *ctx.saved_tensors, None, ctx.impl), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, pairs: ExpertRows, impl: Impl) -> Tensor:
        ctx.save_for_backward(y, weights, pairs.number)
        ctx.impl = impl
        return token_sum(y, pairs.place, weights, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *pair_gradients(grad.contiguous(), *ctx.saved_tensors, ctx.impl), None, None


# All inputs of these operations are contiguous.


@operation(lambda y, place, *_: y.new_empty((len(place), y.shape[1])))
def token_sum(y: Tensor, place: Tensor, weights: Tensor | None, impl: str = "auto") -> Tensor:
    """Sum the rows place[t] of `y` for each token t, weighted if `weights` is given; see `combine`.

    `y` is [T * k, H], rows of pairs by place. `place` and `weights` are [T, k]. The sums are
    [T, H], of y's dtype.
    """
    if use_triton(impl, y.device):  # type: ignore[arg-type]
        (tokens, top_k), hidden = place.shape, y.shape[1]
        assert y.is_contiguous() and place.is_contiguous()
        assert weights is None or weights.is_contiguous()
        out = y.new_empty((tokens, hidden))
        rounded = weights is not None and torch.promote_types(weights.dtype, y.dtype) == y.dtype
        block = min(_BLOCK, triton.next_power_of_2(hidden))
        with torch.cuda.device_of(y):
            _token_sum[(tokens, triton.cdiv(hidden, block))](
                y, y if weights is None else weights, place, out, hidden, TOP_K=top_k,
                WEIGHED=weights is not None, ROUNDED=rounded, BLOCK=block, num_warps=warps(block),
                enable_fp_fusion=False,
            )  # fmt: skip
        return out
    rows = y[place]
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    return rows.sum(1).to(y.dtype)


@operation(lambda grad, y, weights, *_: (torch.empty_like(y), torch.empty_like(weights)))
def pair_gradients(
    grad: Tensor, y: Tensor, weights: Tensor, number: Tensor, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `y` and `weights` from `grad`, [T, H], that of `combine`."""
    if use_triton(impl, y.device):  # type: ignore[arg-type]
        assert all(tensor.is_contiguous() for tensor in (grad, y, weights, number))
        grad_y, grad_weights = torch.empty_like(y), torch.empty_like(weights)
        block = min(_BLOCK, triton.next_power_of_2(y.shape[1]))
        with torch.cuda.device_of(y):
            _pair_gradients[(len(y),)](
                grad, y, weights, number, grad_y, grad_weights, y.shape[1],
                TOP_K=weights.shape[1], BLOCK=block, num_warps=warps(block),
            )  # fmt: skip
        return grad_y, grad_weights
    rows = grad[number // weights.shape[1]].to(torch.promote_types(y.dtype, torch.float32))
    grad_weights = torch.empty_like(weights)
    grad_weights.view(-1)[number] = (rows * y).sum(-1).to(weights.dtype)
    return (rows * weights.flatten()[number].unsqueeze(-1)).to(y.dtype), grad_weights


@triton.jit
def _token_sum(  # type: ignore[no-untyped-def]
    y, weights, place, out, hidden, TOP_K: tl.constexpr, WEIGHED: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a token's rows, as program (token, block of the hidden size)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + choice)
        term = tl.load(y + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHED:
            term *= tl.load(weights + token * TOP_K + choice).to(tl.float32)
            if ROUNDED:
                term = term.to(out.dtype.element_ty).to(tl.float32)
        total += term
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pair_gradients(  # type: ignore[no-untyped-def]
    grad, y, weights, number, grad_y, grad_weights, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute both gradients of one pair, as program (place)."""
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(number + place)
    source = grad + pair // TOP_K * hidden
    weight = tl.load(weights + pair).to(tl.float32)
    total = 0.0
    for first in range(0, hidden, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < hidden
        slope = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        row = tl.load(y + place * hidden + column, mask=inside, other=0.0).to(tl.float32)
        gradient = (slope * weight).to(grad_y.dtype.element_ty)
        tl.store(grad_y + place * hidden + column, gradient, mask=inside)
        total += tl.sum(slope * row, 0)
    tl.store(grad_weights + pair, total)

"""Triton kernels around the products of experts in training: each row is read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # elements of a row at a time


def token_sum_triton(y: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """Same contract as `token_sum`."""
    (tokens, top_k), hidden = place.shape, y.shape[1]
    assert y.is_contiguous() and place.is_contiguous()
    assert weights is None or weights.is_contiguous()
    out = y.new_empty((tokens, hidden))
    rounded = weights is not None and torch.promote_types(weights.dtype, y.dtype) == y.dtype
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    with torch.cuda.device_of(y):
        _token_sum[(tokens, triton.cdiv(hidden, block))](
            y, y if weights is None else weights, place, out, hidden, TOP_K=top_k,
            WEIGHED=weights is not None, ROUNDED=rounded, BLOCK=block, num_warps=_warps(block),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def pair_gradients_triton(
    grad: Tensor, y: Tensor, weights: Tensor, number: Tensor
) -> tuple[Tensor, Tensor]:
    """Same contract as `pair_gradients`."""
    assert all(each.is_contiguous() for each in (grad, y, weights, number))
    of_rows, of_weights = torch.empty_like(y), torch.empty_like(weights)
    block = min(_BLOCK, triton.next_power_of_2(y.shape[1]))
    with torch.cuda.device_of(y):
        _pair_gradients[(len(y),)](
            grad, y, weights, number, of_rows, of_weights, y.shape[1],
            TOP_K=weights.shape[1], BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return of_rows, of_weights


def gated_gradient_triton(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Same contract as `gated_gradient`."""
    rows, inner = grad.shape
    assert grad.is_contiguous() and gate_up.is_contiguous()
    out = torch.empty_like(gate_up)
    block = min(_BLOCK, triton.next_power_of_2(inner))
    with torch.cuda.device_of(gate_up):
        _gated_gradient[(rows, triton.cdiv(inner, block))](
            grad, gate_up, out, inner, BLOCK=block, num_warps=_warps(block)
        )
    return out


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


@triton.jit
def _token_sum(  # type: ignore[no-untyped-def]
    y, weights, place, out, hidden, TOP_K: tl.constexpr, WEIGHED: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, block of the hidden size)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + choice)
        each = tl.load(y + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHED:
            each *= tl.load(weights + token * TOP_K + choice).to(tl.float32)
            if ROUNDED:
                each = each.to(out.dtype.element_ty).to(tl.float32)
        total += each
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pair_gradients(  # type: ignore[no-untyped-def]
    grad, y, weights, number, of_rows, of_weights, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Program: a place."""
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
        made = (slope * weight).to(of_rows.dtype.element_ty)
        tl.store(of_rows + place * hidden + column, made, mask=inside)
        total += tl.sum(slope * row, 0)
    tl.store(of_weights + pair, total)


@triton.jit
def _gated_gradient(grad, gate_up, out, inner, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (row, block of the inner size)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    slope = tl.load(grad + row * inner + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + 2 * row * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * inner + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.div_rn(1.0, 1.0 + tl.exp(-gate))
    of_gate = slope * up * share * (1.0 + gate * (1.0 - share))
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + 2 * row * inner + column, of_gate.to(dtype), mask=inside)
    tl.store(out + (2 * row + 1) * inner + column, (slope * gate * share).to(dtype), mask=inside)

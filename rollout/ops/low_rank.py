"""Products with low-rank adapters, one for each token, in torch or Triton.

A token of slot s gets y + scale[s] * B[s] (A[s] x), and a token of slot 0 gets y alone. A x and
B (A x) are rounded to the dtype of the model, as by layers that are computed one after the other.
The bits of a token do not depend on the other tokens of a call.

The Triton path sorts tokens by slot (`sort_pairs`), so that a program computes a block of tokens of
one slot. The inner dimension of A x is divided into spans of `SPAN`, whose sums are added in order:
few tokens would otherwise occupy few multiprocessors. No launch depends on the slots, so a CUDA
graph can replay them with others.
"""

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from memsaver.system.devices import Impl, use_triton
from rollout.ops.experts import Pairs, sort_pairs
from rollout.ops.row_wise import linear

SPAN = 1024  # inner elements of A x that one program adds up


class Factors(NamedTuple):
    """The adapters of a product in all slots.

    A product of several parts, such as queries, keys and values, has an adapter for each of them.
    """

    a: Tensor  # [slots, parts * rank, K]; a slot is contiguous
    b: Tensor  # [slots, N, rank]; a slot is contiguous
    ends: tuple[int, ...]  # the end of each part among the N outputs, at most 3

    @property
    def rank(self) -> int:
        """Return the rank of the slots."""
        return self.b.shape[2]


class Choice(NamedTuple):
    """The adapters of the tokens of a forward pass."""

    slots: Tensor  # int64 [T]; 0: none
    scales: Tensor  # fp32 [1 + slots]
    pairs: Pairs | None  # tokens sorted by slot, for Triton
    rows: int  # tokens of a block

    @classmethod
    def of(cls, slots: Tensor, scales: Tensor, impl: Impl = "auto") -> Self:
        """Prepare the choice of all products of a pass.

        Args:
            slots: int64 [T].
            scales: fp32 [1 + slots].
            impl: Implementation; "auto" uses Triton on a GPU.
        """
        rows = _rows(len(slots))
        if not use_triton(impl, slots.device) or not len(slots):
            return cls(slots, scales, None, rows)
        with torch.cuda.device_of(slots):
            pairs = sort_pairs(slots.unsqueeze(1).contiguous(), len(scales) - 1, rows, base=1)
        return cls(slots, scales, pairs, rows)

    @classmethod
    def of_all(cls, tokens: int, scale: float, device: torch.device) -> Self:
        """Prepare the choice of the only slot for all tokens, for Triton.

        Args:
            tokens: Number of tokens.
            scale: Factor of the slot.
            device: Device of the tokens.
        """
        rows, numbers = _rows(tokens), torch.arange(tokens, dtype=torch.int32, device=device)
        first = numbers[::rows]
        blocks = torch.stack([torch.zeros_like(first), first, torch.full_like(first, tokens)])
        slots = torch.ones(tokens, dtype=torch.int64, device=device)
        scales = torch.full((2,), scale, device=device)
        return cls(slots, scales, Pairs(numbers, blocks), rows)


def _rows(tokens: int) -> int:
    """Return the tokens of a block."""
    return 16 if tokens <= 512 else 64


def low_rank(x: Tensor, factors: Factors, choice: Choice) -> Tensor | None:
    """Compute A x of each token with an adapter, for `add_low_rank`.

    Args:
        x: Contiguous [T, K].
        factors: The adapters of the product.
        choice: The adapters of the tokens.

    Returns:
        Its parts fp32 [spans, T, parts * rank], undefined for tokens without adapter; None for the
        torch path, which needs none.
    """
    if choice.pairs is None:
        return None
    assert x.is_contiguous()
    (tokens, depth), width = x.shape, factors.a.shape[1]
    spans, most = triton.cdiv(depth, SPAN), choice.pairs.blocks.shape[1]
    wide = x.dtype == torch.float32 or not x.is_cuda
    low = torch.empty((spans, tokens, width), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _shrink[(most, triton.cdiv(width, 32), spans)](
            x, factors.a, low, *choice.pairs, most, tokens, depth, width, factors.a.stride(0),
            SPAN=SPAN, BLOCK_M=choice.rows, BLOCK_N=32, BLOCK_K=32 if wide else 128, WIDE=wide,
            enable_fp_fusion=wide, num_warps=4,
        )  # fmt: skip
    return low


def add_low_rank(
    out: Tensor, x: Tensor, low: Tensor | None, factors: Factors, choice: Choice
) -> Tensor:
    """Add the adapters of each token to the results of a product, in place.

    Args:
        out: Contiguous [T, N].
        x: Contiguous [T, K] of the same dtype.
        low: Result of `low_rank`.
        factors: The adapters of the product.
        choice: The adapters of the tokens.

    Returns:
        `out`.
    """
    if low is None or choice.pairs is None:
        return _add_in_torch(out, x, factors, choice)
    assert out.is_contiguous()
    (spans, tokens, width), most = low.shape, choice.pairs.blocks.shape[1]
    ends = (*factors.ends, *factors.ends[-1:] * 2)[:3]
    starts = (0, *ends[:2])
    tiles = sum(triton.cdiv(end - start, 64) for start, end in zip(starts, ends, strict=True))
    with torch.cuda.device_of(x):
        _expand[(most, tiles)](
            low, factors.b, out, choice.scales, *choice.pairs, most, tokens, out.shape[1],
            factors.b.stride(0), *ends, WIDTH=width, RANK=factors.rank, SPLITS=spans,
            BLOCK_M=choice.rows, BLOCK_N=64, BLOCK_R=max(16, triton.next_power_of_2(factors.rank)),
            WIDE=x.dtype == torch.float32 or not x.is_cuda, enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip
    return out


def _add_in_torch(out: Tensor, x: Tensor, factors: Factors, choice: Choice) -> Tensor:
    for slot in sorted(set(choice.slots.tolist()) - {0}):
        tokens = (choice.slots == slot).nonzero().flatten()
        scale, start = float(choice.scales[slot]), 0
        downs = factors.a[slot - 1].split(factors.rank)
        for down, end in zip(downs, factors.ends, strict=True):
            product = linear(linear(x[tokens], down), factors.b[slot - 1, start:end])
            part = out[:, start:end]
            part[tokens] = add_scaled(part[tokens], product, scale)
            start = end
    return out


def add_scaled(out: Tensor, product: Tensor, scale: float) -> Tensor:
    """Return out + scale * product, computed in fp32 and rounded once."""
    return (out.float() + product.float() * scale).to(out.dtype)


@triton.jit
def _tokens(order, first, end, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tokens of a block, int64 [BLOCK_M], and which of them are its own.

    Lanes past the end repeat the last token, and are not stored.
    """
    row = first + tl.arange(0, BLOCK_M)
    return tl.load(order + tl.minimum(row, end - 1)).to(tl.int64), row < end


@triton.jit(do_not_specialize=["most", "tokens"])
def _shrink(  # type: ignore[no-untyped-def]
    x, a, low, order, blocks, most, tokens, depth, width, stride_slot, SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the part of A x of a span of the inner dimension, fp32.

    Programs: (block of tokens, columns of A x, span).
    """
    block, span = tl.program_id(0), tl.program_id(2)
    first, end = tl.load(blocks + most + block), tl.load(blocks + 2 * most + block)
    if first >= end:
        return
    token, inside = _tokens(order, first, end, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = span * SPAN + tl.arange(0, BLOCK_K)
    left = x + token[:, None] * depth + k[None, :]
    right = a + tl.load(blocks + block).to(tl.int64) * stride_slot + k[:, None]
    right += tl.minimum(column, width - 1)[None, :] * depth
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, SPAN, BLOCK_K):
        here = k < depth - start
        value = tl.load(left, mask=here[None, :], other=0.0)
        weight = tl.load(right, mask=here[:, None], other=0.0)
        if WIDE:
            value, weight = value.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(value, weight, total, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K
    to = low + (span.to(tl.int64) * tokens + token)[:, None] * width + column[None, :]
    tl.store(to, total, mask=inside[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["most", "tokens"])
def _expand(  # type: ignore[no-untyped-def]
    low, b, out, scales, order, blocks, most, tokens, columns, stride_slot, end_0, end_1, end_2,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add scale * B (A x) to `out`. Programs: (block of tokens, columns of one part)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(blocks + most + block), tl.load(blocks + 2 * most + block)
    if first >= end:
        return
    token, inside = _tokens(order, first, end, BLOCK_M)
    slot = tl.load(blocks + block).to(tl.int64)
    tiles_0, tiles_1 = tl.cdiv(end_0, BLOCK_N), tl.cdiv(end_1 - end_0, BLOCK_N)
    past_0, past_1 = tile >= tiles_0, tile >= tiles_0 + tiles_1
    part = past_0.to(tl.int32) + past_1.to(tl.int32)
    start = tl.where(past_1, end_1, tl.where(past_0, end_0, 0))
    stop = tl.where(past_1, end_2, tl.where(past_0, end_1, end_0))
    tile -= tl.where(past_1, tiles_0 + tiles_1, tl.where(past_0, tiles_0, 0))
    column = start + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_R)
    here = k < RANK
    value = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for split in tl.static_range(SPLITS):
        at = low + (token + split * tokens)[:, None] * WIDTH + (part * RANK + k)[None, :]
        value += tl.load(at, mask=here[None, :], other=0.0)
    at = b + slot * stride_slot + tl.minimum(column, stop - 1)[None, :] * RANK + k[:, None]
    weight = tl.load(at, mask=here[:, None], other=0.0)
    dtype = out.dtype.element_ty
    rounded = value.to(dtype)
    if WIDE:
        rounded, weight = rounded.to(tl.float32), weight.to(tl.float32)
    product = tl.dot(rounded, weight, input_precision="ieee").to(dtype).to(tl.float32)
    to = out + token[:, None] * columns + column[None, :]
    mask = inside[:, None] & (column < stop)[None, :]
    plain = tl.load(to, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales + 1 + slot)
    tl.store(to, (plain + scale * product).to(dtype), mask=mask)

"""Triton reductions over a slice of the vocabulary, and its gradient; logits are read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # words of a program at a time


def reduce_logits_triton(logits: Tensor, target: Tensor, start: int, temperature: float) -> Tensor:
    """Same contract as `reduce_logits`."""
    rows, words = logits.shape
    assert logits.stride(1) == 1 and target.is_contiguous()
    out = torch.empty((4, rows), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _reduce[(rows,)](
            logits, target, out, logits.stride(0), rows, words, start, temperature, **_cut(words)
        )
    return out


def logits_to_gradient_triton(
    logits: Tensor, target: Tensor, norm: Tensor, grad: Tensor, start: int, temperature: float
) -> None:
    """Same contract as `logits_to_gradient`."""
    rows, words = logits.shape
    assert logits.stride(1) == 1
    assert target.is_contiguous() and norm.is_contiguous() and grad.is_contiguous()
    how = _cut(words)
    with torch.cuda.device_of(logits):
        _to_gradient[(rows, triton.cdiv(words, how["BLOCK"]))](
            logits, target, norm, grad, logits.stride(0), words, start, temperature, **how
        )


def compile_scores(dtype: torch.dtype, vocabulary: int, gradient: bool) -> None:
    """Compiles a kernel for whole slices of a vocabulary: the gradient's, or that of the sums."""
    words = min(vocabulary, _BLOCK)
    numbers, how = (words, 0, 1.0), {**_cut(words), "grid": (1, 1)}
    if gradient:
        _to_gradient.warmup(
            dtype, torch.int64, torch.float32, torch.float32, words, *numbers, **how
        )
    else:
        _reduce.warmup(dtype, torch.int64, torch.float32, words, 1, *numbers, **how)


def _cut(words: int) -> dict[str, int]:
    """Returns compile-time arguments for rows of so many words."""
    block = min(_BLOCK, triton.next_power_of_2(words))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}


@triton.jit(do_not_specialize=["rows", "start", "temperature"])
def _reduce(  # type: ignore[no-untyped-def]
    logits, target, out, stride, rows, words, start, temperature, BLOCK: tl.constexpr
):
    """Program: a row. The sums so far are multiplied when a block has a larger maximum."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    # Below every logit, and finite: the difference to the first maximum is no NaN.
    peak, mass, fall = -1e38, 0.0, 0.0
    for first in range(0, words, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < words
        z = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.div_rn(z, temperature)
        top = tl.maximum(peak, tl.max(tl.where(inside, z, -1e38), 0))
        share = tl.exp(peak - top)
        fall = share * (fall + (top - peak) * mass)
        mass *= share
        power = tl.where(inside, tl.exp(z - top), 0.0)
        mass += tl.sum(power, 0)
        fall += tl.sum(power * (top - z), 0)
        peak = top
    word = tl.load(target + row) - start
    there = (word >= 0) & (word < words)
    chosen = tl.load(source + word, mask=there, other=float("-inf")).to(tl.float32)
    tl.store(out + row, peak)
    tl.store(out + rows + row, mass)
    tl.store(out + 2 * rows + row, fall)
    tl.store(out + 3 * rows + row, tl.div_rn(chosen, temperature))


@triton.jit(do_not_specialize=["start", "temperature"])
def _to_gradient(  # type: ignore[no-untyped-def]
    logits, target, norm, grad, stride, words, start, temperature, BLOCK: tl.constexpr
):
    """Program (row, block of words)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = logits + row * stride + at, at < words
    z = tl.div_rn(tl.load(place, mask=inside, other=0.0).to(tl.float32), temperature)
    hit = tl.where(at == tl.load(target + row) - start, 1.0, 0.0)
    slope = (hit - tl.exp(z - tl.load(norm + row))) * tl.div_rn(tl.load(grad + row), temperature)
    tl.store(place, slope.to(logits.dtype.element_ty), mask=inside)

"""The operations of a decoder layer around its products, with gradients, a kernel each.

Norm, gated activation and rotation move more bytes than they compute. transformers writes them in
five to ten operations of torch, each of which reads and writes all tokens. Forward has the engine's
bits, here and in an exact trainer. A gradient is computed in fp32 and rounded once, and its bits do
not depend on the device.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from memsaver.system.devices import Impl, use_triton
from rollout.ops.row_wise import rms_norm as engine_rms_norm
from rollout.ops.row_wise import silu_mul
from trainer_bridge.ops.operation import operation, warps

_BLOCK = 2048  # elements of a row per iteration
_TILE = 4096  # elements per iteration of a program with several rows
_PROGRAMS = 1024  # that share the rows of a norm; constant, for sums in one order on every device


def rms_norm(x: Tensor, weight: Tensor, eps: float, impl: Impl = "auto") -> Tensor:
    """Compute weight * x / rms(x) over the last dimension of x [..., H], in its dtype."""
    return _RMSNorm.apply(x, weight, eps, impl)


def silu_gate(gate: Tensor, up: Tensor | None = None, impl: Impl = "auto") -> Tensor:
    """Compute silu(gate) * up, [..., I], rounding both factors.

    Both are contiguous [..., I]; or `gate` is contiguous [..., 2 * I] and holds both, gate first.
    """
    return _SiluGate.apply(gate, up, impl)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of elements, D / 2 apart, of queries and keys.

    Args:
        q: Queries [B, heads, T, D]; the elements of a head are contiguous.
        k: Keys [B, key heads, T, D], likewise.
        cos: Cosines by position, [1 or B, T, D], of the same dtype.
        sin: Sines, likewise.
        impl: Implementation to use.

    Returns:
        Both rotated, in the memory of contiguous [B, T, heads, D]. Products are rounded before they
        are added, as in transformers.
    """
    return _Rotate.apply(q, k, cos, sin, impl)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, impl: Impl) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = eps, impl
        return normed(x, weight, eps, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *norm_gradients(grad.contiguous(), x.contiguous(), weight, *ctx.how), None, None


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, impl: Impl) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.impl = impl
        halves = _halves(gate, up)
        return gated(*halves, impl).view(*gate.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        halves = _halves(gate, up)
        both = gated_gradient(grad.contiguous().view(halves[0].shape), *halves, ctx.impl)
        if up is None:
            return both.view(gate.shape), None, None
        return *(half.view(gate.shape) for half in both.chunk(2, dim=-1)), None


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, ...]:
    """Return gate and up, each [S, I], as views."""
    rows = gate.flatten(0, -2)
    return rows.chunk(2, dim=-1) if up is None else (rows, up.flatten(0, -2))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, impl: Impl
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.impl = impl
        return rotated(q, cos, sin, False, impl), rotated(k, cos, sin, False, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tables = ctx.saved_tensors  # a recomputed layer unpacks them once
        return *(rotated(grad, *tables, True, ctx.impl) for grad in grads), None, None, None


@operation(lambda x, *_: x.new_empty(x.shape))
def normed(x: Tensor, weight: Tensor, eps: float, impl: str = "auto") -> Tensor:
    """Compute `rms_norm` without recording a gradient."""
    return engine_rms_norm(x, weight, eps, impl)  # type: ignore[arg-type]


@operation(lambda grad, x, weight, *_: (torch.empty_like(x), torch.empty_like(weight)))
def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and weight from that of `rms_norm`; `grad` and x are contiguous.

    With n = x / rms(x), they are (g - n * mean(g * n)) / rms(x), where g = grad * weight, and the
    sum of grad * n over all rows.
    """
    if use_triton(impl, x.device):  # type: ignore[arg-type]
        size = x.shape[-1]
        rows, block = x.numel() // size, triton.next_power_of_2(size)
        per_program = max(1, _TILE // block)
        programs = max(1, min(_PROGRAMS, triton.cdiv(rows, per_program)))
        out, sums = torch.empty_like(x), x.new_empty((programs, size), dtype=torch.float32)
        with torch.cuda.device_of(x):
            _norm_gradients[(programs,)](
                grad, x, weight, out, sums, eps, rows, SIZE=size, BLOCK=block, ROWS=per_program,
                num_warps=min(16, max(1, block * per_program // 1024)),
            )  # fmt: skip
        return out, sums.sum(0).to(weight.dtype)
    wide, slope = x.float(), grad.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wide = wide * scale
    to_weight = (slope * wide).flatten(0, -2).sum(0).to(weight.dtype)
    slope = slope * weight
    return (scale * (slope - wide * (slope * wide).mean(-1, keepdim=True))).to(x.dtype), to_weight


@operation(lambda gate, *_: gate.new_empty(gate.shape))
def gated(gate: Tensor, up: Tensor, impl: str = "auto") -> Tensor:
    """Compute `silu_gate` of gate and up, [S, I] with equal strides, without a gradient."""
    return silu_mul(gate, up, impl)  # type: ignore[arg-type]


@operation(lambda grad, *_: grad.new_empty((len(grad), 2 * grad.shape[1])))
def gated_gradient(grad: Tensor, gate: Tensor, up: Tensor, impl: str = "auto") -> Tensor:
    """Compute the gradients of gate and up side by side, [S, 2 * I], from that of `silu_gate`."""
    if use_triton(impl, gate.device):  # type: ignore[arg-type]
        rows, inner = grad.shape
        assert grad.is_contiguous() and gate.stride() == up.stride() and gate.stride(1) == 1
        out = gate.new_empty((rows, 2 * inner))
        block = min(_BLOCK, triton.next_power_of_2(inner))
        with torch.cuda.device_of(gate):
            _gated_gradient[(rows, triton.cdiv(inner, block))](
                grad, gate, up, out, inner, gate.stride(0), BLOCK=block,
                num_warps=warps(block),
            )  # fmt: skip
        return out
    wide = torch.promote_types(gate.dtype, torch.float32)
    to, up, grad = gate.to(wide), up.to(wide), grad.to(wide)
    share = to.sigmoid()
    grad_gate = grad * up * share * (1 + to * (1 - share))
    return torch.cat([grad_gate, grad * to * share], dim=-1).to(gate.dtype)


@operation(lambda x, *_: _rotated_like(x))
def rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool, impl: str = "auto") -> Tensor:
    """Compute `rotate` of queries or keys; with `back`, their gradient from that of the result."""
    if use_triton(impl, x.device):  # type: ignore[arg-type]
        x = x if x.stride(-1) == 1 else x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        (batch, heads, tokens, width), out = x.shape, _rotated_like(x)
        block = triton.next_power_of_2(width // 2)
        together = min(triton.next_power_of_2(heads), max(1, _TILE // block))
        with torch.cuda.device_of(x):
            _rotate[(batch * tokens, triton.cdiv(heads, together))](
                x, cos, sin, out, heads, tokens, *x.stride()[:3], tokens if len(cos) > 1 else 0,
                HALF=width // 2, BLOCK=block, HEADS=together, BACK=back,
                num_warps=warps(block * together), enable_fp_fusion=False,
            )  # fmt: skip
        return out
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = (x * sin if back else x).chunk(2, dim=-1)
    turned = torch.cat([second, -first] if back else [-second, first], dim=-1)
    return _rotated_like(x).copy_(x * cos + (turned if back else turned * sin))


def _rotated_like(x: Tensor) -> Tensor:
    batch, heads, tokens, width = x.shape
    return x.new_empty((batch, tokens, heads, width)).transpose(1, 2)


@triton.jit(do_not_specialize=["rows"])
def _norm_gradients(  # type: ignore[no-untyped-def]
    grad, x, weight, out, sums, eps, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of every so many ROWS rows, as program (first of the ROWS rows)."""
    program, column = tl.program_id(0), tl.arange(0, BLOCK)
    whole = column < SIZE
    gain = tl.load(weight + column, mask=whole, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & whole[None, :]
        at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) * (1.0 / SIZE) + eps)
        scale = tl.where(row < rows, scale, 0.0)[:, None]  # infinite past the end if eps is 0
        value *= scale
        total += slope * value
        slope *= gain[None, :]
        mean = tl.sum(slope * value, 1)[:, None] * (1.0 / SIZE)
        tl.store(out + at, (scale * (slope - value * mean)).to(out.dtype.element_ty), mask=inside)
    tl.store(sums + program * SIZE + column, tl.sum(total, 0), mask=whole)


@triton.jit
def _gated_gradient(  # type: ignore[no-untyped-def]
    grad, gates, ups, out, inner, stride, BLOCK: tl.constexpr
):
    """Compute the gradients of gate and up, as program (row, block of the inner size)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    slope = tl.load(grad + row * inner + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.div_rn(1.0, 1.0 + tl.exp(-gate))
    grad_gate = slope * up * share * (1.0 + gate * (1.0 - share))
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + 2 * row * inner + column, grad_gate.to(dtype), mask=inside)
    tl.store(out + (2 * row + 1) * inner + column, (slope * gate * share).to(dtype), mask=inside)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, out, heads, tokens, stride_batch, stride_head, stride_token, batch_positions,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads, as program (sequence and token, block of heads)."""
    place = tl.program_id(0).to(tl.int64)
    batch, token = place // tokens, place % tokens
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    whole = column < HALF
    inside = (head < heads)[:, None] & whole[None, :]
    at = x + batch * stride_batch + token * stride_token
    at += head[:, None] * stride_head + column[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    entry = (batch * batch_positions + token) * 2 * HALF + column
    cos_first = tl.load(cos + entry, mask=whole, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + entry + HALF, mask=whole, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + entry, mask=whole, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + entry + HALF, mask=whole, other=0.0).to(tl.float32)[None, :]
    if BACK:
        to_first, to_second = sin_second, -sin_first
    else:
        to_first, to_second = -sin_first, sin_second
    dtype: tl.constexpr = out.dtype.element_ty
    low = _rounded(first * cos_first, dtype) + _rounded(second * to_first, dtype)
    high = _rounded(second * cos_second, dtype) + _rounded(first * to_second, dtype)
    to = out + (place * heads + head[:, None]) * 2 * HALF + column[None, :]
    tl.store(to, low.to(dtype), mask=inside)
    tl.store(to + HALF, high.to(dtype), mask=inside)


@triton.jit
def _rounded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return x.to(dtype).to(tl.float32)

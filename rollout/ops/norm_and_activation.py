"""RMS norm, alone and with the residual addition before it, and the MLP's gated activation, each
with its torch reference and Triton kernel.

The norm's rounding points are transformers': fp32 until the weight, then the model dtype. The
Triton kernel rounds at the same places; only the order of its sum of squares differs; a program
takes one wide row, or several short ones (attention heads), in one pass. zero_centred: the gain is
1 + weight, and in fp32, as Qwen3-Next has it.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from memsaver.system.devices import Impl, use_triton

_TILE = 1024  # elements of a program's tile, unless one row is longer
_BLOCK = 1024


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, impl: Impl = "auto", *, zero_centred: bool = False
) -> Tensor:
    """weight * x / rms(x) over the last dimension: x [..., H], weight [H] of x's dtype ->
    contiguous [..., H].

    The last dimension of x is contiguous; rows of a matrix and heads of a [T, heads, H] view lie
    anywhere.
    """
    if use_triton(impl, x.device):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(x, x, weight, out, out, eps, add=False, zero_centred=zero_centred)
        return out
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1 + weight.float())).to(x.dtype) if zero_centred else weight * wide.to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    impl: Impl = "auto",
    *,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [..., H]; the sum is rounded to the model dtype
    before its norm.
    """
    if use_triton(impl, x.device):
        assert x.shape == residual.shape and x.dtype == residual.dtype
        out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        _launch(x, residual, weight, out, total, eps, add=True, zero_centred=zero_centred)
        return out, total
    residual = x + residual
    return rms_norm(residual, weight, eps, "torch", zero_centred=zero_centred), residual


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    *,
    add: bool,
    zero_centred: bool,
) -> None:
    """residual and total are unused unless `add`."""
    assert weight.dtype == x.dtype and weight.is_contiguous()
    size = x.shape[-1]
    x, residual = (each if each.dim() == 3 else each.reshape(-1, 1, size) for each in (x, residual))
    assert x.stride(2) == residual.stride(2) == 1, "the elements of a row must be contiguous"
    heads, rows = x.shape[1], x.shape[0] * x.shape[1]
    block = triton.next_power_of_2(size)
    per_program = max(1, _TILE // block)
    with torch.cuda.device_of(out):
        _rms_norm[(triton.cdiv(rows, per_program),)](
            x, residual, weight, out, total, eps, rows, heads,
            x.stride(0), x.stride(1), residual.stride(0), residual.stride(1),
            SIZE=size, BLOCK=block, ROWS=per_program, ADD=add, ZERO_CENTRED=zero_centred,
            num_warps=min(16, max(1, block * per_program // 256)), enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, out, total, eps, rows, heads,
    stride_x, stride_x_head, stride_residual, stride_residual_head, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    """Program: rows [ROWS * id, ROWS * (id + 1)) of the flattened leading dimensions."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    token, head = (row // heads).to(tl.int64), row % heads
    to = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    dtype = out.dtype.element_ty

    source = x + (token * stride_x + head * stride_x_head)[:, None] + column[None, :]
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        source = (
            residual
            + (token * stride_residual + head * stride_residual_head)[:, None]
            + column[None, :]
        )
        rounded = (value + tl.load(source, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + to, rounded, mask=inside)
        value = rounded.to(tl.float32)
    # times 1 / SIZE, as torch.mean does on a GPU
    scale = tl.rsqrt(tl.sum(value * value, 1) * (1.0 / SIZE) + eps)
    normed = value * scale[:, None]
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        gain += 1.0
    else:
        normed = normed.to(dtype).to(tl.float32)
    tl.store(out + to, (gain[None, :] * normed).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor, impl: Impl = "auto") -> Tensor:
    """silu(gate) * up: [T, 2I], gate first, rows anywhere, elements of a row contiguous ->
    contiguous [T, I].

    silu is computed in fp32 and rounded to the model dtype before the product, as transformers
    does.
    """
    if not use_triton(impl, gate_up.device):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    tokens, width = gate_up.shape
    assert width % 2 == 0 and gate_up.stride(1) == 1
    out = torch.empty((tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_BLOCK, triton.next_power_of_2(width // 2))
    with torch.cuda.device_of(out):
        _silu_mul[(tokens, triton.cdiv(width // 2, block))](
            gate_up, out, gate_up.stride(0), width // 2, BLOCK=block, enable_fp_fusion=False
        )
    return out


@triton.jit
def _silu_mul(gate_up, out, stride, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (token, block of the intermediate size)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, gated(gate, up, out.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate, up, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) * up of fp32 values, both factors and the product rounded to `dtype`."""
    silu = tl.div_rn(gate, 1.0 + _exp(-gate)).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    """e**x of fp32 x to 2 ulp. tl.exp is off by |x| / 2 ulp: it rounds x * log2(e) before the
    power.

    x = n * ln(2) + rest, with ln(2) in two parts of which the first has so few bits that n times it
    is exact. The result is 0 below -87 (where it would be subnormal soon) and infinite above 88.
    """
    low, high = x < -87.0, x > 88.0
    safe = tl.where(low | high, 0.0, x)
    n = tl.floor(safe * 1.4426950408889634 + 0.5)
    rest = (safe - n * 0.693145751953125) - n * 1.4286068203094172e-06
    power = tl.exp2(rest * 1.4426950408889634) * tl.exp2(n)
    return tl.where(low, 0.0, tl.where(high, float("inf"), power))

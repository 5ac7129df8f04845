"""silu(gate) * up in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """Same contract as `silu_mul`."""
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

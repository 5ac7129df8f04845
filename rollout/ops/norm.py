"""RMS norm, alone and with the residual addition before it: dispatch, and the torch reference.

The rounding points are transformers': fp32 until the weight, then the model dtype. The Triton
kernel rounds at the same places; only the order of its sum of squares differs. zero_centred: the
gain is 1 + weight, and in fp32, as Qwen3-Next has it.
"""

import torch
from torch import Tensor

from memsaver.common.machine import Impl, use_triton


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, impl: Impl = "auto", *, zero_centred: bool = False
) -> Tensor:
    """weight * x / rms(x) over the last dimension: x [..., H], weight [H] of x's dtype ->
    contiguous [..., H].

    The last dimension of x is contiguous; rows of a matrix and heads of a [T, heads, H] view lie
    anywhere.
    """
    if use_triton(impl, x.device):
        from rollout.ops.norm_triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps, zero_centred)
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
        from rollout.ops.norm_triton import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps, zero_centred)
    residual = x + residual
    return rms_norm(residual, weight, eps, "torch", zero_centred=zero_centred), residual

"""RMS norm in Triton: a program takes one wide row, or several short ones (attention heads), in one
pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # elements of a program's tile, unless one row is longer


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """Same contract as `rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, out, out, eps, add=False, zero_centred=zero_centred)
    return out


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    """Same contract as `add_rms_norm`."""
    assert x.shape == residual.shape and x.dtype == residual.dtype
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, out, total, eps, add=True, zero_centred=zero_centred)
    return out, total


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

"""Writes key and value rows of new tokens into their slots: dispatch, and the torch reference.

k `[n, H, D]` and v `[n, H, Dv]` may have any strides and are never modified; buffers `[N, H, D]`
need a contiguous last dimension, so a slice of a wider row will do. loc is int64 `[n]`, all on one
device. Slots are not range-checked on a GPU (that would synchronise); a slot named twice holds any
of its rows afterwards. K and V go in one launch.
"""

from collections.abc import Sequence

import torch

from kvcache.ops.quant import quantise_fp4, quantise_fp8
from memsaver.common.machine import Impl, use_triton

# Rows are moved as integers of the element's width: bit-exact, whatever a NaN carries.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def set_kv_buffer(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    loc: torch.Tensor,
    impl: Impl = "auto",
) -> None:
    """`k_buffer[loc[i]] = k[i]` and `v_buffer[loc[i]] = v[i]` for every i, bit for bit."""
    if loc.shape[0] == 0:
        return
    k, k_buffer = _as_bits(k, k_buffer)
    v, v_buffer = _as_bits(v, v_buffer)
    if use_triton(impl, k_buffer.device):
        from kvcache.ops.kv_write_triton import set_triton

        set_triton(k, v, k_buffer, v_buffer, loc)
    else:
        k_buffer[loc] = k
        v_buffer[loc] = v


def set_rows(
    rows: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor, impl: Impl = "auto"
) -> None:
    """`buffer[loc[i]] = rows[i]`, bit for bit, where there is one row a token."""
    set_kv_buffer(rows, rows[..., :0], buffer, buffer[..., :0], loc, impl)


def set_kv_buffer_fp8(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    loc: torch.Tensor,
    inverse_scales: torch.Tensor,
    dtype: torch.dtype,
    impl: Impl = "auto",
) -> None:
    """The rows times `inverse_scales` (fp32 `[2]`, of k and of v) as fp8 `dtype`, saturated, into
    uint8 buffers.

    k and v: float32, float16 or bfloat16. See `quant.py` for the rounding.
    """
    if loc.shape[0] == 0:
        return
    if use_triton(impl, k_buffer.device):
        from kvcache.ops.kv_write_triton import set_triton

        set_triton(k, v, k_buffer, v_buffer, loc, inverse_scales, dtype)
    else:
        k_buffer[loc] = quantise_fp8(k, inverse_scales[0], dtype).view(torch.uint8)
        v_buffer[loc] = quantise_fp8(v, inverse_scales[1], dtype).view(torch.uint8)


def set_kv_buffer_fp4(
    k: torch.Tensor,
    v: torch.Tensor,
    k_parts: Sequence[torch.Tensor],
    v_parts: Sequence[torch.Tensor],
    loc: torch.Tensor,
    impl: Impl = "auto",
) -> None:
    """The rows as FP4 into `*_parts`: codes `[N, H, D / 2]`, block scales `[N, H, D / 16]`, uint8.

    k and v: float32, float16 or bfloat16; D, Dv: multiples of 16. See `quant.py` for the rounding.
    """
    if loc.shape[0] == 0:
        return
    if use_triton(impl, loc.device):
        from kvcache.ops.kv_write_triton import set_fp4_triton

        set_fp4_triton(k, v, k_parts, v_parts, loc)
        return
    for rows, parts in ((k, k_parts), (v, v_parts)):
        for part, values in zip(parts, quantise_fp4(rows), strict=True):
            part[loc] = values


def _as_bits(rows: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert rows.dtype.itemsize == buffer.dtype.itemsize, (
        f"{rows.dtype} rows for a {buffer.dtype} buffer"
    )
    bits = _BITS[rows.dtype.itemsize]
    return rows.view(bits), buffer.view(bits)

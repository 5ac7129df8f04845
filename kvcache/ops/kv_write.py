"""Writes of new tokens' keys and values to pool slots, and moves of slots, in Triton or torch.

k `[n, H, D]` and v `[n, H, Dv]` may have any strides and are never modified. Buffers `[N, H, D]`
need a contiguous last dimension, so a slice of a wider row is allowed. loc is int64 `[n]`; all
tensors are on one device. Slots are not range-checked on a GPU, because that would synchronize. If
a slot is listed twice, it contains either of its rows afterwards. One launch writes K and V, with
one program per token and chunk of its row.

A move copies a row directly to its target. Only rows whose own slot is also a target are staged
first.
"""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcache.config import FP4_BLOCK
from kvcache.ops.quant import (
    FP4_WARPS,
    encode_fp4,
    encode_fp8,
    fp4_scale,
    quantise_fp4,
    quantise_fp8,
    saturate,
)
from memsaver.system.devices import Impl, use_triton

# Rows are copied as integers of the element's width, which preserves the bits of a NaN.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_BLOCK = 1024
_TILE = 1024  # words per program of `_move_kernel`
_STAGED_AT_ONCE = 16  # rows per program of `_stage_kernel`
_FP8 = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}  # mantissa bits, exponent bias


def set_kv_buffer(
    k: Tensor, v: Tensor, k_buffer: Tensor, v_buffer: Tensor, loc: Tensor, impl: Impl = "auto"
) -> None:
    """Write `k_buffer[loc[i]] = k[i]` and `v_buffer[loc[i]] = v[i]` for every i, bit-exact."""
    if loc.shape[0] == 0:
        return
    k, k_buffer = _as_bits(k, k_buffer)
    v, v_buffer = _as_bits(v, v_buffer)
    if use_triton(impl, k_buffer.device):
        _set_triton(k, v, k_buffer, v_buffer, loc)
    else:
        k_buffer[loc] = k
        v_buffer[loc] = v


def set_rows(rows: Tensor, buffer: Tensor, loc: Tensor, impl: Impl = "auto") -> None:
    """Write `buffer[loc[i]] = rows[i]` for every i, bit-exact."""
    set_kv_buffer(rows, rows[..., :0], buffer, buffer[..., :0], loc, impl)


def set_kv_buffer_fp8(
    k: Tensor,
    v: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    loc: Tensor,
    inverse_scales: Tensor,
    dtype: torch.dtype,
    impl: Impl = "auto",
) -> None:
    """Quantize rows to fp8 and write them to uint8 buffers; `quant.py` defines the rounding.

    k and v are float32, float16 or bfloat16, and `inverse_scales` are their factors, fp32 `[2]` on
    the device. Values beyond the range of `dtype`, the stored fp8 dtype, saturate.
    """
    if loc.shape[0] == 0:
        return
    if use_triton(impl, k_buffer.device):
        _set_triton(k, v, k_buffer, v_buffer, loc, inverse_scales, dtype)
    else:
        k_buffer[loc] = quantise_fp8(k, inverse_scales[0], dtype).view(torch.uint8)
        v_buffer[loc] = quantise_fp8(v, inverse_scales[1], dtype).view(torch.uint8)


def set_kv_buffer_fp4(
    k: Tensor,
    v: Tensor,
    k_parts: Sequence[Tensor],
    v_parts: Sequence[Tensor],
    loc: Tensor,
    impl: Impl = "auto",
) -> None:
    """Quantize rows to FP4 and write codes and block scales; `quant.py` defines the rounding.

    k and v are float32, float16 or bfloat16, with D and Dv multiples of 16. `k_parts` are codes
    uint8 `[N, H, D / 2]` and block scales uint8 `[N, H, D / 16]`, and `v_parts` the same for v.
    """
    if loc.shape[0] == 0:
        return
    if not use_triton(impl, loc.device):
        for rows, parts in ((k, k_parts), (v, v_parts)):
            for part, values in zip(parts, quantise_fp4(rows), strict=True):
                part[loc] = values
        return
    all_parts = (*k_parts, *v_parts)
    assert all(part.stride(2) == 1 for part in all_parts), "the rows of a buffer have gaps"
    n, heads, k_dim = k.shape
    v_dim = v.shape[2]
    widest = heads * max(k_dim, v_dim) // FP4_BLOCK
    blocks = min(_MAX_BLOCK // FP4_BLOCK, triton.next_power_of_2(widest))
    with torch.cuda.device_of(k):
        _set_fp4_kernel[(n, triton.cdiv(widest, blocks))](
            k, v, *all_parts, loc, loc.stride(0), *k.stride(), *v.stride(),
            *itertools.chain.from_iterable(part.stride()[:2] for part in all_parts),
            HEADS=heads, K_DIM=k_dim, V_DIM=v_dim, BLOCKS=blocks, num_warps=FP4_WARPS,
        )  # fmt: skip


def move_rows(parts: Sequence[Tensor], tgt: Tensor, src: Tensor, impl: Impl = "auto") -> None:
    """Move rows, `part[:, tgt[i]] = part[:, src[i]]`, reading all rows before writing any.

    The parts are integer tensors `[L, N, W]` with equal L and N and a contiguous last dimension;
    tgt and src are int64 `[n]` on their device. The function does not synchronize.
    """
    if tgt.shape[0] == 0:
        return
    if not use_triton(impl, tgt.device):
        for part in parts:
            part[:, tgt] = part[:, src]
        return
    count, (layers, slots) = tgt.shape[0], parts[0].shape[:2]
    written = torch.zeros(slots, dtype=torch.uint8, device=tgt.device).index_fill_(0, tgt, 1)
    for part in parts:
        assert part.shape[:2] == (layers, slots), "parts differ in layers or slots"
        assert part.stride(2) == 1, "rows are not contiguous"
        width = part.shape[2]
        staged = torch.empty((count, layers, width), dtype=part.dtype, device=part.device)
        block = min(_MAX_BLOCK, triton.next_power_of_2(width))
        rows = min(_TILE // block, triton.next_power_of_2(count))
        strides = (src.stride(0), *part.stride()[:2])
        sizes = {"WIDTH": width, "BLOCK": block}
        with torch.cuda.device_of(part):
            _stage_kernel[(triton.cdiv(count, _STAGED_AT_ONCE),)](
                part, staged, written, src, count, *strides,
                LAYERS=layers, ROWS=_STAGED_AT_ONCE, **sizes,
            )  # fmt: skip
            _move_kernel[(triton.cdiv(count, rows), layers)](
                part, staged, written, tgt, src, count, tgt.stride(0), *strides, ROWS=rows, **sizes
            )


def _as_bits(rows: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    same = rows.dtype.itemsize == buffer.dtype.itemsize
    assert same, f"{rows.dtype} rows for a {buffer.dtype} buffer"
    bits = _BITS[rows.dtype.itemsize]
    return rows.view(bits), buffer.view(bits)


def _set_triton(
    k: Tensor,
    v: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    loc: Tensor,
    inverse_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write rows unchanged, or as fp8 `dtype` if inverse scales are given."""
    assert k_buffer.stride(2) == v_buffer.stride(2) == 1, "the rows of a buffer have gaps"
    n, heads, k_dim = k.shape
    v_dim = v.shape[2]
    mantissa, bias = (0, 0) if dtype is None else _FP8[dtype]
    widest = heads * max(k_dim, v_dim)
    block = min(_MAX_BLOCK, triton.next_power_of_2(widest))
    with torch.cuda.device_of(k_buffer):
        _set_kernel[(n, triton.cdiv(widest, block))](
            k, v, k_buffer, v_buffer, loc, inverse_scales, loc.stride(0), *k.stride(), *v.stride(),
            *k_buffer.stride()[:2], *v_buffer.stride()[:2],
            HEADS=heads, K_DIM=k_dim, V_DIM=v_dim, BLOCK=block,
            MANTISSA=mantissa, BIAS=bias, LIMIT=0.0 if dtype is None else torch.finfo(dtype).max,
        )  # fmt: skip


@triton.jit
def _copy_row(  # type: ignore[no-untyped-def]
    rows, buffer, i, slot, column, scale, stride_n, stride_h, stride_d, slot_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    inside = column < HEADS * DIM
    head, d = column // DIM, column % DIM
    value = tl.load(rows + i * stride_n + head * stride_h + d * stride_d, mask=inside)
    if MANTISSA:
        wide = value.to(tl.float32)
        code = encode_fp8(saturate(wide * tl.load(scale), LIMIT), MANTISSA, BIAS)
        value = tl.where(tl.abs(wide) < float("inf"), code, 0x7F)  # NaN in both formats
    tl.store(buffer + slot * slot_stride + head * head_stride + d, value, mask=inside)


@triton.jit
def _set_kernel(  # type: ignore[no-untyped-def]
    k, v, k_buffer, v_buffer, loc, inverse_scales, loc_stride, k_stride_n, k_stride_h, k_stride_d,
    v_stride_n, v_stride_h, v_stride_d, k_slot, k_head, v_slot, v_head,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    # A pool may exceed 2**31 elements, so all offsets are int64.
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + i * loc_stride).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _copy_row(
        k, k_buffer, i, slot, column, inverse_scales, k_stride_n, k_stride_h, k_stride_d,
        k_slot, k_head, HEADS, K_DIM, MANTISSA, BIAS, LIMIT,
    )  # fmt: skip
    if V_DIM:
        v_scale = inverse_scales + 1 if MANTISSA else inverse_scales
        _copy_row(
            v, v_buffer, i, slot, column, v_scale, v_stride_n, v_stride_h, v_stride_d,
            v_slot, v_head, HEADS, V_DIM, MANTISSA, BIAS, LIMIT,
        )  # fmt: skip


@triton.jit
def _quantise_row(  # type: ignore[no-untyped-def]
    rows, codes, scales, i, slot, block, stride_n, stride_h, stride_d,
    code_slot, code_head, scale_slot, scale_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    inside = block < HEADS * DIM // 16
    # A block never spans two heads, because DIM is a multiple of 16.
    head = block * 16 // DIM
    first = block * 16 % DIM
    pair, element = tl.arange(0, 8), tl.arange(0, 16)
    at = rows + i * stride_n + (head * stride_h + first * stride_d)[:, None]
    at += element[None, :] * stride_d
    values = tl.load(at, mask=inside[:, None], other=0).to(tl.float32)
    finite = tl.min((tl.abs(values) < float("inf")).to(tl.int32), 1)
    values = tl.where(values == values, values, 0.0)
    even, odd = tl.split(tl.reshape(values, (BLOCKS, 8, 2)))
    scale = fp4_scale(even, odd)
    byte = encode_fp4(even, scale) | (encode_fp4(odd, scale) << 4)
    to = codes + slot * code_slot + (head * code_head + first // 2)[:, None] + pair[None, :]
    tl.store(to, byte.to(tl.uint8), mask=inside[:, None])
    tl.store(
        scales + slot * scale_slot + head * scale_head + first // 16,
        tl.where(finite == 1, scale, 255).to(tl.uint8),
        mask=inside,
    )


@triton.jit
def _set_fp4_kernel(  # type: ignore[no-untyped-def]
    k, v, k_codes, k_scales, v_codes, v_scales, loc, loc_stride,
    k_stride_n, k_stride_h, k_stride_d, v_stride_n, v_stride_h, v_stride_d,
    k_code_slot, k_code_head, k_scale_slot, k_scale_head,
    v_code_slot, v_code_head, v_scale_slot, v_scale_head,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + i * loc_stride).to(tl.int64)
    block = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    _quantise_row(
        k, k_codes, k_scales, i, slot, block, k_stride_n, k_stride_h, k_stride_d,
        k_code_slot, k_code_head, k_scale_slot, k_scale_head, HEADS, K_DIM, BLOCKS,
    )  # fmt: skip
    _quantise_row(
        v, v_codes, v_scales, i, slot, block, v_stride_n, v_stride_h, v_stride_d,
        v_code_slot, v_code_head, v_scale_slot, v_scale_head, HEADS, V_DIM, BLOCKS,
    )  # fmt: skip


@triton.jit
def _stage_kernel(  # type: ignore[no-untyped-def]
    part, staged, written, src, count, src_stride, layer_stride, slot_stride,
    LAYERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stage, in all layers, those of ROWS rows whose slot is also a target of the move."""
    # A pool may exceed 2**31 elements, so all offsets are int64.
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    slots = tl.load(src + rows * src_stride, mask=rows < count, other=0).to(tl.int64)
    is_written = tl.load(written + slots, mask=rows < count, other=0)
    if tl.max(is_written.to(tl.int32), 0) != 0:
        for nth in range(ROWS):
            i = first + nth
            slot = tl.load(src + i * src_stride, mask=i < count, other=0).to(tl.int64)
            if tl.load(written + slot, mask=i < count, other=0) != 0:
                at, to = part + slot * slot_stride, staged + i * LAYERS * WIDTH
                for _ in range(LAYERS):
                    for start in range(0, WIDTH, BLOCK):
                        column = start + tl.arange(0, BLOCK)
                        inside = column < WIDTH
                        tl.store(to + column, tl.load(at + column, mask=inside), mask=inside)
                    at += layer_stride
                    to += WIDTH


@triton.jit
def _move_kernel(  # type: ignore[no-untyped-def]
    part, staged, written, tgt, src, count, tgt_stride, src_stride, layer_stride, slot_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows of one layer to their targets, from the staged copy if there is one."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    layer = tl.program_id(1).to(tl.int64)
    exists = i < count
    slot = tl.load(src + i * src_stride, mask=exists, other=0).to(tl.int64)
    target = tl.load(tgt + i * tgt_stride, mask=exists, other=0).to(tl.int64)
    is_written = tl.load(written + slot, mask=exists, other=0)[:, None]
    here = part + layer * layer_stride + (slot * slot_stride)[:, None]
    there = staged + ((i * tl.num_programs(1) + layer) * WIDTH)[:, None]
    to = part + layer * layer_stride + (target * slot_stride)[:, None]
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (column < WIDTH) & exists[:, None]
        direct = tl.load(here + column, mask=inside & (is_written == 0), other=0)
        kept = tl.load(there + column, mask=inside & (is_written != 0), other=0)
        tl.store(to + column, direct | kept, mask=inside)

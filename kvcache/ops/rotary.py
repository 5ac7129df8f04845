"""Rotary embedding of queries and keys, optionally fused with the write to the pool.

Every function has a Triton and a torch implementation.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcache.ops.kv_write import set_kv_buffer
from memsaver.system.devices import Impl, use_triton

_TILE = 1024  # pairs of elements per program


@dataclass(frozen=True, kw_only=True)
class RotaryTables:
    """Cosines and sines of a rotary embedding that rotates `dim` elements of a head.

    Both tables are contiguous fp32 `[positions, dim / 2]`.
    """

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of int64 positions as `[tokens, 1, dim / 2]` of `dtype`."""
        cos, sin = (table[positions].to(dtype) for table in (self.cos, self.sin))
        return cos.unsqueeze(1), sin.unsqueeze(1)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    impl: Impl = "auto",
) -> Tensor:
    """Rotate q and k, and write the rotated k and v to a layer's cache.

    The first R <= D elements of a head are rotated, the others copied. cos, sin and every product
    are rounded to q's dtype, as in transformers. On a GPU, neither positions nor slots are
    range-checked. If a slot is listed twice, it contains either of its rows afterwards.

    q `[T, Hq, D]`, k `[T, Hkv, D]` and v `[T, Hkv, Dv]` have contiguous heads, `k_cache`
    `[N, Hkv, D]` and `v_cache` `[N, Hkv, Dv]` contiguous rows. All five have one dtype. Dv = 0
    writes no values. positions and slots are contiguous int64 `[T]`, cos and sin contiguous fp32
    `[positions, R / 2]`.

    Returns:
        The rotated queries, contiguous `[T, Hq, D]`.
    """
    if not use_triton(impl, q.device):
        q, k = rotate(q, k, positions, cos, sin, "torch")
        set_kv_buffer(k, v, k_cache, v_cache, slots, "torch")
        return q
    tokens, heads, dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    assert q.dtype == k.dtype == v.dtype == k_cache.dtype == v_cache.dtype
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    half = cos.shape[1]
    assert all(t.is_contiguous() for t in (positions, slots, cos, sin)) and 2 * half <= dim
    for cache in (k_cache, v_cache) if value_dim else (k_cache,):
        assert cache.stride()[1:] == (cache.shape[2], 1), "the rows of a buffer have gaps"
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    most_heads = triton.next_power_of_2(max(heads, kv_heads))
    block_heads = max(1, min(_TILE // triton.next_power_of_2(dim // 2), most_heads))
    q_blocks, kv_blocks = triton.cdiv(heads, block_heads), triton.cdiv(kv_heads, block_heads)
    with torch.cuda.device_of(out):
        _rotate_and_store[(tokens, q_blocks + kv_blocks)](
            q, k, v, positions, slots, cos, sin, out, k_cache, v_cache,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_cache.stride(0), v_cache.stride(0), q_blocks,
            HEADS=heads, KV_HEADS=kv_heads, HALF=half, DIM=dim, VALUE_DIM=value_dim,
            BLOCK_HEADS=block_heads, BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_V=triton.next_power_of_2(value_dim),
            BLOCK_REST=triton.next_power_of_2(max(1, dim - 2 * half)), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def rotate(
    q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Rotate q `[T, Hq, D]` and k `[T, Hkv, D]`; return contiguous tensors."""
    if use_triton(impl, q.device):
        rows = torch.arange(len(k), device=k.device)
        rotated = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        none = k[..., :0]
        q = rotate_and_store(q, k, none, positions, rows, cos, sin, rotated, none, "triton")
        return q, rotated
    cos_rows, sin_rows = RotaryTables(cos=cos, sin=sin).at(positions, q.dtype)
    return apply_rotary(q, cos_rows, sin_rows), apply_rotary(k, cos_rows, sin_rows)


def rotate_heads(
    x: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    interleaved: bool,
    impl: Impl = "auto",
) -> None:
    """Rotate whole heads of x and write them to `out`, rounding as `rotate_and_store` does.

    x and out are `[T, H, D]` with contiguous heads, positions contiguous int64 `[T]`, cos and sin
    contiguous fp32 `[positions, D / 2]`. The elements of a pair are adjacent in x if `interleaved`
    (DeepSeek). In `out`, a pair is always split over the two halves of a head.
    """
    if not use_triton(impl, x.device):
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if interleaved else x
        out.copy_(apply_rotary(halves, *RotaryTables(cos=cos, sin=sin).at(positions, x.dtype)))
        return
    tokens, heads, dim = x.shape
    assert x.shape == out.shape and x.dtype == out.dtype and x.stride(2) == out.stride(2) == 1
    assert all(t.is_contiguous() for t in (positions, cos, sin)) and cos.shape[1] * 2 == dim
    block_half = triton.next_power_of_2(dim // 2)
    block_heads = max(1, min(_TILE // block_half, triton.next_power_of_2(heads)))
    with torch.cuda.device_of(out):
        _rotate_heads[(tokens, triton.cdiv(heads, block_heads))](
            x, positions, cos, sin, out, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            heads, HALF=dim // 2, INTERLEAVED=interleaved, BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half, enable_fp_fusion=False,
        )  # fmt: skip


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] elements of each head of x `[tokens, heads, head_dim]`.

    cos and sin are `[tokens, 1, pairs]` of x's dtype. The elements of a pair are half the rotated
    width apart, as in Hugging Face models.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    out[..., 2 * half :] = rest
    return out


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    source, to, cos, sin, inside, HALF: tl.constexpr, APART: tl.constexpr
):
    """Rotate pairs (source, source + APART) into (to, to + HALF), rounding to the dtype of `to`."""
    dtype = to.dtype.element_ty
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + APART, mask=inside, other=0.0).to(tl.float32)
    left = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    right = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    tl.store(to, left.to(dtype), mask=inside)
    tl.store(to + HALF, right.to(dtype), mask=inside)


@triton.jit
def _table_row(table, position, pair, dtype: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a row of a table as `[1, pairs]`, rounded to dtype."""
    row = tl.load(table + position * HALF + pair, mask=pair < HALF, other=0.0)
    return row.to(dtype).to(tl.float32)[None, :]


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    x, positions, cos, sin, out, stride_x, stride_x_head, stride_out, stride_out_head, heads,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Rotate a block of heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    pair = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + token)
    dtype = x.dtype.element_ty
    cosine = _table_row(cos, position, pair, dtype, HALF)
    sine = _table_row(sin, position, pair, dtype, HALF)
    column = (2 * pair if INTERLEAVED else pair)[None, :]
    source = x + token * stride_x + head * stride_x_head + column
    to = out + token * stride_out + head * stride_out_head + pair[None, :]
    inside = (head < heads) & (pair < HALF)[None, :]
    _rotate(source, to, cosine, sine, inside, HALF, 1 if INTERLEAVED else HALF)


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    source, to, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy WIDTH elements from each of `[heads, 1]` pointers."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = inside & (column < WIDTH)
    tl.store(to + column, tl.load(source + column, mask=inside), mask=inside)


@triton.jit
def _rotate_and_store(  # type: ignore[no-untyped-def]
    q, k, v, positions, slots, cos, sin, out, k_cache, v_cache,
    stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head,
    stride_k_slot, stride_v_slot, q_blocks, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Process a block of heads of one token: query heads in the first q_blocks, then KV heads."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + token)
    dtype = q.dtype.element_ty
    cosine = _table_row(cos, position, pair, dtype, HALF)
    sine = _table_row(sin, position, pair, dtype, HALF)
    if block < q_blocks:
        head = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        inside = head < HEADS
        source = q + token * stride_q + head * stride_q_head
        to = out + (token * HEADS + head) * DIM
    else:
        head = ((block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        inside = head < KV_HEADS
        slot = tl.load(slots + token)  # int64, because a pool may exceed 2**31 elements
        source = k + token * stride_k + head * stride_k_head
        to = k_cache + slot * stride_k_slot + head * DIM
        if VALUE_DIM:
            value = v + token * stride_v + head * stride_v_head
            stored = v_cache + slot * stride_v_slot + head * VALUE_DIM
            _copy(value, stored, inside, VALUE_DIM, BLOCK_V)
    column, rotated = pair[None, :], inside & (pair < HALF)[None, :]
    _rotate(source + column, to + column, cosine, sine, rotated, HALF, HALF)
    if DIM > 2 * HALF:
        _copy(source + 2 * HALF, to + 2 * HALF, inside, DIM - 2 * HALF, BLOCK_REST)

"""Rotary embedding and KV store in one Triton launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # pairs of elements a program rotates


def rotate_and_store_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Same contract as `rotate_and_store`. Values of width 0 are not stored."""
    tokens, heads, dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    assert q.dtype == k.dtype == v.dtype == k_cache.dtype == v_cache.dtype
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert all(each.is_contiguous() for each in (positions, slots, cos, sin)) and cos.shape[1] * 2 == dim
    for cache in (k_cache, v_cache) if value_dim else (k_cache,):
        assert cache.stride()[1:] == (cache.shape[2], 1), "the rows of a KV buffer must be contiguous"
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    block_half = triton.next_power_of_2(dim // 2)
    block_heads = max(1, min(_TILE // block_half, triton.next_power_of_2(max(heads, kv_heads))))
    q_blocks, kv_blocks = triton.cdiv(heads, block_heads), triton.cdiv(kv_heads, block_heads)
    with torch.cuda.device_of(out):
        _rotate_and_store[(tokens, q_blocks + kv_blocks)](
            q, k, v, positions, slots, cos, sin, out, k_cache, v_cache,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_cache.stride(0), v_cache.stride(0), q_blocks,
            HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, VALUE_DIM=value_dim,
            BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, BLOCK_V=triton.next_power_of_2(value_dim),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    source, to, cos, sin, inside, HALF: tl.constexpr
):
    """Rotate the pairs (source, source + HALF); products and sums rounded to the dtype of `to`."""
    dtype = to.dtype.element_ty
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    left = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    right = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    tl.store(to, left.to(dtype), mask=inside)
    tl.store(to + HALF, right.to(dtype), mask=inside)


@triton.jit
def _rotate_and_store(  # type: ignore[no-untyped-def]
    q, k, v, positions, slots, cos, sin, out, k_cache, v_cache,
    stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head, stride_k_slot, stride_v_slot, q_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (token, block): the first q_blocks blocks are query heads, the others key and value heads."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + token)
    dtype = q.dtype.element_ty
    cosine = tl.load(cos + position * HALF + pair, mask=pair < HALF, other=0.0).to(dtype).to(tl.float32)[None, :]
    sine = tl.load(sin + position * HALF + pair, mask=pair < HALF, other=0.0).to(dtype).to(tl.float32)[None, :]
    if block < q_blocks:
        head = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        source = q + token * stride_q + head * stride_q_head + pair[None, :]
        to = out + (token * HEADS + head) * (2 * HALF) + pair[None, :]
        _rotate(source, to, cosine, sine, (head < HEADS) & (pair < HALF)[None, :], HALF)
    else:
        head = ((block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        slot = tl.load(slots + token)  # int64: a pool may pass 2**31 elements
        source = k + token * stride_k + head * stride_k_head + pair[None, :]
        to = k_cache + slot * stride_k_slot + head * (2 * HALF) + pair[None, :]
        _rotate(source, to, cosine, sine, (head < KV_HEADS) & (pair < HALF)[None, :], HALF)
        if VALUE_DIM:
            column = tl.arange(0, BLOCK_V)
            inside = (head < KV_HEADS) & (column < VALUE_DIM)[None, :]
            value = tl.load(v + token * stride_v + head * stride_v_head + column[None, :], mask=inside)
            tl.store(v_cache + slot * stride_v_slot + head * VALUE_DIM + column[None, :], value, mask=inside)

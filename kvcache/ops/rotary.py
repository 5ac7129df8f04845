"""Rotary embedding of queries and keys, alone or with their store: dispatch, torch references."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.ops.kv_write import set_kv_buffer
from memsaver.common.machine import Impl, use_triton


@dataclass(frozen=True, kw_only=True)
class RotaryTables:
    """cos, sin: contiguous fp32 [positions, dim / 2], dim being how much of a head is rotated."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, 1, dim / 2] of int64 positions, in the dtype of the heads."""
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
    """Rotated q, contiguous [T, Hq, D]; `k_cache[slots] = rotated k` and `v_cache[slots] = v`.

    q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv] of one dtype are views with contiguous heads.
    positions, slots: contiguous int64 [T]. cos, sin: contiguous fp32 [positions, R / 2], rounded to
    q's dtype before use; every product is rounded too, as in transformers. The first R <= D
    elements of a head are rotated, the others stay. k_cache [N, Hkv, D] and v_cache [N, Hkv, Dv] of
    the same dtype have contiguous rows. Nothing is range-checked on a GPU; a slot named twice holds
    any of its rows afterwards.
    """
    if use_triton(impl, q.device):
        from kvcache.ops.rotary_triton import rotate_and_store_triton

        return rotate_and_store_triton(q, k, v, positions, slots, cos, sin, k_cache, v_cache)
    q, k = rotate(q, k, positions, cos, sin, "torch")
    set_kv_buffer(k, v, k_cache, v_cache, slots, "torch")
    return q


def rotate(
    q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Rotated q [T, Hq, D] and k [T, Hkv, D], contiguous, for another kernel to write."""
    if use_triton(impl, q.device):
        from kvcache.ops.rotary_triton import rotate_and_store_triton

        rows = torch.arange(len(k), device=k.device)
        rotated = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        none = k[..., :0]
        q = rotate_and_store_triton(q, k, none, positions, rows, cos, sin, rotated, none)
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
    """Writes rotated heads x [T, H, D] to `out`, alike; heads of both are contiguous.

    interleaved: the pairs of x are neighbours (DeepSeek); in `out` they are halves all the same.
    positions: contiguous int64 [T]. cos, sin: contiguous fp32 [positions, D / 2], rounded as in
    `rotate_and_store`.
    """
    if use_triton(impl, x.device):
        from kvcache.ops.rotary_triton import rotate_heads_triton

        rotate_heads_triton(x, positions, cos, sin, out, interleaved=interleaved)
        return
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if interleaved else x
    out.copy_(apply_rotary(halves, *RotaryTables(cos=cos, sin=sin).at(positions, x.dtype)))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] with the first 2 * cos.shape[-1] elements of its heads rotated.

    cos, sin: [tokens, 1, pairs] of x's dtype. Pairs are of the two halves, as in Hugging Face.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    out[..., 2 * half :] = rest
    return out

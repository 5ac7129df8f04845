"""Rotary embedding of new queries and keys, and the store of keys and values: dispatch, and the torch reference."""

from torch import Tensor

from kvcache.ops.kv_write import set_kv_buffer
from memsaver.ops.dispatch import Impl, use_triton
from rollout.model.rotary import RotaryTables, apply_rotary


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

    q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv] of one dtype are views with contiguous heads. positions, slots:
    contiguous int64 [T]. cos, sin: contiguous fp32 [positions, D / 2], rounded to q's dtype before use; every product
    is rounded too, as in transformers. k_cache [N, Hkv, D] and v_cache [N, Hkv, Dv] of the same dtype have contiguous
    rows. Nothing is range-checked on a GPU; a slot named twice holds any of its rows afterwards.
    """
    if use_triton(impl, q.device):
        from rollout.ops.rotary_triton import rotate_and_store_triton

        return rotate_and_store_triton(q, k, v, positions, slots, cos, sin, k_cache, v_cache)
    cos_rows, sin_rows = RotaryTables(cos=cos, sin=sin).at(positions, q.dtype)
    set_kv_buffer(apply_rotary(k, cos_rows, sin_rows), v, k_cache, v_cache, slots, "torch")
    return apply_rotary(q, cos_rows, sin_rows)

"""Paged attention in Triton: chunked causal prefill and split-KV decode, the query heads of a KV
head packed in both.

Work is laid out by a request's own lengths only, so a request's result does not depend on the batch
it is in, and the decode launch depends on nothing but the batch size, so that a CUDA graph can
replay it over changed lengths.
"""

import math
from functools import cache

import torch
import triton
from torch import Tensor

from rollout.ops.attention_blocks import (
    combine_warps,
    decode_blocks,
    is_latent,
    is_wide,
    prefill_blocks,
)
from rollout.ops.attention_kernels_triton import (
    MIN_SPLIT,
    NUM_SPLITS,
    decode_combine,
    decode_split,
    prefill,
)
from rollout.ops.attention_plan import BatchShape, StoredKV, TritonPlan

_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # bits


def plan_triton(
    shape: BatchShape,
    req_to_token: Tensor,
    window: int | None = None,
    mapping: Tensor | None = None,
) -> TritonPlan:
    starts, start = [], 0
    for q_len in shape.q_lens:
        starts.append(start)
        start += q_len
    device = req_to_token.device
    meta = torch.tensor(
        [list(shape.rows), starts, list(shape.kv_lens), list(shape.q_lens)],
        dtype=torch.int32,
        pin_memory=device.type == "cuda",  # else the copy would wait for the kernels under way
    )
    return TritonPlan(
        req_to_token=req_to_token,
        meta=meta.to(device, non_blocking=True),
        num_decode=shape.num_decode,
        num_prefill=len(shape.rows) - shape.num_decode,
        max_q_len=max(shape.q_lens[shape.num_decode :], default=0),
        kv_lens=tuple(shape.kv_lens),
        window=window,
        mapping=mapping,
    )


def plan_decode_triton(rows: Tensor, positions: Tensor, req_to_token: Tensor) -> TritonPlan:
    count = len(rows)
    meta = torch.empty((4, count), dtype=torch.int32, device=req_to_token.device)
    meta[0] = rows
    torch.arange(count, out=meta[1])
    torch.add(positions, 1, out=meta[2])
    meta[3] = 1
    return TritonPlan(
        req_to_token=req_to_token, meta=meta, num_decode=count, num_prefill=0, max_q_len=0
    )


def triton_attention(q: Tensor, stored: StoredKV, plan: TritonPlan, scale: float) -> Tensor:
    """Same contract as `attend`, over what is stored."""
    fp8 = _MANTISSA.get(stored.k.dtype, 0) * (-1 if _converts_fp8(q.device) else 1)
    k_cache, v_cache = (each.view(torch.uint8) if fp8 else each for each in (stored.k, stored.v))
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == plan.meta.stride(-1) == 1
    out = torch.empty((*q.shape[:2], v_cache.shape[-1]), dtype=q.dtype, device=q.device)
    if plan.num_decode:
        _launch_decode(q, k_cache, v_cache, stored.scales, out, plan, scale, fp8)
    if plan.num_prefill:
        _launch_prefill(q, k_cache, v_cache, stored.scales, out, plan, scale, fp8)
    return out


@cache
def _converts_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _launch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: Tensor | None,
    out: Tensor,
    plan: TritonPlan,
    scale: float,
    fp8: int,
) -> None:
    (heads, dim), (kv_heads, value_dim) = q.shape[1:], v_cache.shape[1:]
    meta, table, count = plan.meta, plan.req_to_token, plan.num_decode
    splits = min(NUM_SPLITS.value, triton.cdiv(min(table.shape[1], plan.reach), MIN_SPLIT.value))
    if splits == 1:
        part, lse = out.unsqueeze(2), None
    else:
        part = torch.empty((count, heads, splits, value_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((count, heads, splits), dtype=torch.float32, device=q.device)
    wide, latent = is_wide(q, k_cache, v_cache), is_latent(k_cache, v_cache)
    blocks = decode_blocks(heads // kv_heads, dim, value_dim, wide, latent, fp8)
    decode_split[(count, kv_heads * triton.cdiv(blocks["GROUP"], blocks["BLOCK_G"]), splits)](
        q, k_cache, v_cache, scales, table, plan.mapping, meta, part, lse,
        q.stride(0), q.stride(1),
        k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        table.stride(0), meta.stride(0), part.stride(0), part.stride(1), splits, plan.reach,
        scale * math.log2(math.e), **blocks,
    )  # fmt: skip
    if lse is not None:
        decode_combine[(count, heads)](
            part, lse, meta, out, meta.stride(0), out.stride(0), out.stride(1), splits, plan.reach,
            VALUE_DIM=value_dim, BLOCK_V=blocks["BLOCK_V"],
            BLOCK_SPLITS=triton.next_power_of_2(splits), num_warps=combine_warps(blocks["BLOCK_V"]),
        )  # fmt: skip


def _launch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: Tensor | None,
    out: Tensor,
    plan: TritonPlan,
    scale: float,
    fp8: int,
) -> None:
    (heads, dim), (kv_heads, value_dim) = q.shape[1:], v_cache.shape[1:]
    meta, table = plan.meta, plan.req_to_token
    wide = is_wide(q, k_cache, v_cache)
    latent = is_latent(k_cache, v_cache)
    windowed = plan.window is not None
    blocks = prefill_blocks(heads // kv_heads, dim, value_dim, wide, latent, fp8, windowed)
    row_blocks = triton.cdiv(plan.max_q_len * blocks["GROUP"], blocks["BLOCK_M"])
    prefill[(row_blocks, plan.num_prefill, kv_heads)](
        q, k_cache, v_cache, scales, table, plan.mapping, meta, out,
        q.stride(0), q.stride(1),
        k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        table.stride(0), meta.stride(0), out.stride(0), out.stride(1), plan.num_decode, plan.reach,
        scale * math.log2(math.e), **blocks,
    )  # fmt: skip

"""Paged attention: dispatch, the torch reference, and the launches of the Triton kernels.

A forward packs the query tokens of several requests: first `num_decode` requests with one token
each, then prefill chunks. The keys and values of every query token are already in the cache.
`plan_attention` turns the batch into index tensors once a step; `paged_attention` is called once a
layer.

With a window, a query at position p sees the keys at (p - window, p]. Only slots of a request's
first `kv_len` positions that some query of it sees are ever read: whatever lies in other slots, NaN
included, is without effect.

The kernels' work (chunked causal prefill, split-KV decode, the query heads of a KV head packed in
both) is laid out by a request's own lengths only, so a request's result does not depend on the
batch it is in, nor, in half precision, on how its prompt was cut into chunks. The decode launch
depends on nothing but the batch size, so that a CUDA graph can replay it over changed lengths.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from rollout.ops.attention_kernels import (
    MIN_SPLIT,
    NUM_SPLITS,
    combine_warps,
    decode_blocks,
    decode_combine,
    decode_split,
    is_latent,
    is_wide,
    prefill,
    prefill_blocks,
)
from rollout.ops.attention_plan import (
    AttentionPlan,
    DecodeBucket,
    KVReader,
    StoredKV,
    TorchPlan,
    TritonPlan,
)

MAX_SCORES = 1 << 24  # elements of a prefill block's score matrix (64 MiB)
_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # bits
Decode = Callable[[Tensor, DecodeBucket, float], Tensor]
"""(q fp32 [b, Hq, D], bucket, scale) -> fp32 [b, Hq, Dv]."""


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """`attend` over plain tensors: k_cache [S, Hkv, D] and v_cache [S, Hkv, Dv]."""
    return attend(q, StoredKV(k=k_cache, v=v_cache), plan, scale)


def attend(q: Tensor, cache: KVReader, plan: AttentionPlan, scale: float) -> Tensor:
    """Causal attention of q [T, Hq, D] over a layer's cached keys and values -> [T, Hq, Dv], q's
    dtype.

    Hq is a multiple of Hkv; query head h reads KV head h // (Hq / Hkv). The plan says how far back
    queries see. Softmax and sums are fp32; products too, except that Triton multiplies
    half-precision tensors as they are.
    """
    if isinstance(plan, TorchPlan):
        return torch_attention(q, cache, plan, scale)
    return _triton_attention(q, *cache.for_kernels(plan), scale)


def torch_attention(
    q: Tensor, cache: KVReader, plan: TorchPlan, scale: float, decode: Decode | None = None
) -> Tensor:
    """The reference: gather, multiply, softmax, multiply, in fp32.

    decode: instead of full attention in decode.
    """
    decode = decode or partial(decode_bucket, cache)
    out = torch.empty((*q.shape[:2], cache.value_dim), dtype=q.dtype, device=q.device)
    for bucket in plan.buckets:
        out[bucket.tokens] = decode(q[bucket.tokens].float(), bucket, scale).to(q.dtype)
    for segment in plan.segments:
        keys, values = cache.rows(segment.slots)
        count, length = segment.hidden.shape
        block = max(1, MAX_SCORES // (q.shape[1] * length))
        for first in range(0, count, block):
            last = min(first + block, count)
            at = slice(segment.start + first, segment.start + last)
            hidden = segment.hidden[first:last]
            out[at] = _prefill(q[at].float(), keys, values, hidden, scale).to(q.dtype)
    return out


def decode_bucket(cache: KVReader, q: Tensor, bucket: DecodeBucket, scale: float) -> Tensor:
    """q fp32 [b, Hq, D] -> fp32 [b, Hq, Dv].

    One batched product a KV head: no copy of the gathered [b, L, Hkv, D].
    """
    batch, length = bucket.slots.shape
    rows = cache.rows(bucket.slots.view(-1))
    keys, values = (each.unflatten(0, (batch, length)) for each in rows)
    kv_heads, value_dim = values.shape[2:]
    groups = q.view(batch, kv_heads, -1, q.shape[-1])
    scores = q.new_empty((kv_heads, batch, groups.shape[2], length))
    out = q.new_empty((kv_heads, batch, groups.shape[2], value_dim))
    for head in range(kv_heads):
        torch.bmm(groups[:, head], keys[:, :, head].transpose(1, 2), out=scores[head])
    weights = scores.mul_(scale).masked_fill_(bucket.padding, float("-inf")).softmax(-1)
    for head in range(kv_heads):
        torch.bmm(weights[head], values[:, :, head], out=out[head])
    return out.permute(1, 0, 2, 3).reshape(batch, -1, value_dim)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """q fp32 [n, Hq, D], keys [L, Hkv, D], values [L, Hkv, Dv], hidden bool [n, L] -> fp32 [n, Hq,
    Dv].
    """
    count, heads, dim = q.shape
    length, kv_heads, value_dim = values.shape
    packed = q.view(count, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(packed, keys.permute(1, 2, 0)).mul_(scale).view(kv_heads, -1, count, length)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1).view(kv_heads, -1, length)
    out = torch.bmm(weights, values.permute(1, 0, 2)).view(kv_heads, -1, count, value_dim)
    return out.permute(2, 0, 1, 3).reshape(count, heads, value_dim)


def _triton_attention(q: Tensor, stored: StoredKV, plan: TritonPlan, scale: float) -> Tensor:
    """Same contract as `attend`, over what is stored."""
    fp8 = _MANTISSA.get(stored.k.dtype, 0) * (-1 if _converts_fp8(q.device) else 1)
    k_cache, v_cache = (each.view(torch.uint8) if fp8 else each for each in (stored.k, stored.v))
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == plan.meta.stride(-1) == 1
    out = torch.empty((*q.shape[:2], v_cache.shape[-1]), dtype=q.dtype, device=q.device)
    table, meta = plan.req_to_token, plan.meta
    read = (q, k_cache, v_cache, stored.scales, table, plan.mapping, meta)
    strides = (
        *q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], table.stride(0),
        meta.stride(0),
    )  # fmt: skip
    (heads, dim), (kv_heads, value_dim) = q.shape[1:], v_cache.shape[1:]
    wide, latent = is_wide(q, k_cache, v_cache), is_latent(k_cache, v_cache)
    cut = (heads // kv_heads, dim, value_dim, wide, latent, fp8)
    log2_scale = scale * math.log2(math.e)
    if plan.num_decode:
        _launch_decode(read, strides, out, plan, log2_scale, decode_blocks(*cut))
    if plan.num_prefill:
        blocks = prefill_blocks(*cut, windowed=plan.window is not None)
        row_blocks = triton.cdiv(plan.max_q_len * blocks["GROUP"], blocks["BLOCK_M"])
        prefill[(row_blocks, plan.num_prefill, kv_heads)](
            *read, out, *strides, *out.stride()[:2], plan.num_decode, plan.reach, log2_scale,
            **blocks,
        )  # fmt: skip
    return out


@cache
def _converts_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _launch_decode(
    read: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    out: Tensor,
    plan: TritonPlan,
    log2_scale: float,
    blocks: dict[str, Any],
) -> None:
    """read, strides: the arguments that both kernels begin with, and their strides, in order.
    blocks: of `decode_blocks`.
    """
    (heads, value_dim), count, group = out.shape[1:], plan.num_decode, blocks["GROUP"]
    reach = min(plan.req_to_token.shape[1], plan.reach)
    splits = min(NUM_SPLITS.value, triton.cdiv(reach, MIN_SPLIT.value))
    if splits == 1:
        part, lse = out.unsqueeze(2), None
    else:
        part = out.new_empty((count, heads, splits, value_dim), dtype=torch.float32)
        lse = out.new_empty((count, heads, splits), dtype=torch.float32)
    decode_split[(count, heads // group * triton.cdiv(group, blocks["BLOCK_G"]), splits)](
        *read, part, lse, *strides, *part.stride()[:2], splits, plan.reach, log2_scale, **blocks
    )
    if lse is not None:
        meta = plan.meta
        decode_combine[(count, heads)](
            part, lse, meta, out, meta.stride(0), *out.stride()[:2], splits, plan.reach,
            VALUE_DIM=value_dim, BLOCK_V=blocks["BLOCK_V"],
            BLOCK_SPLITS=triton.next_power_of_2(splits), num_warps=combine_warps(blocks["BLOCK_V"]),
        )  # fmt: skip

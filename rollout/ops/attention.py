"""Paged attention: dispatch, and the torch reference.

A forward packs the query tokens of several requests: first `num_decode` requests with one token
each, then prefill chunks. The keys and values of every query token are already in the cache.
`plan_attention` turns the batch into index tensors once a step; `paged_attention` is called once a
layer.

With a window, a query at position p sees the keys at (p - window, p]. Only slots of a request's
first `kv_len` positions that some query of it sees are ever read: whatever lies in other slots, NaN
included, is without effect.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from memsaver.common.machine import Impl, use_triton
from rollout.ops.attention_plan import (
    AttentionPlan,
    BatchShape,
    DecodeBucket,
    KVReader,
    PrefillSegment,
    StoredKV,
    TorchPlan,
    TritonPlan,
)

MAX_SCORES = 1 << 24  # elements of a prefill block's score matrix (64 MiB)
MAX_BUCKET_TOKENS = 1 << 15  # padded tokens gathered at once in decode
_MIN_BUCKET_LEN = 64  # below this, padding costs less than another bucket


def plan_attention(
    shape: BatchShape,
    req_to_token: Tensor,
    impl: Impl = "auto",
    window: int | None = None,
    mapping: Tensor | None = None,
) -> AttentionPlan:
    """Index tensors of one forward. req_to_token: int32 [rows, max_context_len]. impl: "auto",
    "torch" or "triton".

    window: how many keys a query sees, None: all before it. mapping: int64 [slots], the cache's
    slot of each slot that req_to_token names, None: the same.
    """
    if use_triton(impl, req_to_token.device):
        # Triton costs a second to import; a CPU engine needs none
        from rollout.ops.attention_triton import plan_triton

        return plan_triton(shape, req_to_token, window, mapping)
    return plan_torch(shape, req_to_token, window, mapping)


def plan_decode(rows: Tensor, positions: Tensor, req_to_token: Tensor) -> TritonPlan:
    """Triton's plan of a decode-only forward, by launches alone, so that a CUDA graph can hold
    them.

    rows, positions: integers [B] on the device, a request's row of req_to_token and the position of
    its query token. Without window and mapping: `dataclasses.replace` gives a plan those.
    """
    from rollout.ops.attention_triton import plan_decode_triton

    return plan_decode_triton(rows, positions, req_to_token)


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
    from rollout.ops.attention_triton import triton_attention

    return triton_attention(q, *cache.for_kernels(plan), scale)


Decode = Callable[[Tensor, DecodeBucket, float], Tensor]
"""(q fp32 [b, Hq, D], bucket, scale) -> fp32 [b, Hq, Dv]."""


def plan_torch(
    shape: BatchShape,
    req_to_token: Tensor,
    window: int | None = None,
    mapping: Tensor | None = None,
) -> TorchPlan:
    device = req_to_token.device
    seen = [min(kv_len, window or kv_len) for kv_len in shape.kv_lens[: shape.num_decode]]
    buckets = tuple(
        _plan_bucket(shape, members, seen, req_to_token, mapping)
        for members in _bucket_members(seen)
    )
    segments = []
    start = shape.num_decode
    for row, q_len, kv_len in list(zip(shape.rows, shape.q_lens, shape.kv_lens, strict=True))[
        shape.num_decode :
    ]:
        first = max(0, kv_len - q_len + 1 - window) if window else 0
        positions = torch.arange(first, kv_len, device=device)
        queries = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
        hidden = positions > queries
        if window:
            hidden |= positions <= queries - window
        slots = _mapped(req_to_token[row, first:kv_len].long(), mapping)
        segments.append(PrefillSegment(start=start, slots=slots, hidden=hidden))
        start += q_len
    return TorchPlan(buckets=buckets, segments=tuple(segments))


def _mapped(slots: Tensor, mapping: Tensor | None) -> Tensor:
    return slots if mapping is None else mapping[slots]


def _bucket_members(seen: Sequence[int]) -> list[list[int]]:
    """Decode requests by the keys they see, so that padding at most doubles the work and no gather
    is huge.
    """
    buckets: list[list[int]] = []
    for i in sorted(range(len(seen)), key=lambda i: seen[i]):
        length = seen[i]
        if buckets:
            shortest = max(seen[buckets[-1][0]], _MIN_BUCKET_LEN)
            if length <= 2 * shortest and length * (len(buckets[-1]) + 1) <= MAX_BUCKET_TOKENS:
                buckets[-1].append(i)
                continue
        buckets.append([i])
    return buckets


def _plan_bucket(
    shape: BatchShape,
    members: list[int],
    seen: Sequence[int],
    req_to_token: Tensor,
    mapping: Tensor | None,
) -> DecodeBucket:
    device = req_to_token.device
    rows, counts, ends = torch.tensor(
        [
            [shape.rows[i] for i in members],
            [seen[i] for i in members],
            [shape.kv_lens[i] for i in members],
        ],
        device=device,
    )[:, :, None]
    nth = torch.arange(max(seen[i] for i in members), device=device)
    padding = nth >= counts
    positions = ends - counts + nth.where(~padding, 0)
    slots = _mapped(req_to_token[rows, positions].long(), mapping)
    return DecodeBucket(
        tokens=torch.tensor(members, device=device), slots=slots, padding=padding.unsqueeze(1)
    )


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

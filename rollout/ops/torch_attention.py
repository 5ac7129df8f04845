"""Paged attention in torch: the reference, and how it finds the tokens of a batch.

A forward packs the query tokens of several requests: first `num_decode` requests with one token
each, then prefill chunks. The keys and values of every query token are already in the cache. A plan
turns the batch into index tensors once a step; attention is computed once a layer.

With a window, a query at position p sees the keys at (p - window, p]. Only slots of a request's
first `kv_len` positions that some query of it sees are ever read: whatever lies in other slots, NaN
included, is without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BUCKET_TOKENS = 1 << 15  # padded tokens gathered at once in decode
_MIN_BUCKET_LEN = 64  # below this, padding costs less than another bucket
MAX_SCORES = 1 << 24  # elements of a prefill block's score matrix (64 MiB)

Rows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Slots int64 [n] -> a layer's fp32 keys [n, Hkv, D] and values [n, Hkv, Dv] there."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Describes in plain numbers what one forward computes.

    rows: each request's row of req_to_token. q_lens: its query tokens in this forward, the last
    ones of kv_lens, its tokens in the cache. num_decode: how many leading requests have exactly one
    query token and take the decode path.
    """

    rows: Sequence[int]
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    num_decode: int


@dataclass(frozen=True, kw_only=True)
class StoredKV:
    """A layer's rows as they lie in the pool: k [S, Hkv, D] and v [S, Hkv, Dv] of one dtype.

    scales: fp32 [2] on the device, what kernels multiply k and v by; only they read fp8.
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.k.index_select(0, slots).float(), self.v.index_select(0, slots).float()


@dataclass(frozen=True, kw_only=True)
class DecodeBucket:
    """Decode requests that see similarly much. tokens: int64 [b] query rows. slots: int64 [b, L],
    what each sees, padded with its first one. padding: bool [b, 1, L], True past that.
    """

    tokens: Tensor
    slots: Tensor
    padding: Tensor


@dataclass(frozen=True, kw_only=True)
class PrefillSegment:
    """One prefill chunk: query rows [start, start + n). slots: int64 [L], what any of them sees.
    hidden: bool [n, L], what each of them does not.
    """

    start: int
    slots: Tensor
    hidden: Tensor


@dataclass(frozen=True, kw_only=True)
class TorchPlan:
    buckets: tuple[DecodeBucket, ...]
    segments: tuple[PrefillSegment, ...]


Decode = Callable[[Tensor, DecodeBucket, float], Tensor]
"""(q fp32 [b, Hq, D], bucket, scale) -> fp32 [b, Hq, Dv]."""


def plan_torch(
    shape: BatchShape,
    req_to_token: Tensor,
    window: int | None = None,
    mapping: Tensor | None = None,
) -> TorchPlan:
    """Return the index tensors of one forward. req_to_token: int32 [rows, max_context_len].

    window: how many keys a query sees, None: all before it. mapping: int64 [slots], the cache's
    slot of each slot that req_to_token names, None: the same.
    """
    device = req_to_token.device
    seen = [min(kv_len, window or kv_len) for kv_len in shape.kv_lens[: shape.num_decode]]
    groups = _bucket_members(seen)
    buckets = tuple(_plan_bucket(shape, each, seen, req_to_token, mapping) for each in groups)
    segments = []
    start = shape.num_decode
    requests = list(zip(shape.rows, shape.q_lens, shape.kv_lens, strict=True))
    for row, q_len, kv_len in requests[shape.num_decode :]:
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
    columns = list(zip(shape.rows, seen, shape.kv_lens, strict=False))  # decode requests are first
    chosen = torch.tensor([columns[i] for i in members], device=device)
    rows, counts, ends = chosen.t().unsqueeze(2)
    nth = torch.arange(max(seen[i] for i in members), device=device)
    padding = nth >= counts
    positions = ends - counts + nth.where(~padding, 0)
    slots = _mapped(req_to_token[rows, positions].long(), mapping)
    return DecodeBucket(
        tokens=torch.tensor(members, device=device), slots=slots, padding=padding.unsqueeze(1)
    )


def torch_attention(
    q: Tensor, plan: TorchPlan, scale: float, out: Tensor, rows: Rows, decode: Decode
) -> None:
    """Gather, multiply, softmax, multiply, in fp32: q [T, Hq, D] -> out [T, Hq, Dv].

    decode: `decode_bucket` over `rows`, or what a layer does instead.
    """
    for bucket in plan.buckets:
        out[bucket.tokens] = decode(q[bucket.tokens].float(), bucket, scale).to(q.dtype)
    for segment in plan.segments:
        keys, values = rows(segment.slots)
        count, length = segment.hidden.shape
        block = max(1, MAX_SCORES // (q.shape[1] * length))
        for first in range(0, count, block):
            last = min(first + block, count)
            at = slice(segment.start + first, segment.start + last)
            hidden = segment.hidden[first:last]
            out[at] = _prefill(q[at].float(), keys, values, hidden, scale).to(q.dtype)


def decode_bucket(rows: Rows, q: Tensor, bucket: DecodeBucket, scale: float) -> Tensor:
    """q fp32 [b, Hq, D] -> fp32 [b, Hq, Dv].

    One batched product a KV head: no copy of the gathered [b, L, Hkv, D].
    """
    batch, length = bucket.slots.shape
    gathered = rows(bucket.slots.view(-1))
    keys, values = (each.unflatten(0, (batch, length)) for each in gathered)
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

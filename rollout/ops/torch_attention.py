"""Paged attention in torch, which is the reference, and its index tensors.

A forward pass packs the query tokens of several requests: first `num_decode` requests with one
token each, then prefill chunks. The cache already has the keys and values of all query tokens. A
plan turns the batch into index tensors once per step; attention uses the plan in every layer.

With a window, a query at position p sees the keys at (p - window, p]. Attention reads only the
slots of a request's first `kv_len` positions that a query of the request sees. The content of other
slots, even NaN, has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BUCKET_TOKENS = 1 << 15  # maximum number of padded tokens gathered together in decode
_MIN_BUCKET_LEN = 64  # below this length, padding costs less than another bucket
MAX_SCORES = 1 << 24  # maximum size of a prefill block's score matrix, in elements (64 MiB)

Rows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Map slots int64 [n] to a layer's fp32 keys [n, Hkv, D] and values [n, Hkv, Dv]."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a forward pass, on the host."""

    rows: Sequence[int]  # row of each request in req_to_token
    q_lens: Sequence[int]  # query tokens of each request, the last of its cached tokens
    kv_lens: Sequence[int]  # cached tokens of each request
    num_decode: int  # leading requests that have one query token and take the decode path


@dataclass(frozen=True, kw_only=True)
class StoredKV:
    """Keys and values of a layer in the pool."""

    k: Tensor  # [S, Hkv, D]
    v: Tensor  # [S, Hkv, Dv], of k's dtype
    # Factors by which kernels multiply k and v, fp32 [2] on the device. None unless the rows are
    # fp8, which only kernels read.
    scales: Tensor | None = None

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.k.index_select(0, slots).float(), self.v.index_select(0, slots).float()


@dataclass(frozen=True, kw_only=True)
class DecodeBucket:
    """Decode requests that see a similar number of keys."""

    tokens: Tensor  # query rows, int64 [b]
    slots: Tensor  # slots that each request sees, padded with the first of them, int64 [b, L]
    padding: Tensor  # True for padding, bool [b, 1, L]


@dataclass(frozen=True, kw_only=True)
class PrefillSegment:
    """A prefill chunk of n query rows."""

    start: int  # first query row
    slots: Tensor  # slots that any of the rows sees, int64 [L]
    hidden: Tensor  # True where a row does not see a slot, bool [n, L]


@dataclass(frozen=True, kw_only=True)
class TorchPlan:
    """Index tensors of a forward pass for `torch_attention`."""

    buckets: tuple[DecodeBucket, ...]
    segments: tuple[PrefillSegment, ...]


Decode = Callable[[Tensor, DecodeBucket, float], Tensor]
"""Map (q fp32 [b, Hq, D], bucket, scale) to outputs fp32 [b, Hq, Dv]."""


def plan_torch(
    shape: BatchShape,
    req_to_token: Tensor,
    window: int | None = None,
    mapping: Tensor | None = None,
) -> TorchPlan:
    """Return the index tensors of a forward pass, on the device of `req_to_token`.

    Args:
        shape: Sizes of the batch.
        req_to_token: Slots by request row and position, int32 [rows, max_context_len].
        window: Number of keys that a query sees, including its own; None for all.
        mapping: Cache slot of each slot in req_to_token, int64 [slots]; None for the same slots.
    """
    device = req_to_token.device
    seen = [min(kv_len, window or kv_len) for kv_len in shape.kv_lens[: shape.num_decode]]
    groups = _bucket_members(seen)
    buckets = tuple(_plan_bucket(shape, group, seen, req_to_token, mapping) for group in groups)
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
    """Group decode requests by the number of keys they see.

    Padding at most doubles the work, and a gather has at most `MAX_BUCKET_TOKENS` tokens.
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
    columns = list(zip(shape.rows, seen, shape.kv_lens, strict=False))  # decode requests only
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
    """Compute causal attention in fp32, and write it to `out`, [T, Hq, Dv] of q's dtype.

    Queries are [T, Hq, D], and `scale` is the factor of the scores. `rows` reads the layer's keys
    and values. `decode` computes decode requests: `decode_bucket` over `rows`, or a sparse variant.
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
    """Compute attention of decode queries, fp32 [b, Hq, D] to [b, Hq, Dv].

    One batched product per KV head avoids a copy of the gathered keys [b, L, Hkv, D].
    """
    batch, length = bucket.slots.shape
    gathered = rows(bucket.slots.view(-1))
    keys, values = (part.unflatten(0, (batch, length)) for part in gathered)
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
    """Compute attention of a prefill block, fp32 [n, Hq, D] to [n, Hq, Dv].

    Keys are [L, Hkv, D], values [L, Hkv, Dv]; `hidden` is bool [n, L].
    """
    count, heads, dim = q.shape
    length, kv_heads, value_dim = values.shape
    packed = q.view(count, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(packed, keys.permute(1, 2, 0)).mul_(scale).view(kv_heads, -1, count, length)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1).view(kv_heads, -1, length)
    out = torch.bmm(weights, values.permute(1, 0, 2)).view(kv_heads, -1, count, value_dim)
    return out.permute(2, 0, 1, 3).reshape(count, heads, value_dim)

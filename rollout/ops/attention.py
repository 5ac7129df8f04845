"""Paged attention: dispatch, and the torch reference.

A forward packs the query tokens of several requests: first `num_decode` requests with one token each, then prefill
chunks. The keys and values of every query token are already in the cache. `plan_attention` turns the batch into index
tensors once a step; `paged_attention` is called once a layer.

Only slots of a request's first `kv_len` positions are ever read: whatever lies in other slots, NaN included, is
without effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor

from memsaver.ops.dispatch import Impl, use_triton

if TYPE_CHECKING:
    from rollout.ops.attention_triton import TritonPlan

_MAX_SCORES = 1 << 24  # elements of a prefill block's score matrix (64 MiB)
_MAX_BUCKET_TOKENS = 1 << 15  # padded tokens gathered at once in decode
_MIN_BUCKET_LEN = 64  # below this, padding costs less than another bucket


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """What is computed in one forward, in plain numbers.

    rows: each request's row of req_to_token. q_lens: its query tokens in this forward, the last ones of kv_lens, its
    tokens in the cache. num_decode: how many leading requests have exactly one query token and take the decode path.
    """

    rows: Sequence[int]
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    num_decode: int

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.q_lens) == len(self.kv_lens) >= self.num_decode >= 0
        assert all(0 < q <= kv for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        assert all(q == 1 for q in self.q_lens[: self.num_decode])


@dataclass(frozen=True, kw_only=True)
class DecodeBucket:
    """Decode requests of similar length. tokens: int64 [b] query rows. slots: int64 [b, L], padded with the request's
    own first slot. padding: bool [b, 1, L], True past the request's length."""

    tokens: Tensor
    slots: Tensor
    padding: Tensor


@dataclass(frozen=True, kw_only=True)
class PrefillSegment:
    """One prefill chunk: query rows [start, start + n). slots: int64 [kv_len]. future: bool [n, kv_len]."""

    start: int
    slots: Tensor
    future: Tensor


@dataclass(frozen=True, kw_only=True)
class TorchPlan:
    buckets: tuple[DecodeBucket, ...]
    segments: tuple[PrefillSegment, ...]


AttentionPlan = Union[TorchPlan, "TritonPlan"]


def plan_attention(shape: BatchShape, req_to_token: Tensor, impl: Impl = "auto") -> AttentionPlan:
    """Index tensors of one forward. req_to_token: int32 [rows, max_context_len]. impl: "auto", "torch" or "triton"."""
    if use_triton(impl, req_to_token.device):
        from rollout.ops.attention_triton import plan_triton  # Triton costs a second to import; a CPU engine needs none

        return plan_triton(shape, req_to_token)
    return plan_torch(shape, req_to_token)


def plan_decode(rows: Tensor, positions: Tensor, req_to_token: Tensor) -> "TritonPlan":
    """Triton's plan of a decode-only forward, by launches alone, so that a CUDA graph can hold them.

    rows, positions: integers [B] on the device, a request's row of req_to_token and the position of its query token.
    """
    from rollout.ops.attention_triton import plan_decode_triton

    return plan_decode_triton(rows, positions, req_to_token)


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Causal attention of q [T, Hq, D] over k_cache [S, Hkv, D], v_cache [S, Hkv, Dv] -> [T, Hq, Dv], q's dtype.

    Hq is a multiple of Hkv; query head h reads KV head h // (Hq / Hkv). Softmax and sums are fp32;
    products too, except that Triton multiplies half-precision tensors as they are.
    """
    if isinstance(plan, TorchPlan):
        return torch_attention(q, k_cache, v_cache, plan, scale)
    from rollout.ops.attention_triton import triton_attention

    return triton_attention(q, k_cache, v_cache, plan, scale)


def plan_torch(shape: BatchShape, req_to_token: Tensor) -> TorchPlan:
    device = req_to_token.device
    buckets = tuple(_plan_bucket(shape, members, req_to_token) for members in _bucket_members(shape))
    segments = []
    start = shape.num_decode
    for row, q_len, kv_len in list(zip(shape.rows, shape.q_lens, shape.kv_lens, strict=True))[shape.num_decode :]:
        positions = torch.arange(kv_len, device=device)
        future = positions > positions[kv_len - q_len :, None]
        segments.append(PrefillSegment(start=start, slots=req_to_token[row, :kv_len].long(), future=future))
        start += q_len
    return TorchPlan(buckets=buckets, segments=tuple(segments))


def _bucket_members(shape: BatchShape) -> list[list[int]]:
    """Decode requests by length, so that padding at most doubles the work and no gather is huge."""
    buckets: list[list[int]] = []
    for i in sorted(range(shape.num_decode), key=lambda i: shape.kv_lens[i]):
        length = shape.kv_lens[i]
        if buckets:
            shortest = max(shape.kv_lens[buckets[-1][0]], _MIN_BUCKET_LEN)
            if length <= 2 * shortest and length * (len(buckets[-1]) + 1) <= _MAX_BUCKET_TOKENS:
                buckets[-1].append(i)
                continue
        buckets.append([i])
    return buckets


def _plan_bucket(shape: BatchShape, members: list[int], req_to_token: Tensor) -> DecodeBucket:
    device = req_to_token.device
    rows = torch.tensor([shape.rows[i] for i in members], device=device)
    lens = torch.tensor([shape.kv_lens[i] for i in members], device=device)
    longest = max(shape.kv_lens[i] for i in members)
    padding = torch.arange(longest, device=device) >= lens[:, None]
    table = req_to_token[:, :longest].index_select(0, rows).long()
    slots = torch.where(padding, table[:, :1], table)
    return DecodeBucket(tokens=torch.tensor(members, device=device), slots=slots, padding=padding.unsqueeze(1))


def torch_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: TorchPlan, scale: float) -> Tensor:
    """The reference: gather, multiply, softmax, multiply, in fp32."""
    out = torch.empty((*q.shape[:2], v_cache.shape[-1]), dtype=q.dtype, device=q.device)
    for bucket in plan.buckets:
        out[bucket.tokens] = _decode(q[bucket.tokens].float(), k_cache, v_cache, bucket, scale).to(q.dtype)
    for segment in plan.segments:
        keys, values = (cache.index_select(0, segment.slots).float() for cache in (k_cache, v_cache))
        count, kv_len = segment.future.shape
        block = max(1, _MAX_SCORES // (q.shape[1] * kv_len))
        for first in range(0, count, block):
            last = min(first + block, count)
            at = slice(segment.start + first, segment.start + last)
            out[at] = _prefill(q[at].float(), keys, values, segment.future[first:last], scale).to(q.dtype)
    return out


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, bucket: DecodeBucket, scale: float) -> Tensor:
    """q fp32 [b, Hq, D] -> fp32 [b, Hq, Dv]. One batched product a KV head: no copy of the gathered [b, L, Hkv, D]."""
    batch, length = bucket.slots.shape
    kv_heads, value_dim = v_cache.shape[1:]
    flat = bucket.slots.view(-1)
    keys = k_cache.index_select(0, flat).view(batch, length, kv_heads, -1).float()
    values = v_cache.index_select(0, flat).view(batch, length, kv_heads, -1).float()
    groups = q.view(batch, kv_heads, -1, q.shape[-1])
    scores = q.new_empty((kv_heads, batch, groups.shape[2], length))
    out = q.new_empty((kv_heads, batch, groups.shape[2], value_dim))
    for head in range(kv_heads):
        torch.bmm(groups[:, head], keys[:, :, head].transpose(1, 2), out=scores[head])
    weights = scores.mul_(scale).masked_fill_(bucket.padding, float("-inf")).softmax(-1)
    for head in range(kv_heads):
        torch.bmm(weights[head], values[:, :, head], out=out[head])
    return out.permute(1, 0, 2, 3).reshape(batch, -1, value_dim)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, future: Tensor, scale: float) -> Tensor:
    """q fp32 [n, Hq, D], keys [L, Hkv, D], values [L, Hkv, Dv], future bool [n, L] -> fp32 [n, Hq, Dv]."""
    count, heads, dim = q.shape
    length, kv_heads, value_dim = values.shape
    packed = q.view(count, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(packed, keys.permute(1, 2, 0)).mul_(scale).view(kv_heads, -1, count, length)
    weights = scores.masked_fill_(future, float("-inf")).softmax(-1).view(kv_heads, -1, length)
    out = torch.bmm(weights, values.permute(1, 0, 2)).view(kv_heads, -1, count, value_dim)
    return out.permute(2, 0, 1, 3).reshape(count, heads, value_dim)

"""Paged attention in torch, which is the reference, and its index tensors.

A forward pass packs the query tokens of several requests: first `num_decode` requests with one
token each, then prefill chunks. The cache already has the keys and values of all query tokens. A
plan turns the batch into index tensors once per step; attention uses the plan in every layer.

With a window, a query at position p sees the keys at (p - window, p]. Attention reads only the
slots of a request's first `kv_len` positions that a query of the request sees. The content of other
slots, even NaN, has no effect.

Keys are divided into splits of `SPLIT` at absolute positions, which are folded in order. All
products have the same inner and outer size, but for the number of rows, a multiple of `ROWS`. A
query therefore has the same result, to the bit, in decode, in every chunk of a prompt, and in a
trainer, which differentiates `attend`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SPLIT = 128  # keys
ROWS = 16  # fewer rows or columns may take another path through the library, and get other bits
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
    slots: Tensor  # of each request from the start of a split on, int64 [b, L]
    padding: Tensor  # True where `slots` repeats a slot that the request sees, bool [b, 1, L]


@dataclass(frozen=True, kw_only=True)
class PrefillSegment:
    """A prefill chunk of n query rows."""

    start: int  # first query row
    slots: Tensor  # slots that any of the rows sees, after copies of the first, int64 [L]
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
    lowest = [max(0, kv_len - (window or kv_len)) for kv_len in shape.kv_lens[: shape.num_decode]]
    groups = similar_lengths(
        [kv_len - _split_start(first) for first, kv_len in zip(lowest, shape.kv_lens, strict=False)]
    )
    buckets = tuple(_plan_bucket(shape, group, lowest, req_to_token, mapping) for group in groups)
    segments = []
    start = shape.num_decode
    requests = list(zip(shape.rows, shape.q_lens, shape.kv_lens, strict=True))
    for row, q_len, kv_len in requests[shape.num_decode :]:
        first = max(0, kv_len - q_len + 1 - window) if window else 0
        hidden = hidden_keys(q_len, kv_len, window, req_to_token.device)
        positions = torch.arange(_split_start(first), kv_len, device=req_to_token.device)
        slots = _mapped(req_to_token[row, positions.clamp(min=first)].long(), mapping)
        segments.append(PrefillSegment(start=start, slots=slots, hidden=hidden))
        start += q_len
    return TorchPlan(buckets=buckets, segments=tuple(segments))


def hidden_keys(q_len: int, kv_len: int, window: int | None, device: torch.device) -> Tensor:
    """Return where the last `q_len` of `kv_len` tokens do not see a key, bool [q_len, keys].

    The keys begin with the split of the first key that any of the tokens sees.
    """
    first = max(0, kv_len - q_len + 1 - window) if window else 0
    positions = torch.arange(_split_start(first), kv_len, device=device)
    queries = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    hidden = positions > queries
    return hidden | (positions <= queries - window) if window else hidden


def _split_start(position: int) -> int:
    return position // SPLIT * SPLIT


def _mapped(slots: Tensor, mapping: Tensor | None) -> Tensor:
    return slots if mapping is None else mapping[slots]


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group requests by the number of keys that are read for them; a group's longest is last.

    Padding at most doubles the work, and a gather has at most `MAX_BUCKET_TOKENS` tokens.
    """
    buckets: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = lengths[i]
        if buckets:
            shortest = max(lengths[buckets[-1][0]], _MIN_BUCKET_LEN)
            if length <= 2 * shortest and length * (len(buckets[-1]) + 1) <= MAX_BUCKET_TOKENS:
                buckets[-1].append(i)
                continue
        buckets.append([i])
    return buckets


def _plan_bucket(
    shape: BatchShape,
    members: list[int],
    lowest: Sequence[int],
    req_to_token: Tensor,
    mapping: Tensor | None,
) -> DecodeBucket:
    device = req_to_token.device
    chosen = [(shape.rows[i], lowest[i], shape.kv_lens[i]) for i in members]
    rows, first, ends = torch.tensor(chosen, device=device).t().unsqueeze(2)
    starts = [_split_start(low) for _, low, _ in chosen]
    longest = max(end - start for (_, _, end), start in zip(chosen, starts, strict=True))
    positions = torch.tensor(starts, device=device)[:, None] + torch.arange(longest, device=device)
    padding = (positions < first) | (positions >= ends)
    return DecodeBucket(
        tokens=torch.tensor(members, device=device),
        slots=_mapped(req_to_token[rows, first.where(padding, positions)].long(), mapping),
        padding=padding.unsqueeze(1),
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
            (out[at],) = attend(q[None, at].float(), keys[None], values[None], hidden, scale)


def decode_bucket(rows: Rows, q: Tensor, bucket: DecodeBucket, scale: float) -> Tensor:
    """Compute attention of decode queries, fp32 [b, Hq, D] to [b, Hq, Dv]."""
    batch, length = bucket.slots.shape
    keys, values = (
        part.unflatten(0, (batch, length)).transpose(1, 2) for part in rows(bucket.slots.view(-1))
    )
    groups = q.unflatten(1, (keys.shape[1], -1))
    return _attend(groups, keys, values, bucket.padding.unsqueeze(1), scale).flatten(1, 2)


def attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Compute attention of n queries of b sequences, fp32 [b, n, Hq, D] to [b, n, Hq, Dv].

    Keys [b, L, Hkv, D] and values [b, L, Hkv, Dv] begin at the start of a split; `hidden` is bool
    [n, L]. All but `hidden` may require a gradient. The bits of a sequence do not depend on the
    others, nor those of a query on the keys that it does not see.
    """
    batch, count, heads, dim = q.shape
    length, kv_heads, _ = values.shape[1:]
    group = heads // kv_heads
    packed = q.view(batch, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    keys, values = (part.transpose(1, 2) for part in (keys, values))
    hidden = hidden.expand(group, count, length).reshape(1, 1, -1, length)
    out = _attend(packed.flatten(2, 3), keys, values, hidden, scale)
    out = out.view(batch, kv_heads, group, count, -1)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Compute attention of queries [b, h, m, D] over keys [b, h, L, D], split by split.

    `hidden` is bool [b, 1, m or 1, L].
    """
    (rows, length), spare = (q.shape[2], keys.shape[2]), -keys.shape[2] % SPLIT
    width = min(length, SPLIT)  # a single split may have fewer keys, and softmax only needs these
    q = F.pad(q, (0, _narrow(q), 0, -rows % ROWS)).unsqueeze(2)
    dim = values.shape[-1]
    keys, values = (
        F.pad(part, (0, _narrow(part), 0, spare)).unflatten(2, (-1, SPLIT))
        for part in (keys, values)
    )
    hidden = F.pad(hidden, (0, spare), value=True).unflatten(3, (-1, SPLIT)).transpose(2, 3)
    scores = (q @ keys.transpose(-1, -2))[..., :rows, :width] * scale
    scores = scores.masked_fill(hidden[..., :width], float("-inf"))
    peaks = scores.detach().amax(-1, keepdim=True)
    weights = (scores - _origin(peaks)).exp()
    weights = F.pad(weights, (0, SPLIT - width, 0, -rows % ROWS))
    sums = weights.sum(-1, keepdim=True), weights @ values
    splits = zip(peaks.unbind(2), *(part[..., :rows, :dim].unbind(2) for part in sums), strict=True)
    peak, total, acc = next(splits)
    for next_peak, next_total, next_acc in splits:
        top = torch.maximum(peak, next_peak)
        shrink, share = ((part - _origin(top)).exp() for part in (peak, next_peak))
        total = total * shrink + next_total * share
        acc = acc * shrink + next_acc * share
        peak = top
    return acc / total


def _narrow(part: Tensor) -> int:
    """Return how many columns a head lacks to have `ROWS`."""
    return max(0, ROWS - part.shape[-1])


def _origin(peak: Tensor) -> Tensor:
    """Return the peak, or 0 where no key is seen: -inf - -inf would be NaN."""
    return peak.masked_fill(peak == float("-inf"), 0.0)

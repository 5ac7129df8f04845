"""Double sparsity: decode attends to few tokens, chosen by few channels of their keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.config import HeadChannels
from rollout.ops.torch_attention import DecodeBucket, StoredKV, decode_bucket


def heavy_channels(keys: Sequence[Tensor], count: int) -> tuple[HeadChannels, ...]:
    """Choose the channels of each KV head whose mean |key| is largest.

    Args:
        keys: Keys [n, Hkv, D] of each layer, rotated as in the cache (`kv_pool.get_rows`).
        count: Number of channels per KV head.

    Returns:
        Channel indices by layer and KV head, ascending, for `DoubleSparsity.channels`.
    """
    best = (layer.float().abs().mean(0).topk(count, -1).indices.sort(-1).values for layer in keys)
    return tuple(tuple(map(tuple, layer.tolist())) for layer in best)


def decode_sparse(
    stored: StoredKV,
    labels: Tensor,
    channels: Tensor,
    tokens: int,
    recent: int,
    q: Tensor,
    bucket: DecodeBucket,
    scale: float,
) -> Tensor:
    """Compute decode attention of each query head over its best `tokens` tokens.

    Reads the labels of all tokens of a request, and the keys and values of the chosen tokens. The
    newest `recent` tokens are always chosen. A bucket of at most `tokens` tokens gets full
    attention.

    `labels` [S, Hkv, n] are the chosen channels of the keys in all slots, and `channels` int64
    [Hkv, n] their indices. Queries are fp32 [b, Hq, D], and outputs fp32 [b, Hq, Dv].
    """
    if bucket.slots.shape[1] <= tokens:
        return decode_bucket(stored.rows, q, bucket, scale)
    kv_heads = len(channels)
    groups = q.unflatten(1, (kv_heads, -1))
    chosen = choose_tokens(groups, labels, channels, tokens, recent, bucket)
    slots = _at(bucket.slots, chosen)
    head = torch.arange(kv_heads, device=q.device)[:, None, None]
    keys, values = stored.k[slots, head].float(), stored.v[slots, head].float()
    scores = (keys @ groups.unsqueeze(-1)).squeeze(-1).mul_(scale)
    weights = scores.masked_fill_(_at(bucket.padding.squeeze(1), chosen), float("-inf")).softmax(-1)
    return (weights.unsqueeze(-2) @ values).squeeze(-2).flatten(1, 2)


def choose_tokens(
    groups: Tensor, labels: Tensor, channels: Tensor, tokens: int, recent: int, bucket: DecodeBucket
) -> Tensor:
    """Return positions int64 [b, Hkv, G, tokens], ascending, for query heads fp32 [b, Hkv, G, D].

    A request with fewer tokens gets all of them, and padding.
    """
    index = channels[None, :, None].expand(*groups.shape[:3], -1)
    scores = torch.einsum("bhgc,blhc->bhgl", groups.gather(-1, index), labels[bucket.slots].float())
    padding = bucket.padding.unsqueeze(1)
    lens = padding.logical_not().sum(-1, keepdim=True)
    newest = torch.arange(padding.shape[-1], device=padding.device) >= lens - recent
    scores.masked_fill_(newest, float("inf")).masked_fill_(padding, float("-inf"))
    return scores.topk(tokens, -1).indices.sort(-1).values


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """Return values [b, L] at positions int64 [b, Hkv, G, n], as [b, Hkv, G, n]."""
    return values[:, None, None].expand(*positions.shape[:3], -1).gather(-1, positions)

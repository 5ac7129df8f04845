"""Double sparsity: what decode attends to, and which channels of the keys it chooses that by."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from rollout.ops.attention import decode_bucket
from rollout.ops.attention_plan import DecodeBucket, StoredKV

HeadChannels = tuple[tuple[int, ...], ...]  # [KV head][heavy_channel_num]


@dataclass(frozen=True, kw_only=True)
class DoubleSparsity:
    """Decode scores all cached tokens by a few channels of the keys, and attends to the best.

    heavy_token_num: tokens that a query head attends to, the `recent_token_num` last ones always
    among them.
    heavy_channel_num: channels that are scored. channels: which, [layer][KV head]; None: the first
    ones of every head. Better ones come from `heavy_channels` over keys of a few prompts.
    """

    heavy_channel_num: int
    heavy_token_num: int
    recent_token_num: int = 1
    channels: tuple[HeadChannels, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("heavy_channel_num", "heavy_token_num", "recent_token_num"):
            if getattr(self, name) < 1:
                raise ValueError(f"double_sparsity.{name}={getattr(self, name)} must be at least 1")
        if self.recent_token_num > self.heavy_token_num:
            raise ValueError(
                f"double_sparsity.recent_token_num={self.recent_token_num} exceeds heavy_token_num="
                f"{self.heavy_token_num}, of which they are a part; raise heavy_token_num"
            )
        for layer, heads in enumerate(self.channels or ()):
            for head, chosen in enumerate(heads):
                if not len(set(chosen)) == len(chosen) == self.heavy_channel_num:
                    raise ValueError(
                        f"double_sparsity.channels of layer {layer}, KV head {head} are "
                        f"{tuple(chosen)}; give heavy_channel_num={self.heavy_channel_num} "
                        f"different ones"
                    )

    def check(self, num_layers: int, kv_heads: int, head_dim: int) -> None:
        """ValueError unless the channels are those of a model of this shape."""
        if self.heavy_channel_num > head_dim:
            raise ValueError(
                f"double_sparsity.heavy_channel_num={self.heavy_channel_num}, keys have "
                f"{head_dim} channels; lower it"
            )
        if self.channels is None:
            return
        shape = {(len(self.channels), len(heads)) for heads in self.channels}
        if shape != {(num_layers, kv_heads)}:
            raise ValueError(
                f"double_sparsity.channels are given for (layers, KV heads) {sorted(shape)}, "
                f"the model has {(num_layers, kv_heads)}; give heavy channels for each"
            )
        flat = chain.from_iterable
        if wrong := set(flat(flat(self.channels))) - set(range(head_dim)):
            raise ValueError(
                f"double_sparsity.channels name {sorted(wrong)}, keys have channels "
                f"0..{head_dim - 1}; choose among them"
            )

    def of_layer(self, layer: int, kv_heads: int) -> HeadChannels:
        """The channels of each KV head of a layer."""
        return (
            self.channels[layer]
            if self.channels
            else (tuple(range(self.heavy_channel_num)),) * kv_heads
        )


def heavy_channels(keys: Sequence[Tensor], count: int) -> tuple[HeadChannels, ...]:
    """Returns, for `DoubleSparsity.channels`, the `count` channels of each KV head whose mean |key|
    is largest.

    keys: [n, Hkv, D] of each layer, rotated as the cache holds them (`kv_pool.get_rows`).
    """
    best = (each.float().abs().mean(0).topk(count, -1).indices.sort(-1).values for each in keys)
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
    """q fp32 [b, Hq, D] -> fp32 [b, Hq, Dv]: each query head over its `tokens` best, the last
    `recent` among them.

    labels: [S, Hkv, n], the channels int64 [Hkv, n] of the keys. Reads the labels of all of a
    request's tokens and the keys and values of the chosen ones. A bucket of at most `tokens` tokens
    is full attention.
    """
    if bucket.slots.shape[1] <= tokens:
        return decode_bucket(stored, q, bucket, scale)
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
    """Positions int64 [b, Hkv, G, tokens], ascending, for query heads fp32 [b, Hkv, G, D].

    A request with fewer tokens gets all of its own, and padding.
    """
    index = channels[None, :, None].expand(*groups.shape[:3], -1)
    scores = torch.einsum("bhgc,blhc->bhgl", groups.gather(-1, index), labels[bucket.slots].float())
    padding = bucket.padding.unsqueeze(1)
    lens = padding.logical_not().sum(-1, keepdim=True)
    newest = torch.arange(padding.shape[-1], device=padding.device) >= lens - recent
    scores.masked_fill_(newest, float("inf")).masked_fill_(padding, float("-inf"))
    return scores.topk(tokens, -1).indices.sort(-1).values


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """[b, L] at positions int64 [b, Hkv, G, n] -> [b, Hkv, G, n]."""
    return values[:, None, None].expand(*positions.shape[:3], -1).gather(-1, positions)

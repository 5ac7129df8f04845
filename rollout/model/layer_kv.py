"""One layer of the KV cache as attention uses it, whether rows are plain, scaled fp8 or FP4; and
double sparsity: what decode attends to, and which channels of the keys it chooses that by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from kvcache import KVPool
from kvcache.config import check_counts, check_option
from kvcache.ops import RotaryTables
from kvcache.pools import DoubleSparseTokenToKVPool, MHATokenToKVPool, RoutedKVPool, TokenPool
from rollout.ops.attention_plan import AttentionPlan, DecodeBucket, StoredKV, TorchPlan, TritonPlan
from rollout.ops.paged_attention import attend, decode_bucket, torch_attention

HeadChannels = tuple[tuple[int, ...], ...]  # [KV head][heavy_channel_num]


class LayerKV:
    """A `KVReader` of one layer of a pool, whose rows the pool writes.

    q is [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv]; positions and slots are int64 [T]. stored:
    the rows as they lie in the pool, read in place; None (FP4): kernels read a dequantized copy of
    the batch's rows, which lives as long as the layer is computed.
    """

    def __init__(
        self, pool: KVPool, layer: int, value_dim: int, stored: StoredKV | None = None
    ) -> None:
        self._pool, self._layer, self.value_dim = pool, layer, value_dim
        self._stored = stored

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        slots: Tensor,
        rotary: RotaryTables,
    ) -> Tensor:
        """Put rotated keys and the values into `slots`; return q rotated. Modify no argument."""
        assert isinstance(self._pool, MHATokenToKVPool), "latent rows are written by their mixer"
        return self._pool.set_rotated_kv_buffer(self._layer, slots, q, k, v, positions, rotary)

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVReader.rows`."""
        if self._stored is not None and self._stored.scales is None:
            return self._stored.rows(slots)
        keys, values = self._pool.get_rows(self._layer, slots)
        return keys.float(), values.float()

    def for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        """See `KVReader.for_kernels`."""
        if self._stored is not None:
            return self._stored, plan
        slots, gathered = plan.gathered
        keys, values = self._pool.get_rows(self._layer, slots)
        return StoredKV(k=keys, v=values), gathered

    def attend(self, q: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """See `rollout.ops.paged_attention.attend`."""
        return attend(q, self, plan, scale)


class SparseKV(LayerKV):
    """Keeps labels beside plain rows, by which decode chooses its tokens; prefill is full
    attention.
    """

    def __init__(
        self,
        pool: DoubleSparseTokenToKVPool,
        layer: int,
        stored: StoredKV,
        sparsity: DoubleSparsity,
    ) -> None:
        super().__init__(pool, layer, stored.value_dim, stored)
        self._rows, self._labels, self._sparsity = stored, pool, sparsity
        kv_heads = stored.k.shape[1]
        self._channels = torch.tensor(sparsity.of_layer(layer, kv_heads), device=pool.device)
        self._heads = torch.arange(kv_heads, device=pool.device)[:, None]

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        slots: Tensor,
        rotary: RotaryTables,
    ) -> Tensor:
        q = super().store(q, k, v, positions, slots, rotary)
        # labels of keys as they are stored
        labels = self._rows.k[slots[:, None, None], self._heads, self._channels]
        self._labels.set_label_buffer(self._layer, slots, labels)
        return q

    def attend(self, q: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        assert isinstance(plan, TorchPlan), "EngineConfig takes torch attention for double sparsity"
        chosen = self._sparsity
        decode = partial(
            decode_sparse,
            self._rows,
            self._labels.get_label_buffer(self._layer),
            self._channels,
            chosen.heavy_token_num,
            chosen.recent_token_num,
        )
        return torch_attention(q, self, plan, scale, decode)


def layer_kv(pool: KVPool, layer: int, sparsity: DoubleSparsity | None = None) -> LayerKV:
    """Return the `LayerKV` for how the pool keeps this layer.

    Slots are those of the pool that holds it. Latent rows are written by their mixer.
    """
    if isinstance(pool, RoutedKVPool):
        pool, layer = pool.route(layer)
    assert isinstance(pool, TokenPool)
    if pool.fp4:
        return LayerKV(pool, layer, pool.config.value_dim)
    k, v = pool.get_kv_buffer(layer)
    stored = StoredKV(k=k, v=v, scales=pool.device_scales(layer))
    if sparsity is None:
        return LayerKV(pool, layer, stored.value_dim, stored)
    assert isinstance(pool, DoubleSparseTokenToKVPool)
    return SparseKV(pool, layer, stored, sparsity)


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
        check_counts(self, "heavy_channel_num", "heavy_token_num", "recent_token_num")
        rule = f"exceeds heavy_token_num={self.heavy_token_num}, of which they are a part"
        few = self.recent_token_num <= self.heavy_token_num
        check_option(self, "recent_token_num", few, rule)
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
        rule = f"exceeds the {head_dim} channels of keys; lower it"
        check_option(self, "heavy_channel_num", self.heavy_channel_num <= head_dim, rule)
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

"""One layer of the KV cache as attention uses it, whether rows are plain, scaled fp8 or FP4; and
double sparsity: what decode attends to, and which channels of the keys it chooses that by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from kvcache import KVLayout, KVPool
from kvcache.config import FP4_DTYPE, FP8_DTYPES
from kvcache.ops import RotaryTables
from kvcache.pools import DoubleSparseTokenToKVPool, MHATokenToKVPool, RoutedKVPool
from rollout.ops.attention_plan import AttentionPlan, DecodeBucket, StoredKV, TorchPlan, TritonPlan
from rollout.ops.paged_attention import attend, decode_bucket, torch_attention

HeadChannels = tuple[tuple[int, ...], ...]  # [KV head][heavy_channel_num]


class LayerKV(ABC):
    """A `KVReader` of one layer of a pool, whose rows the pool writes.

    q is [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv]; positions and slots are int64 [T].
    """

    def __init__(self, pool: KVPool, layer: int, value_dim: int) -> None:
        self._pool, self._layer, self.value_dim = pool, layer, value_dim

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        slots: Tensor,
        rotary: RotaryTables,
    ) -> Tensor:
        """Puts rotated keys and the values into `slots`; returns q rotated. No argument is
        modified.
        """
        assert isinstance(self._pool, MHATokenToKVPool), "latent rows are written by their mixer"
        return self._pool.set_rotated_kv_buffer(self._layer, slots, q, k, v, positions, rotary)

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVReader.rows`."""
        keys, values = self._pool.get_rows(self._layer, slots)
        return keys.float(), values.float()

    @abstractmethod
    def for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        """See `KVReader.for_kernels`."""

    def attend(self, q: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """See `rollout.ops.paged_attention.attend`."""
        return attend(q, self, plan, scale)


class FP8KV(LayerKV):
    """Kernels read the bytes where they lie, and the scales on the device."""

    def __init__(self, pool: KVPool, layer: int, value_dim: int) -> None:
        super().__init__(pool, layer, value_dim)
        k, v = pool.get_kv_buffer(layer)
        self._stored = StoredKV(k=k, v=v, scales=pool.device_scales(layer))

    def for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        return self._stored, plan


class PlainKV(FP8KV):
    """Rows of the model's dtype, without scales: the torch reference reads them in place, too."""

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._stored.rows(slots)


class FP4KV(LayerKV):
    """Kernels read a dequantised copy of the batch's rows, which lives as long as the layer is
    computed.
    """

    def for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        slots, gathered = plan.gathered
        keys, values = self._pool.get_rows(self._layer, slots)
        return StoredKV(k=keys, v=values), gathered


class SparseKV(PlainKV):
    """Keeps labels beside plain rows, by which decode chooses its tokens; prefill is full
    attention.
    """

    def __init__(
        self, pool: DoubleSparseTokenToKVPool, layer: int, value_dim: int, sparsity: DoubleSparsity
    ) -> None:
        super().__init__(pool, layer, value_dim)
        self._labels, self._sparsity = pool, sparsity
        kv_heads = self._stored.k.shape[1]
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
        labels = self._stored.k[slots[:, None, None], self._heads, self._channels]
        self._labels.set_label_buffer(self._layer, slots, labels)
        return q

    def attend(self, q: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        assert isinstance(plan, TorchPlan), "EngineConfig takes torch attention for double sparsity"
        chosen = self._sparsity
        decode = partial(
            decode_sparse,
            self._stored,
            self._labels.get_label_buffer(self._layer),
            self._channels,
            chosen.heavy_token_num,
            chosen.recent_token_num,
        )
        return torch_attention(q, self, plan, scale, decode)


def layer_kv(
    pool: KVPool, kv_layout: KVLayout, sparsity: DoubleSparsity | None, layer: int
) -> LayerKV:
    """Returns the `LayerKV` for how the pool keeps this layer.

    Slots are those of the pool that holds it. Latent rows are written by their mixer.
    """
    value_dim = kv_layout.kv_lora_rank or kv_layout.rows["v"][1]
    if sparsity is not None:
        assert isinstance(pool, DoubleSparseTokenToKVPool)
        return SparseKV(pool, layer, value_dim, sparsity)
    if isinstance(pool, RoutedKVPool):
        pool, layer = pool.route(layer)
    if kv_layout.dtype == FP4_DTYPE:
        return FP4KV(pool, layer, value_dim)
    kind = FP8KV if kv_layout.dtype in FP8_DTYPES else PlainKV
    return kind(pool, layer, value_dim)


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

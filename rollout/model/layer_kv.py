"""One layer of the KV cache as attention uses it, whether rows are plain, scaled fp8 or FP4."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor

from kvcache import KVLayout, KVPool
from kvcache.config import FP4_DTYPE, FP8_DTYPES
from kvcache.ops import RotaryTables
from kvcache.pools import DoubleSparseTokenToKVPool, MHATokenToKVPool, RoutedKVPool
from rollout.ops.attention import attend, torch_attention
from rollout.ops.attention_plan import AttentionPlan, StoredKV, TorchPlan, TritonPlan
from rollout.serving.double_sparsity import DoubleSparsity, decode_sparse


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
        """See `rollout.ops.attention.attend`."""
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


def layer_kv(pool: KVPool, kept: KVLayout, sparsity: DoubleSparsity | None, layer: int) -> LayerKV:
    """Returns the `LayerKV` for how the pool keeps this layer.

    Slots are those of the pool that holds it. Latent rows are written by their mixer.
    """
    value_dim = kept.kv_lora_rank or kept.rows["v"][1]
    if sparsity is not None:
        assert isinstance(pool, DoubleSparseTokenToKVPool)
        return SparseKV(pool, layer, value_dim, sparsity)
    if isinstance(pool, RoutedKVPool):
        pool, layer = pool.route(layer)
    if kept.dtype == FP4_DTYPE:
        return FP4KV(pool, layer, value_dim)
    kind = FP8KV if kept.dtype in FP8_DTYPES else PlainKV
    return kind(pool, layer, value_dim)

"""One layer of the KV cache as attention writes and reads it: plain, scaled fp8 or FP4 rows behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcache import DoubleSparseTokenToKVPool, KVPool
from kvcache.config import FP4_DTYPE, FP8_DTYPES
from kvcache.pools.routed import RoutedKVPool
from rollout.model.rotary import RotaryTables
from rollout.ops.attention import AttentionPlan, StoredKV, TorchPlan, attend, torch_attention
from rollout.ops.double_sparse import decode_sparse
from rollout.ops.rotary import rotate, rotate_and_store
from rollout.serving.double_sparsity import DoubleSparsity

if TYPE_CHECKING:
    from rollout.ops.attention_triton import TritonPlan
    from rollout.serving.kv_setup import Cache


class LayerKV(ABC):
    """A `KVReader` that writes, too. q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv]; positions, slots: int64 [T]."""

    value_dim: int

    @abstractmethod
    def store(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, rotary: RotaryTables) -> Tensor:
        """Puts rotated keys and the values into `slots`; returns q rotated. No argument is modified."""

    @abstractmethod
    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVReader.rows`."""

    @abstractmethod
    def for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        """See `KVReader.for_kernels`."""

    def attend(self, q: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """See `rollout.ops.attention.attend`."""
        return attend(q, self, plan, scale)


class PlainKV(LayerKV):
    """Rows of the model's dtype: rotation and store are one kernel, and rows are read where they lie."""

    def __init__(self, pool: KVPool, layer: int) -> None:
        k, v = pool.get_kv_buffer(layer)
        self._stored = StoredKV(k=k, v=v)
        self.value_dim = v.shape[-1]

    def store(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, rotary: RotaryTables) -> Tensor:
        stored = self._stored
        return rotate_and_store(q, k, v, positions, slots, rotary.cos, rotary.sin, stored.k, stored.v)

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._stored.rows(slots)

    def for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        return self._stored, plan


class QuantisedKV(LayerKV):
    """The pool quantises what it is given and dequantises the rows that are asked for."""

    def __init__(self, pool: KVPool, layer: int, value_dim: int) -> None:
        self._pool, self._layer, self.value_dim = pool, layer, value_dim

    def store(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, rotary: RotaryTables) -> Tensor:
        q, k = rotate(q, k, positions, rotary.cos, rotary.sin)
        self._pool.set_kv_buffer(self._layer, slots, k, v)
        return q

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._pool.get_rows(self._layer, slots)
        return keys.float(), values.float()


class FP8KV(QuantisedKV):
    """Kernels read the bytes where they lie, and the scales on the device."""

    def __init__(self, pool: KVPool, layer: int, value_dim: int) -> None:
        super().__init__(pool, layer, value_dim)
        k, v = pool.get_kv_buffer(layer)
        self._stored = StoredKV(k=k, v=v, scales=pool.device_scales(layer))

    def for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        return self._stored, plan


class FP4KV(QuantisedKV):
    """Kernels read a dequantised copy of the batch's rows, which lives as long as the layer is computed."""

    def for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        slots, gathered = plan.gathered
        keys, values = self._pool.get_rows(self._layer, slots)
        return StoredKV(k=keys, v=values), gathered


class SparseKV(PlainKV):
    """Keeps labels beside plain rows, by which decode chooses its tokens; prefill is full attention."""

    def __init__(self, pool: DoubleSparseTokenToKVPool, layer: int, sparsity: DoubleSparsity) -> None:
        super().__init__(pool, layer)
        self._pool, self._layer, self._sparsity = pool, layer, sparsity
        kv_heads = self._stored.k.shape[1]
        self._channels = torch.tensor(sparsity.of_layer(layer, kv_heads), device=pool.device)
        self._heads = torch.arange(kv_heads, device=pool.device)[:, None]

    def store(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, rotary: RotaryTables) -> Tensor:
        q = super().store(q, k, v, positions, slots, rotary)
        labels = self._stored.k[slots[:, None, None], self._heads, self._channels]  # of keys as they are stored
        self._pool.set_label_buffer(self._layer, slots, labels)
        return q

    def attend(self, q: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        assert isinstance(plan, TorchPlan), "EngineConfig takes torch attention for double sparsity"
        chosen = self._sparsity
        decode = partial(
            decode_sparse,
            self._stored,
            self._pool.get_label_buffer(self._layer),
            self._channels,
            chosen.heavy_token_num,
            chosen.recent_token_num,
        )
        return torch_attention(q, self, plan, scale, decode)


def layer_kv(cache: Cache, layer: int) -> LayerKV:
    """How the cache keeps this layer. Slots are those of the pool that holds it. Latent rows are written by their
    mixer."""
    pool, kept = cache.pool, cache.layout
    if cache.sparsity is not None:
        assert isinstance(pool, DoubleSparseTokenToKVPool)
        return SparseKV(pool, layer, cache.sparsity)
    if isinstance(pool, RoutedKVPool):
        pool, layer = pool.route(layer)
    value_dim = kept.kv_lora_rank or kept.rows["v"][1]
    if kept.dtype == FP4_DTYPE:
        return FP4KV(pool, layer, value_dim)
    if kept.dtype in FP8_DTYPES:
        return FP8KV(pool, layer, value_dim)
    return PlainKV(pool, layer)

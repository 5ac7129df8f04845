"""One layer of the KV cache as attention uses it, whether rows are plain, scaled fp8 or FP4."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcache import KVPool
from kvcache.ops import RotaryTables
from kvcache.pools import DoubleSparseTokenToKVPool, MHATokenToKVPool, RoutedKVPool, TokenPool
from rollout.config import DoubleSparsity
from rollout.model.double_sparsity import decode_sparse
from rollout.ops.attention_plan import AttentionPlan, StoredKV, TorchPlan, TritonPlan
from rollout.ops.paged_attention import attend, torch_attention


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

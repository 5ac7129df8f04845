"""Grouped-query attention with rotary positions, and the KV cache of one layer.

Serves Llama, Mistral, Qwen2, Qwen3 and Qwen3-Next.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvcache import KVPool
from kvcache.pools import DoubleSparseTokenToKVPool, MHATokenToKVPool, RoutedKVPool, TokenPool
from kvcache.staging import heads_per_rank
from rollout.config import DoubleSparsity
from rollout.model.double_sparsity import decode_sparse
from rollout.model.mixers.base import AttentionPlan, Batch, LayerParts, MixerConfig, RopeConfig
from rollout.ops.row_wise import rms_norm
from rollout.ops.torch_attention import Decode, StoredKV, TorchPlan, decode_bucket, torch_attention
from rollout.ops.triton_attention import TritonPlan, triton_attention
from rollout.weights.params import ParamGroup, Split, Splits, one, stack


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """Grouped-query attention of one layer.

    With `output_gate`, each head's output is multiplied by the sigmoid of a gate, whose rows follow
    the head's query in q_proj (Qwen3-Next).
    """

    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool  # apply an RMSNorm to every query and key head (Qwen3)
    output_gate: bool = False
    window: int | None = None  # keys that a query sees, including its own; None for all

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )

    @property
    def plain(self) -> bool:  # type: ignore[override]
        return not self.output_gate

    @property
    def query_rows(self) -> int:
        """Return the rows of q_proj, counted in heads: one per query, another per output gate."""
        return self.num_heads * (2 if self.output_gate else 1)

    def groups(self, hidden_size: int, layer: str) -> list[ParamGroup]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attn = layer + "self_attn."
        qkv = (("q_proj", self.query_rows * self.head_dim), ("k_proj", kv), ("v_proj", kv))
        weights = [(f"{attn}{name}.weight", (rows, hidden_size)) for name, rows in qkv]
        groups = [stack(attn + "qkv_proj.weight", weights)]
        if self.qkv_bias:
            biases = [(f"{attn}{name}.bias", (rows,)) for name, rows in qkv]
            groups.append(stack(attn + "qkv_proj.bias", biases))
        if self.qk_norm:
            groups += [one(f"{attn}{name}_norm.weight", self.head_dim) for name in "qk"]
        groups.append(one(attn + "o_proj.weight", hidden_size, q))
        if self.o_bias:
            groups.append(one(attn + "o_proj.bias", hidden_size))
        return groups

    def splits(self) -> Splits:
        dim = self.head_dim
        queries = [Split(dim=0, units=(self.query_rows // self.num_heads * dim,))]
        keys = [Split(dim=0, units=(dim,), copies=True)]
        rows = {"q": queries, "k": keys, "v": keys}
        splits: dict[str, list[Split]] = {"self_attn.o_proj.weight": [Split(dim=1, units=(dim,))]}
        for kind in ("weight", "bias"):
            splits |= {f"self_attn.{name}_proj.{kind}": split for name, split in rows.items()}
        return splits

    def of_rank(self, size: int) -> "AttentionConfig":
        kv_heads = heads_per_rank(size, self.num_kv_heads)
        return replace(self, num_heads=self.num_heads // size, num_kv_heads=kv_heads)

    def build(self, index: int, parts: LayerParts) -> "Attention":
        return Attention(self, index, parts)


class LayerKV:
    """The KV cache of one layer, as attention reads it: plain rows, scaled fp8 or FP4.

    `layer` is the number of the layer in `pool`. `stored` are the rows in the pool, which kernels
    read in place. It is None for FP4: kernels read a dequantized copy of the batch's rows, which is
    freed after the layer.
    """

    def __init__(self, pool: KVPool, layer: int) -> None:
        if isinstance(pool, RoutedKVPool):
            pool, layer = pool.route(layer)
        assert isinstance(pool, TokenPool)
        self.pool, self.layer = pool, layer
        self.stored: StoredKV | None = None
        if not pool.fp4:
            k, v = pool.get_kv_buffer(layer)
            self.stored = StoredKV(k=k, v=v, scales=pool.device_scales(layer))
        self._decode: Decode = partial(decode_bucket, self.rows)

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return fp32 keys [n, Hkv, D] and values [n, Hkv, Dv] in slots int64 [n]."""
        if self.stored is not None and self.stored.scales is None:
            return self.stored.rows(slots)
        keys, values = self.pool.get_rows(self.layer, slots)
        return keys.float(), values.float()

    def attend(self, q: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """Compute causal attention of q [T, Hq, D] over the cache, [T, Hq, Dv] of q's dtype.

        Hq is a multiple of Hkv; query head h reads KV head h // (Hq / Hkv). The plan determines how
        far back queries see.
        """
        shape = (*q.shape[:2], self.pool.config.value_dim)
        if isinstance(plan, TorchPlan):
            out = q.new_empty(shape)
            torch_attention(q, plan, scale, out, self.rows, self._decode)
        else:
            out = q.new_zeros(shape) if plan.padded else q.new_empty(shape)
            triton_attention(q, *self._for_kernels(plan), scale, out)
        return out

    def _for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        """Return tensors that a kernel can read, and the plan over these tensors."""
        if self.stored is not None:
            return self.stored, plan
        slots, gathered = plan.gathered
        keys, values = self.pool.get_rows(self.layer, slots)
        return StoredKV(k=keys, v=values), gathered

    def label(self, slots: Tensor) -> None:
        """Store labels for sparse decode, once the rows of `slots` are stored."""


class SparseKV(LayerKV):
    """KV cache of one layer with labels, by which decode chooses tokens. Prefill reads all."""

    def __init__(self, pool: KVPool, layer: int, sparsity: DoubleSparsity) -> None:
        super().__init__(pool, layer)
        assert isinstance(pool, DoubleSparseTokenToKVPool) and self.stored is not None
        self._keys, self._labels = self.stored.k, pool
        kv_heads = self._keys.shape[1]
        self._channels = torch.tensor(sparsity.of_layer(layer, kv_heads), device=pool.device)
        self._heads = torch.arange(kv_heads, device=pool.device)[:, None]
        counts = sparsity.heavy_token_num, sparsity.recent_token_num
        labels = pool.get_label_buffer(layer)
        self._decode = partial(decode_sparse, self.stored, labels, self._channels, *counts)

    def label(self, slots: Tensor) -> None:
        labels = self._keys[slots[:, None, None], self._heads, self._channels]
        self._labels.set_label_buffer(self.layer, slots, labels)


class Attention:
    """Grouped-query attention over views of the weight store, valid across pause and resume."""

    def __init__(self, config: AttentionConfig, index: int, parts: LayerParts) -> None:
        self.config = config
        name, store = f"model.layers.{index}.self_attn.", parts.store
        bias = store.tensor(name + "qkv_proj.bias") if config.qkv_bias else None
        self._qkv = parts.product(name + "qkv_proj", bias)
        self._q_norm = store.tensor(name + "q_norm.weight") if config.qk_norm else None
        self._k_norm = store.tensor(name + "k_norm.weight") if config.qk_norm else None
        self._ranks = parts.ranks
        adds_bias = config.o_bias and parts.ranks.rank == 0
        bias = store.tensor(name + "o_proj.bias") if adds_bias else None
        self._o = parts.product(name + "o_proj", bias)
        self._eps, self._centred = parts.norm_eps, parts.zero_centred_norms
        self._rotary = parts.rotary(config.rope)
        kv = LayerKV(parts.pool, index)
        self._kv = kv if parts.sparsity is None else SparseKV(parts.pool, index, parts.sparsity)
        assert isinstance(kv.pool, MHATokenToKVPool)
        self._layer, self._pool = kv.layer, kv.pool
        self._scale = config.head_dim**-0.5
        self._stage = f"attention of layer {index}"

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        config = self.config
        heads = self._qkv(x, batch).view(x.shape[0], -1, config.head_dim)
        q, k, v = heads.split((config.query_rows, config.num_kv_heads, config.num_kv_heads), dim=1)
        if config.output_gate:
            q, gate = q[:, 0::2], q[:, 1::2]
        if self._q_norm is not None and self._k_norm is not None:
            q = rms_norm(q, self._q_norm, self._eps, zero_centred=self._centred)
            k = rms_norm(k, self._k_norm, self._eps, zero_centred=self._centred)
        at = batch if config.window is None else batch.sliding or batch
        q = self._pool.set_rotated_kv_buffer(
            self._layer, at.slots, q, k, v, batch.positions, self._rotary
        )
        self._kv.label(at.slots)
        out = self._kv.attend(q, at.plan, self._scale)
        if config.output_gate:
            out = out * torch.sigmoid(gate)
        out = self._o(out.reshape(x.shape[0], -1), batch)
        return self._ranks.sum(out, self._stage)

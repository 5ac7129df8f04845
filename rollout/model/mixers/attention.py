"""Grouped-query attention with rotary positions (Llama, Mistral, Qwen2, Qwen3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from rollout.model.config import RopeConfig
from rollout.model.mixers.base import Batch, MixerConfig, Parts
from rollout.model.params import Group, one, stack
from rollout.ops.attention import paged_attention
from rollout.ops.norm import rms_norm
from rollout.ops.rotary import rotate_and_store


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """qkv_bias, o_bias: biases. qk_norm: RMSNorm of every query and key head (Qwen3). window: keys that a query sees,
    its own included; None: all up to its own."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    window: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        if self.window is not None and self.window < 1:
            raise ValueError(f"sliding_window={self.window} must be at least 1 token, or null for full attention")

    def groups(self, hidden_size: int, layer: str) -> list[Group]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attn = layer + "self_attn."
        qkv = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        groups = [
            stack(attn + "qkv_proj.weight", [(f"{attn}{name}.weight", (rows, hidden_size)) for name, rows in qkv])
        ]
        if self.qkv_bias:
            groups.append(stack(attn + "qkv_proj.bias", [(f"{attn}{name}.bias", (rows,)) for name, rows in qkv]))
        if self.qk_norm:
            groups += [one(attn + "q_norm.weight", self.head_dim), one(attn + "k_norm.weight", self.head_dim)]
        groups.append(one(attn + "o_proj.weight", hidden_size, q))
        if self.o_bias:
            groups.append(one(attn + "o_proj.bias", hidden_size))
        return groups

    def build(self, index: int, parts: Parts) -> Attention:
        return Attention(self, index, parts)


class Attention:
    """Weights are views; they stay valid over pause and resume."""

    def __init__(self, config: AttentionConfig, index: int, parts: Parts) -> None:
        self.config = config
        name, store = f"model.layers.{index}.self_attn.", parts.store
        self._qkv = store.tensor(name + "qkv_proj.weight")
        self._qkv_bias = store.tensor(name + "qkv_proj.bias") if config.qkv_bias else None
        self._q_norm = store.tensor(name + "q_norm.weight") if config.qk_norm else None
        self._k_norm = store.tensor(name + "k_norm.weight") if config.qk_norm else None
        self._o = store.tensor(name + "o_proj.weight")
        self._o_bias = store.tensor(name + "o_proj.bias") if config.o_bias else None
        self._eps = parts.model.rms_norm_eps
        self._rotary = parts.rotary(config.rope, config.head_dim)
        self._layer, self._pool = index, parts.cache.pool
        self._scale = config.head_dim**-0.5

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        config = self.config
        heads = F.linear(x, self._qkv, self._qkv_bias).view(x.shape[0], -1, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = rms_norm(q, self._q_norm, self._eps), rms_norm(k, self._k_norm, self._eps)
        out = self._attend(q, k, v, batch)
        return F.linear(out.reshape(x.shape[0], -1), self._o, self._o_bias)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Rotates q and k, stores k and v, and attends: [T, Hq, D], [T, Hkv, D], [T, Hkv, D] -> [T, Hq, D]."""
        caches = self._pool.get_kv_buffer(self._layer)
        at = batch if self.config.window is None or batch.sliding is None else batch.sliding
        q = rotate_and_store(q, k, v, batch.positions, at.slots, self._rotary.cos, self._rotary.sin, *caches)
        return paged_attention(q, *caches, at.plan, self._scale)

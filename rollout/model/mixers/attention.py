"""Grouped-query attention with rotary positions (Llama, Mistral, Qwen2, Qwen3, Qwen3-Next)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcache.staging import heads_per_rank
from rollout.model.layer_kv import layer_kv
from rollout.model.mixers.base import Batch, LayerParts, MixerConfig, RopeConfig
from rollout.ops.norm_and_activation import rms_norm
from rollout.ops.products import linear
from rollout.weights.params import ParamGroup, Split, Splits, one, stack


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """qkv_bias, o_bias: biases. qk_norm: RMSNorm of every query and key head (Qwen3). window: keys
    that a query sees, its own included; None: all up to its own.

    output_gate: q_proj has a gate behind each head's query, whose sigmoid multiplies the head's
    output. rotary_dim: how much of a head is rotated, None: all (both Qwen3-Next).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    output_gate: bool = False
    rotary_dim: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        assert self.window is None or self.window >= 1
        if (self.rotary_dim or 0) % 2:
            raise ValueError(f"rotary_dim={self.rotary_dim} must be even")

    @property
    def query_rows(self) -> int:
        """Rows of q_proj in heads: a query each, and a gate behind it where outputs are gated."""
        return self.num_heads * (2 if self.output_gate else 1)

    def groups(self, hidden_size: int, layer: str) -> list[ParamGroup]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attn = layer + "self_attn."
        qkv = (("q_proj", self.query_rows * self.head_dim), ("k_proj", kv), ("v_proj", kv))
        groups = [
            stack(
                attn + "qkv_proj.weight",
                [(f"{attn}{name}.weight", (rows, hidden_size)) for name, rows in qkv],
            )
        ]
        if self.qkv_bias:
            biases = [(f"{attn}{name}.bias", (rows,)) for name, rows in qkv]
            groups.append(stack(attn + "qkv_proj.bias", biases))
        if self.qk_norm:
            groups += [
                one(attn + "q_norm.weight", self.head_dim),
                one(attn + "k_norm.weight", self.head_dim),
            ]
        groups.append(one(attn + "o_proj.weight", hidden_size, q))
        if self.o_bias:
            groups.append(one(attn + "o_proj.bias", hidden_size))
        return groups

    def splits(self) -> Splits:
        dim = self.head_dim
        queries = [Split(dim=0, units=(self.query_rows // self.num_heads * dim,))]
        keys = [Split(dim=0, units=(dim,), copies=True)]
        rows = {"q": queries, "k": keys, "v": keys}
        found: dict[str, list[Split]] = {"self_attn.o_proj.weight": [Split(dim=1, units=(dim,))]}
        for kind in ("weight", "bias"):
            found |= {f"self_attn.{name}_proj.{kind}": split for name, split in rows.items()}
        return found

    def of_rank(self, size: int) -> AttentionConfig:
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=heads_per_rank(size, self.num_kv_heads),
        )

    def build(self, index: int, parts: LayerParts) -> Attention:
        return Attention(self, index, parts)


class Attention:
    """Weights are views; they stay valid over pause and resume."""

    def __init__(self, config: AttentionConfig, index: int, parts: LayerParts) -> None:
        self.config = config
        name, store = f"model.layers.{index}.self_attn.", parts.store
        self._qkv = store.tensor(name + "qkv_proj.weight")
        self._qkv_bias = store.tensor(name + "qkv_proj.bias") if config.qkv_bias else None
        self._q_norm = store.tensor(name + "q_norm.weight") if config.qk_norm else None
        self._k_norm = store.tensor(name + "k_norm.weight") if config.qk_norm else None
        self._o = store.tensor(name + "o_proj.weight")
        self._ranks = parts.ranks
        self._o_bias = (
            store.tensor(name + "o_proj.bias") if config.o_bias and parts.ranks.rank == 0 else None
        )
        self._eps, self._centred = parts.norm_eps, parts.zero_centred_norms
        self._rotary = parts.rotary(config.rope, config.rotary_dim or config.head_dim)
        self._kv = layer_kv(parts.pool, index, parts.sparsity)
        self._scale = config.head_dim**-0.5
        self._stage = f"attention of layer {index}"

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        config = self.config
        heads = linear(x, self._qkv, self._qkv_bias).view(x.shape[0], -1, config.head_dim)
        q, k, v = heads.split((config.query_rows, config.num_kv_heads, config.num_kv_heads), dim=1)
        if config.output_gate:
            q, gate = q[:, 0::2], q[:, 1::2]
        if self._q_norm is not None and self._k_norm is not None:
            q = rms_norm(q, self._q_norm, self._eps, zero_centred=self._centred)
            k = rms_norm(k, self._k_norm, self._eps, zero_centred=self._centred)
        out = self._attend(q, k, v, batch)
        if config.output_gate:
            out = out * torch.sigmoid(gate)
        out = linear(out.reshape(x.shape[0], -1), self._o, self._o_bias)
        return self._ranks.sum(out, self._stage)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Rotates q and k, stores k and v, and attends: [T, Hq, D], [T, Hkv, D], [T, Hkv, D] -> [T,
        Hq, D].
        """
        at = batch if self.config.window is None or batch.sliding is None else batch.sliding
        q = self._kv.store(q, k, v, batch.positions, at.slots, self._rotary)
        return self._kv.attend(q, at.plan, self._scale)

"""The dense decoder as plain functions over views of the weight store."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.model.config import ModelConfig
from rollout.model.rotary import RotaryTables, apply_rotary
from rollout.weights import WeightStore

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]; stores k and v in the cache first."""


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """Views; they stay valid over pause and resume."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor

    @classmethod
    def of(cls, store: WeightStore, config: ModelConfig) -> "DecoderWeights":
        return cls(
            embed=store.tensor("model.embed_tokens.weight"),
            layers=tuple(_layer_weights(store, config, layer) for layer in range(config.num_layers)),
            norm=store.tensor("model.norm.weight"),
            lm_head=store.tensor("lm_head.weight"),
        )


def _layer_weights(store: WeightStore, config: ModelConfig, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    attn = prefix + "self_attn."
    return LayerWeights(
        input_norm=store.tensor(prefix + "input_layernorm.weight"),
        qkv=store.tensor(attn + "qkv_proj.weight"),
        qkv_bias=store.tensor(attn + "qkv_proj.bias") if config.qkv_bias else None,
        q_norm=store.tensor(attn + "q_norm.weight") if config.qk_norm else None,
        k_norm=store.tensor(attn + "k_norm.weight") if config.qk_norm else None,
        o=store.tensor(attn + "o_proj.weight"),
        o_bias=store.tensor(attn + "o_proj.bias") if config.o_bias else None,
        post_norm=store.tensor(prefix + "post_attention_layernorm.weight"),
        gate_up=store.tensor(prefix + "mlp.gate_up_proj.weight"),
        down=store.tensor(prefix + "mlp.down_proj.weight"),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) over the last dimension, in fp32 until the weight, as transformers does."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def forward(
    config: ModelConfig,
    weights: DecoderWeights,
    tables: RotaryTables,
    token_ids: Tensor,
    positions: Tensor,
    logits_at: Tensor,
    *,
    attend: Attend,
) -> Tensor:
    """Run tokens of several requests, packed one after the other.

    token_ids, positions: int64 [T]. logits_at: int64 [R], tokens whose logits are wanted. Returns fp32 [R, vocab].
    """
    x = F.embedding(token_ids, weights.embed)
    cos, sin = tables.at(positions, x.dtype)
    for index, layer in enumerate(weights.layers):
        x = x + _attention(config, index, layer, rms_norm(x, layer.input_norm, config.rms_norm_eps), cos, sin, attend)
        x = x + _mlp(layer, rms_norm(x, layer.post_norm, config.rms_norm_eps))
    x = rms_norm(x[logits_at], weights.norm, config.rms_norm_eps)
    return F.linear(x, weights.lm_head).float()


def _attention(
    config: ModelConfig, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
) -> Tensor:
    heads = F.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, config.head_dim)
    q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config.rms_norm_eps), rms_norm(k, layer.k_norm, config.rms_norm_eps)
    out = attend(index, apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
    return F.linear(out.reshape(x.shape[0], -1), layer.o, layer.o_bias)


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, layer.down)

"""The dense decoder as plain functions over views of the weight store."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from rollout.model.config import ModelConfig
from rollout.ops.activation import silu_mul
from rollout.ops.norm import add_rms_norm, rms_norm
from rollout.weights import WeightStore

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]; rotates q and k, and stores k and v first."""


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


def forward(config: ModelConfig, weights: DecoderWeights, token_ids: Tensor, *, attend: Attend) -> Tensor:
    """Run tokens of several requests, packed one after the other: int64 [T] -> normed hidden states [T, hidden].

    Between layers the residual stream and the product that is to be added to it travel apart, so that each addition is
    one kernel with the norm that follows.
    """
    eps = config.rms_norm_eps
    residual = F.embedding(token_ids, weights.embed)
    x = rms_norm(residual, weights.layers[0].input_norm, eps)
    following = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
    for index, (layer, norm) in enumerate(zip(weights.layers, following, strict=True)):
        x, residual = add_rms_norm(_attention(config, index, layer, x, attend), residual, layer.post_norm, eps)
        x, residual = add_rms_norm(_mlp(layer, x), residual, norm, eps)
    return x


def _attention(config: ModelConfig, index: int, layer: LayerWeights, x: Tensor, attend: Attend) -> Tensor:
    heads = F.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, config.head_dim)
    q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config.rms_norm_eps), rms_norm(k, layer.k_norm, config.rms_norm_eps)
    out = attend(index, q, k, v)
    return F.linear(out.reshape(x.shape[0], -1), layer.o, layer.o_bias)


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    return F.linear(silu_mul(F.linear(x, layer.gate_up)), layer.down)

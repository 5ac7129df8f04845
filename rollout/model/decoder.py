"""The decoder as a plain function over views of the weight store and one mixer a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rollout.model.config import ModelConfig
from rollout.model.mixers.base import Batch, Mixer
from rollout.model.mlp import MLP
from rollout.ops.norm_and_activation import add_rms_norm, rms_norm
from rollout.parallel import TensorParallel
from rollout.weights.store import WeightStore


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Holds what every layer has beside its mixer."""

    input_norm: Tensor
    post_norm: Tensor
    mlp: MLP


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """Views; they stay valid over pause and resume."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor

    @classmethod
    def of(cls, store: WeightStore, config: ModelConfig) -> DecoderWeights:
        return cls(
            embed=store.tensor("model.embed_tokens.weight"),
            layers=tuple(
                _layer_weights(store, config, layer) for layer in range(config.num_layers)
            ),
            norm=store.tensor("model.norm.weight"),
            lm_head=store.tensor("lm_head.weight"),
        )


def _layer_weights(store: WeightStore, config: ModelConfig, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    return LayerWeights(
        input_norm=store.tensor(prefix + "input_layernorm.weight"),
        post_norm=store.tensor(prefix + "post_attention_layernorm.weight"),
        mlp=config.mlps[layer].build(store, prefix + "mlp."),
    )


def forward(
    weights: DecoderWeights,
    mixers: Sequence[Mixer],
    token_ids: Tensor,
    batch: Batch,
    config: ModelConfig,
    ranks: TensorParallel,
) -> Tensor:
    """Run tokens of several requests, packed one after the other: int64 [T] -> normed hidden states
    [T, hidden].

    Between layers the residual stream and the product that is to be added to it travel apart, so
    that each addition is one kernel with the norm that follows.
    """
    eps, centred = config.rms_norm_eps, config.zero_centred_norms
    residual = ranks.embed(token_ids, weights.embed)
    x = rms_norm(residual, weights.layers[0].input_norm, eps, zero_centred=centred)
    following = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
    layers = zip(mixers, weights.layers, following, strict=True)
    for index, (mixer, layer, norm) in enumerate(layers):
        for load in batch.loads:
            load.wait(index)
        x, residual = add_rms_norm(
            mixer(x, batch), residual, layer.post_norm, eps, zero_centred=centred
        )
        x, residual = add_rms_norm(
            ranks.sum(layer.mlp(x), "MLP"), residual, norm, eps, zero_centred=centred
        )
    return x

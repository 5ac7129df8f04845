"""A decoder: what it needs to know of a model, independent of where that was read from; names and
shapes of its parameters in memory order, fused where the model multiplies once; what one
tensor-parallel rank computes and keeps; and the forward pass, a plain function over views of the
weight store and one mixer a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvcache import KVLayout
from kvcache.staging import heads_per_rank
from rollout.model.mixers.base import Batch, Mixer, MixerConfig
from rollout.model.mlp import MLP, ExpertsConfig, MLPConfig
from rollout.ops.norm_and_activation import add_rms_norm, rms_norm
from rollout.parallel import TensorParallel
from rollout.weights.messages import Manifest
from rollout.weights.params import VOCABULARY, ParamGroup, one, shard_groups
from rollout.weights.store import WeightStore, build_manifest


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of pre-norm layers: a mixer of tokens (attention, say), then an MLP; RMSNorm before
    both.

    mixers, mlps: one a layer. stop_token_ids: tokens that end an answer. hf_config: the Hugging
    Face config it was read from, which kvcache.layout reads, too. zero_centred_norms: RMSNorms
    multiply by 1 + weight.
    """

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    mixers: tuple[MixerConfig, ...]
    mlps: tuple[MLPConfig, ...]
    stop_token_ids: frozenset[int]
    hf_config: Any = field(repr=False, compare=False)
    zero_centred_norms: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(mlp, ExpertsConfig) for mlp in self.mlps)

    def with_fp32_routers(self) -> ModelConfig:
        """Returns this model with routers that multiply and weigh in fp32. ValueError without
        experts.
        """
        if not self.has_experts:
            raise ValueError(
                "fp32_router=True is for mixtures of experts, and this model is dense; leave it out"
            )
        mlps = (
            replace(mlp, wide_router=True, wide_weights=True)
            if isinstance(mlp, ExpertsConfig)
            else mlp
            for mlp in self.mlps
        )
        return replace(self, mlps=tuple(mlps))


def parameter_groups(config: ModelConfig) -> list[ParamGroup]:
    """Every stored parameter, in memory order."""
    groups = [one("model.embed_tokens.weight", config.vocab_size, config.hidden_size)]
    for index in range(config.num_layers):
        groups += _layer_groups(config, index)
    groups.append(one("model.norm.weight", config.hidden_size))
    if not config.tie_word_embeddings:
        groups.append(one("lm_head.weight", config.vocab_size, config.hidden_size))
    return groups


def buffers(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what is no parameter: see `MLPConfig.buffers`."""
    found: dict[str, tuple[int, ...]] = {}
    for index, mlp in enumerate(config.mlps):
        found |= mlp.buffers(f"model.layers.{index}.mlp.")
    return found


def aliases(config: ModelConfig) -> dict[str, str]:
    """Tied names -> stored names."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


def _layer_groups(config: ModelConfig, index: int) -> list[ParamGroup]:
    hidden, layer = config.hidden_size, f"model.layers.{index}."
    return [
        one(layer + "input_layernorm.weight", hidden),
        *config.mixers[index].groups(hidden, layer),
        one(layer + "post_attention_layernorm.weight", hidden),
        *config.mlps[index].groups(hidden, layer + "mlp."),
    ]


def rank_groups(model: ModelConfig, rank: int, size: int, experts: int = 1) -> list[ParamGroup]:
    """Its parameters. experts: so many parts are made of each layer's experts. ValueError naming
    what these counts do not divide.
    """
    if experts > 1 and not model.has_experts:
        raise ValueError(
            f"expert_parallel={experts} is for mixtures of experts, and this model is dense; use 1"
        )
    splits = dict(VOCABULARY)
    for mixer in set(model.mixers):
        splits |= mixer.splits()
    for mlp in set(model.mlps):
        splits |= mlp.splits(size, experts)
    return shard_groups(parameter_groups(model), splits, rank, size)


def whole_manifest(model: ModelConfig, dtype: torch.dtype) -> Manifest:
    """Returns where an engine that has the whole model keeps each parameter."""
    return build_manifest(rank_groups(model, 0, 1), aliases(model), dtype)


def rank_model(model: ModelConfig, rank: int, size: int, experts: int = 1) -> ModelConfig:
    """The model with one rank's heads, which knows which experts it has; everything else keeps its
    size.
    """
    return replace(
        model,
        mixers=tuple(mixer.of_rank(size) for mixer in model.mixers),
        mlps=tuple(mlp.of_rank(rank, size, experts) for mlp in model.mlps),
    )


def rank_layout(kv_layout: KVLayout, size: int) -> KVLayout:
    """One rank's part of every row: its KV heads, one at least; latent rows whole. Of states of
    linear layers, its heads' channels.
    """
    states = kv_layout.temporal_shape and (
        kv_layout.temporal_shape[0] // size,
        *kv_layout.temporal_shape[1:],
    )
    return replace(
        kv_layout,
        rows={
            name: (heads_per_rank(size, heads), dim)
            for name, (heads, dim) in kv_layout.rows.items()
        },
        conv_shapes=tuple((channels // size, *rest) for channels, *rest in kv_layout.conv_shapes),
        temporal_shape=states,
    )


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

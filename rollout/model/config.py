"""Defines what the decoder needs to know of a model, independent of where it was read from; names
and shapes of its parameters in memory order, fused where the model multiplies once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rollout.model.mixers.base import MixerConfig
from rollout.model.mlp import ExpertsConfig, MLPConfig
from rollout.model.params import Group, one


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


def parameter_groups(config: ModelConfig) -> list[Group]:
    """Every stored parameter, in memory order."""
    groups = [one("model.embed_tokens.weight", config.vocab_size, config.hidden_size)]
    for index in range(config.num_layers):
        groups += _layer_groups(config, index)
    groups.append(one("model.norm.weight", config.hidden_size))
    if not config.tie_word_embeddings:
        groups.append(one("lm_head.weight", config.vocab_size, config.hidden_size))
    return groups


def constants(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what is no parameter: see `MLPConfig.constants`."""
    found: dict[str, tuple[int, ...]] = {}
    for index, mlp in enumerate(config.mlps):
        found |= mlp.constants(f"model.layers.{index}.mlp.")
    return found


def aliases(config: ModelConfig) -> dict[str, str]:
    """Tied names -> stored names."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


def _layer_groups(config: ModelConfig, index: int) -> list[Group]:
    hidden, layer = config.hidden_size, f"model.layers.{index}."
    return [
        one(layer + "input_layernorm.weight", hidden),
        *config.mixers[index].groups(hidden, layer),
        one(layer + "post_attention_layernorm.weight", hidden),
        *config.mlps[index].groups(hidden, layer + "mlp."),
    ]

"""A model as one tensor-parallel rank computes and keeps it."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcache import KVLayout
from kvcache.staging import heads_per_rank
from rollout.model.config import ModelConfig, aliases, parameter_groups
from rollout.model.params import VOCABULARY, Group, shard_groups
from rollout.types import Manifest
from rollout.weights.store import build_manifest


def rank_groups(model: ModelConfig, rank: int, size: int, experts: int = 1) -> list[Group]:
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


def rank_layout(kept: KVLayout, size: int) -> KVLayout:
    """One rank's part of every row: its KV heads, one at least; latent rows whole. Of states of
    linear layers, its heads' channels.
    """
    states = kept.temporal_shape and (kept.temporal_shape[0] // size, *kept.temporal_shape[1:])
    return replace(
        kept,
        rows={name: (heads_per_rank(size, heads), dim) for name, (heads, dim) in kept.rows.items()},
        conv_shapes=tuple((channels // size, *rest) for channels, *rest in kept.conv_shapes),
        temporal_shape=states,
    )

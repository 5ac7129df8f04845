"""A model as one tensor-parallel rank computes and keeps it."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcache import KVLayout
from kvcache.staging import heads_per_rank
from rollout.model.config import ModelConfig
from rollout.model.layout import aliases, parameter_groups
from rollout.model.mixers.attention import AttentionConfig
from rollout.model.params import Group
from rollout.model.sharding import decoder_splits, shard_groups
from rollout.types import Manifest
from rollout.weights.store import build_manifest


def rank_groups(model: ModelConfig, rank: int, size: int) -> list[Group]:
    """Its parameters. ValueError naming what this rank count does not divide, or what has no heads
    to divide.
    """
    groups = parameter_groups(model)
    if size == 1:
        return groups
    return shard_groups(groups, decoder_splits(_attention(model)[0].head_dim), rank, size)


def whole_manifest(model: ModelConfig, dtype: torch.dtype) -> Manifest:
    """Returns where an engine that has the whole model keeps each parameter."""
    return build_manifest(rank_groups(model, 0, 1), aliases(model), dtype)


def rank_model(model: ModelConfig, size: int) -> ModelConfig:
    """The model with one rank's heads; everything else keeps its size."""
    if size == 1:
        return model
    mixers = tuple(
        replace(
            each,
            num_heads=each.num_heads // size,
            num_kv_heads=heads_per_rank(size, each.num_kv_heads),
        )
        for each in _attention(model)
    )
    return replace(model, mixers=mixers)


def rank_layout(kept: KVLayout, size: int) -> KVLayout:
    """One rank's part of every row: its KV heads, one at least."""
    if size == 1:
        return kept
    return replace(
        kept,
        rows={name: (heads_per_rank(size, heads), dim) for name, (heads, dim) in kept.rows.items()},
    )


def _attention(model: ModelConfig) -> list[AttentionConfig]:
    found = [
        each for each in model.mixers if isinstance(each, AttentionConfig) and not each.output_gate
    ]
    if len(found) != model.num_layers:
        raise ValueError(
            "tensor parallel needs plain attention in every layer (Llama, Mistral, Mixtral, Qwen2, "
            "Qwen3, Qwen3-MoE); latent attention and Qwen3-Next run with tensor_parallel_size=1"
        )
    return found

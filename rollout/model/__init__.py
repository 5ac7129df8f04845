"""Decoder models: checkpoint configuration, parameters of each rank, layers."""

from rollout.model.decoder import (
    ExpertsConfig,
    ModelConfig,
    rank_groups,
    rank_layout,
    whole_manifest,
)
from rollout.model.loading import (
    checkpoint_files,
    expert_routing,
    load_model_config,
    open_checkpoint,
    parameter_shapes,
    resolve_model,
    stop_token_ids,
    stored_buffers,
)
from rollout.model.mixers.base import inverse_frequencies
from rollout.ops.experts import Routing
from rollout.weights.params import Stored, is_unused, spellings

__all__ = [
    "ExpertsConfig",
    "ModelConfig",
    "Routing",
    "Stored",
    "checkpoint_files",
    "expert_routing",
    "inverse_frequencies",
    "is_unused",
    "load_model_config",
    "open_checkpoint",
    "parameter_shapes",
    "rank_groups",
    "rank_layout",
    "resolve_model",
    "spellings",
    "stop_token_ids",
    "stored_buffers",
    "whole_manifest",
]

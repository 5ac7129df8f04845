"""Decoder models: checkpoint configuration, parameters of each rank, layers."""

from rollout.model.adapter_params import AdapterFolder, adaptable
from rollout.model.decoder import (
    ExpertsConfig,
    GatedConfig,
    ModelConfig,
    rank_groups,
    whole_manifest,
)
from rollout.model.hub import resolve_model
from rollout.model.loading import (
    expert_routing,
    load_model_config,
    longest_context,
    parameter_shapes,
    stored_buffers,
)
from rollout.model.model_folder import (
    load_hf_config,
    open_checkpoint,
    open_tensors,
    read_json,
    token_ids,
)
from rollout.ops.routing import Routing
from rollout.weights.params import Stored, spellings

__all__ = [
    "AdapterFolder",
    "ExpertsConfig",
    "GatedConfig",
    "ModelConfig",
    "Routing",
    "Stored",
    "adaptable",
    "expert_routing",
    "load_hf_config",
    "load_model_config",
    "longest_context",
    "open_checkpoint",
    "open_tensors",
    "parameter_shapes",
    "rank_groups",
    "read_json",
    "resolve_model",
    "spellings",
    "stored_buffers",
    "token_ids",
    "whole_manifest",
]

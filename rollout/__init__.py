"""A generating engine for RL: paged KV cache, continuous batching, memory that sleeps, weights
replaced in place.
"""

from rollout.config import EngineConfig
from rollout.engine import Engine
from rollout.model.layer_kv import DoubleSparsity, heavy_channels
from rollout.protocols import Progress, Rollout, UpdatableEngine
from rollout.serving.tiers import KVTiers
from rollout.types import (
    CommitReceipt,
    Completion,
    Manifest,
    ModuleTensor,
    PackedBox,
    ParamSlice,
    SamplingParams,
    VerifyReceipt,
    WeightOffer,
    WeightUpdateError,
    WriteReceipt,
)

__all__ = [
    "CommitReceipt",
    "Completion",
    "DoubleSparsity",
    "Engine",
    "EngineConfig",
    "KVTiers",
    "Manifest",
    "ModuleTensor",
    "PackedBox",
    "ParamSlice",
    "Progress",
    "Rollout",
    "SamplingParams",
    "UpdatableEngine",
    "VerifyReceipt",
    "WeightOffer",
    "WeightUpdateError",
    "WriteReceipt",
    "heavy_channels",
]

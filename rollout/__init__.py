"""A generating engine for RL: paged KV cache, continuous batching, memory that sleeps, weights
replaced in place.
"""

from rollout.config import DoubleSparsity, EngineConfig, KVTiers
from rollout.engine import Engine
from rollout.errors import WeightUpdateError
from rollout.model.double_sparsity import heavy_channels
from rollout.protocols import Progress, Rollout, UpdatableEngine
from rollout.requests import Completion, SamplingParams
from rollout.weights.messages import (
    CommitReceipt,
    Manifest,
    ModuleTensor,
    PackedBox,
    ParamSlice,
    VerifyReceipt,
    WeightOffer,
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

"""A generating engine for RL: paged KV cache, continuous batching, sleep, in-place updates."""

from memsaver.system.hidden_packages import refuse_hidden

refuse_hidden("kvcache")
from rollout.config import AdapterSlots, DoubleSparsity, EngineConfig, KVTiers
from rollout.engine.engine import Engine
from rollout.errors import WeightUpdateError
from rollout.loop import (
    AsyncEngine,
    AsyncReplicas,
    EngineLoop,
    FollowingLoop,
    QueueFull,
    TokenStream,
)
from rollout.model.double_sparsity import heavy_channels
from rollout.pool_size import pool_size
from rollout.protocols import Rollout, UpdatableEngine
from rollout.requests import Completion, Output, Progress, SamplingParams

__all__ = [
    "AdapterSlots",
    "AsyncEngine",
    "AsyncReplicas",
    "Completion",
    "DoubleSparsity",
    "Engine",
    "EngineConfig",
    "EngineLoop",
    "FollowingLoop",
    "KVTiers",
    "Output",
    "Progress",
    "QueueFull",
    "Rollout",
    "SamplingParams",
    "TokenStream",
    "UpdatableEngine",
    "WeightUpdateError",
    "heavy_channels",
    "pool_size",
]

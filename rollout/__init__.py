"""A generating engine for RL: paged KV cache, continuous batching, sleep, in-place updates."""

from memsaver.system.hidden_packages import refuse_hidden

refuse_hidden("kvcache")
from rollout.config import AdapterSlots, DoubleSparsity, EngineConfig, KVTiers
from rollout.engine.engine import Engine
from rollout.errors import WeightUpdateError
from rollout.loop import EngineLoop, FollowingLoop
from rollout.model.double_sparsity import heavy_channels
from rollout.pool_size import pool_size
from rollout.protocols import Rollout, UpdatableEngine
from rollout.requests import Completion, Output, Progress, SamplingParams

__all__ = [
    "AdapterSlots",
    "Completion",
    "DoubleSparsity",
    "Engine",
    "EngineConfig",
    "EngineLoop",
    "FollowingLoop",
    "KVTiers",
    "Output",
    "Progress",
    "Rollout",
    "SamplingParams",
    "UpdatableEngine",
    "WeightUpdateError",
    "heavy_channels",
    "pool_size",
]

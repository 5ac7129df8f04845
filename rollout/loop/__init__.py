"""Threads and processes that own an engine, which several callers share."""

from rollout.loop.async_engine import AsyncEngine, QueueFull, TokenStream
from rollout.loop.async_replicas import AsyncReplicas
from rollout.loop.engine_loop import EngineLoop, FollowingLoop
from rollout.loop.loop_actor import LoopActor
from rollout.loop.rank_processes import RankProcesses
from rollout.loop.router import Router, most_tokens

__all__ = [
    "AsyncEngine",
    "AsyncReplicas",
    "EngineLoop",
    "FollowingLoop",
    "LoopActor",
    "QueueFull",
    "RankProcesses",
    "Router",
    "TokenStream",
    "most_tokens",
]

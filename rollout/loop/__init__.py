"""Threads and processes that own an engine, which several callers share."""

from rollout.loop.engine_loop import EngineLoop, FollowingLoop
from rollout.loop.loop_actor import LoopActor
from rollout.loop.rank_processes import RankProcesses
from rollout.loop.router import Router, most_tokens

__all__ = [
    "EngineLoop",
    "FollowingLoop",
    "LoopActor",
    "RankProcesses",
    "Router",
    "most_tokens",
]

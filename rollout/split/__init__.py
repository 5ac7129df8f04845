"""Prefill and decode by two engines in separate processes, with any two tensor-parallel sizes."""

from rollout.errors import PeerLostError
from rollout.split.prompt_server import PromptServer
from rollout.split.remote_prompts import RemotePrompts, SplitStats
from rollout.split.transport import GroupTransport, MappedTransport, Transport

__all__ = [
    "GroupTransport",
    "MappedTransport",
    "PeerLostError",
    "PromptServer",
    "RemotePrompts",
    "SplitStats",
    "Transport",
]

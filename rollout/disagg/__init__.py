"""Prefill and decode by two engines in separate processes, with any two tensor-parallel sizes."""

from rollout.disagg.prompt_server import PromptServer
from rollout.disagg.remote_prompts import RemotePrompts, SplitStats
from rollout.disagg.transport import GroupTransport, MappedTransport, Transport
from rollout.errors import PeerLostError

__all__ = [
    "GroupTransport",
    "MappedTransport",
    "PeerLostError",
    "PromptServer",
    "RemotePrompts",
    "SplitStats",
    "Transport",
]

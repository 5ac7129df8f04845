"""Prefill and decode by two engines in separate processes, with any two tensor-parallel sizes."""

from rollout.disagg.decode import DecodeEngine, SplitStats
from rollout.disagg.prefill import PrefillEngine
from rollout.disagg.transport import GroupTransport, MappedTransport, Transport
from rollout.errors import PeerLostError

__all__ = [
    "DecodeEngine",
    "GroupTransport",
    "MappedTransport",
    "PeerLostError",
    "PrefillEngine",
    "SplitStats",
    "Transport",
]

"""Prefill and decode in two engines, in processes of their own and of any tensor-parallel sizes."""

from rollout.disagg.decode import DecodeEngine, GroupReader, MappedReader, Reader, SplitStats
from rollout.disagg.line import accept, dial
from rollout.disagg.prefill import GroupWriter, MappedWriter, PrefillEngine, Writer
from rollout.types import PeerLostError

__all__ = [
    "DecodeEngine",
    "GroupReader",
    "GroupWriter",
    "MappedReader",
    "MappedWriter",
    "PeerLostError",
    "PrefillEngine",
    "Reader",
    "SplitStats",
    "Writer",
    "accept",
    "dial",
]

"""Prefill and decode in two engines, in processes of their own and of any tensor-parallel sizes."""

from rollout.split.decode import DecodeEngine, SplitStats
from rollout.split.line import accept, dial
from rollout.split.prefill import PrefillEngine
from rollout.split.transport import GroupReader, GroupWriter, MappedReader, MappedWriter, Reader, Writer

__all__ = [
    "DecodeEngine",
    "GroupReader",
    "GroupWriter",
    "MappedReader",
    "MappedWriter",
    "PrefillEngine",
    "Reader",
    "SplitStats",
    "Writer",
    "accept",
    "dial",
]

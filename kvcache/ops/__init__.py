"""Triton kernels of the pools, each with a torch reference implementation."""

from kvcache.ops.rotary import RotaryTables, rotate_heads
from kvcache.ops.staging_copy import Writers, gather_staged, scatter_staged, staged_bytes

__all__ = [
    "RotaryTables",
    "Writers",
    "gather_staged",
    "rotate_heads",
    "scatter_staged",
    "staged_bytes",
]

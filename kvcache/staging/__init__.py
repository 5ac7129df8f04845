"""Keys and values on their way between ranks of different tensor-parallel sizes: buffer, ring, who
sends what.
"""

from kvcache.staging.buffer import StagingBuffer, pool_layers, stack_layers
from kvcache.staging.heads import HeadSlice, compute_head_slice_params, head_writers, heads_per_rank
from kvcache.staging.ring import (
    ALLOC_OVERSIZED,
    Assignment,
    StagingAllocator,
    Watermark,
    may_fill,
    offset_to_send,
)

__all__ = [
    "ALLOC_OVERSIZED",
    "Assignment",
    "HeadSlice",
    "StagingAllocator",
    "StagingBuffer",
    "Watermark",
    "compute_head_slice_params",
    "head_writers",
    "heads_per_rank",
    "may_fill",
    "offset_to_send",
    "pool_layers",
    "stack_layers",
]

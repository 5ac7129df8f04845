"""A copy of the plan as rows of adjacent elements: what the kernels take."""

from __future__ import annotations

from torch import Tensor

from memsaver.common.strided import grids, row_major
from trainer_bridge.sync.cast_copy import Placement
from trainer_bridge.sync.plan import Copy, torch_dtype


def placements(copy: Copy, source: Tensor) -> list[Placement]:
    """source: the contiguous tensor that `copy.start` counts in."""
    strides, dtype = row_major(tuple(source.shape)), torch_dtype(copy.dtype)
    flat = source.detach().view(-1)
    first = sum(at * stride for at, stride in zip(copy.start, strides, strict=True))
    return [
        Placement(
            source=flat[first + grid.starts[0] :],
            count=grid.width,
            offset=copy.offset + grid.starts[1] * dtype.itemsize,
            dtype=dtype,
            index_base=copy.index_base + grid.starts[2],
            rows=grid.rows,
            source_pitch=grid.pitches[0],
            target_pitch=grid.pitches[1],
            index_pitch=grid.pitches[2],
        )
        for grid in grids(copy.shape, strides, copy.strides, copy.index_strides)
    ]

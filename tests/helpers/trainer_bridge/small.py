"""Three small parameters: their layouts in a rollout, and shards of their rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollout.weights import Manifest
from tests.helpers.trainer_bridge.layouts import manifest, piece
from trainer_bridge.sync.shards import SourceShard, torch_dtype

SHAPES: dict[str, tuple[int, ...]] = {"embed": (10, 4), "norm": (4,), "proj": (7, 3)}


def whole(dtype: str = "float32") -> Manifest:
    size = torch_dtype(dtype).itemsize
    return manifest(
        piece("embed", 0, (10, 4), dtype),
        piece("norm", 256, (4,), dtype, index_base=40),
        piece("proj", 256 + 4 * size, (7, 3), dtype, index_base=44),
    )


def columns(rank: int) -> Manifest:
    """One of two: half of the columns of `embed`, the rest whole."""
    return manifest(
        piece("embed", 0, (10, 2), global_shape=(10, 4), start=(0, 2 * rank)),
        piece("norm", 256, (4,), index_base=40),
        piece("proj", 512, (7, 3), index_base=44),
    )


def full(device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()
    }


def rows(name: str, shape: tuple[int, ...], world: int, rank: int) -> SourceShard:
    each = math.ceil(shape[0] / world)
    first, last = min(shape[0], rank * each), min(shape[0], (rank + 1) * each)
    start, part = (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    return SourceShard(
        name=name, global_shape=shape, dtype="float32", start=start, shape=part, rank=rank
    )


def shards(world: int) -> list[SourceShard]:
    return [
        rows(name, shape, world, rank) for name, shape in SHAPES.items() for rank in range(world)
    ]

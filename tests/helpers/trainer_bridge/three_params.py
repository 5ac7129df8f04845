"""Three small parameters: their layouts in a rollout, and shards of their rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from rollout.weights import Manifest, torch_dtype
from tests.helpers.trainer_bridge.layouts import manifest, piece
from trainer_bridge.sync.shards import Box, SourceShard, local_box

SHAPES: dict[str, tuple[int, ...]] = {"embed": (10, 4), "norm": (4,), "proj": (7, 3)}


def whole(dtype: str = "float32") -> Manifest:
    size = torch_dtype(dtype).itemsize
    return manifest(
        piece("embed", 0, (10, 4), dtype),
        piece("norm", 256, (4,), dtype, index_base=40),
        piece("proj", 256 + 4 * size, (7, 3), dtype, index_base=44),
    )


def columns(rank: int) -> Manifest:
    """Return the layout of one of two ranks: half of the columns of `embed`, all else whole."""
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


@functools.cache
def fsdp_boxes(shape: tuple[int, ...], world: int, dim: int) -> list[Box]:
    return [local_box(shape, [Shard(dim)], (world,), (rank,)) for rank in range(world)]


def fsdp_shards(name: str, shape: tuple[int, ...], world: int, dim: int = 0) -> list[SourceShard]:
    """Return FSDP2's shards of one parameter over `world` ranks, without a DTensor."""
    return [
        SourceShard(name=name, global_shape=shape, start=box.start, shape=box.shape, rank=rank)
        for rank, box in enumerate(fsdp_boxes(shape, world, dim))
    ]


def shards_of(shapes: Mapping[str, tuple[int, ...]], world: int) -> list[SourceShard]:
    parts = []
    for name, shape in shapes.items():
        parts += fsdp_shards(name, shape, world)
    return parts


def shards(world: int) -> list[SourceShard]:
    return shards_of(SHAPES, world)

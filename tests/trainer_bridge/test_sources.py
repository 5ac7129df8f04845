"""Boxes of ranks, computed without processes, against torch.chunk and tables written by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trainer_bridge.sync.shards import local_box
from trainer_bridge.sync.weight_sync import module_sync


@pytest.mark.parametrize("shape", [(8, 3), (9, 2), (5, 4), (1, 1), (0, 2)])
@pytest.mark.parametrize(
    ("placements", "order"),
    [
        ([Shard(0), Shard(0), Shard(0)], [(0, 0), (1, 0), (2, 0)]),
        ([Shard(-1), Replicate(), Shard(0)], [(0, 1), (2, 0)]),
        ([Replicate(), _StridedShard(0, split_factor=2), Shard(0)], [(2, 0), (1, 0)]),
        ([_StridedShard(0, split_factor=2), Shard(1), Shard(0)], [(2, 0), (0, 0), (1, 1)]),
        ([_StridedShard(0, split_factor=6), Shard(0), Shard(0)], [(1, 0), (2, 0), (0, 0)]),
        (
            [_StridedShard(1, split_factor=2), _StridedShard(1, split_factor=2), Shard(1)],
            [(2, 1), (0, 1), (1, 1)],
        ),
        (
            [_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0)],
            [(2, 0), (1, 0), (0, 0)],
        ),
    ],
)
def test_local_box_matches_nested_chunks_in_order_of_sharding(
    shape: tuple[int, ...], placements: list[Placement], order: list[tuple[int, int]]
) -> None:
    mesh = (4, 3, 2)
    full = torch.arange(shape[0] * shape[1]).view(shape)
    for at in itertools.product(*map(range, mesh)):
        part = full
        for mesh_dim, dim in order:
            chunks = part.chunk(mesh[mesh_dim], dim=dim)
            part = chunks[at[mesh_dim]] if at[mesh_dim] < len(chunks) else part.narrow(dim, 0, 0)
        start, size = local_box(shape, placements, mesh, at)
        assert size == part.shape
        assert torch.equal(full[start[0] : start[0] + size[0], start[1] : start[1] + size[1]], part)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        (
            [_StridedShard(0, split_factor=2), Replicate()],
            "no mesh dimension further right makes 2 parts",
        ),
        ([_StridedShard(0, split_factor=3), Shard(0)], "makes 3 parts of dimension 0"),
        ([_StridedShard(0, split_factor=2), Shard(1)], "is not a box"),
        ([Partial(), Shard(0)], "only sharded and replicated"),
    ],
)
def test_placements_without_a_box_are_refused(placements: list[Placement], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local_box((8, 8), placements, (2, 2), (0, 0))


def test_tensor_computed_from_a_parameter_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"wq: not a parameter, .* renamed if needed"):
        module_sync({"wk": weight, "wq": weight.T}, [])

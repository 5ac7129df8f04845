"""Drawn models and shards of them."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rollout.model.params import Group
from tests.helpers.trainer_bridge.layouts import EMBED, HEAD, decoder_groups, parameters
from trainer_bridge.sources import SourceShard, local_box

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


def placements(draw: st.DrawFn, kind: str, mesh: tuple[int, ...], ndim: int) -> list[Placement]:
    dim, other = draw(st.integers(0, ndim - 1)), draw(st.integers(0, ndim - 1))
    if kind == "fsdp":
        return [Shard(dim)]
    if kind == "hsdp":
        return [Replicate(), Shard(dim)]
    if draw(st.booleans()):  # tensor parallel leaves the parameter whole
        return [Shard(dim), Replicate()]
    return [_StridedShard(dim, split_factor=mesh[1]) if dim == other else Shard(dim), Shard(other)]


def shards_of(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> tuple[list[SourceShard], int]:
    kind = draw(st.sampled_from(["fsdp", "hsdp", "tp+fsdp"]))
    meshes = [(n,) for n in range(1, 9)] if kind == "fsdp" else [(1, 3), (2, 2), (2, 3), (2, 4), (4, 2), (3, 1)]
    mesh = draw(st.sampled_from(meshes))
    ranks = torch.arange(math.prod(mesh)).view(mesh)
    shards = []
    for name, shape in shapes.items():
        how = placements(draw, kind, mesh, len(shape))
        for at in torch.cartesian_prod(*map(torch.arange, mesh)).view(-1, len(mesh)).tolist():
            start, size = local_box(shape, how, mesh, at)
            rank = int(ranks[tuple(at)])
            shards.append(
                SourceShard(name=name, global_shape=shape, dtype="float32", start=start, shape=size, rank=rank)
            )
    return draw(st.permutations(shards)), math.prod(mesh)


def model_of(
    draw: st.DrawFn, *, vocab: int, heads: int
) -> tuple[list[Group], dict[str, tuple[int, ...]], dict[str, str], bool]:
    """Groups of a decoder, whole shapes by the trainer's names, the rollout's name -> the trainer's, tied."""
    tied = draw(st.booleans())
    groups = decoder_groups(
        hidden=draw(st.sampled_from([1, 3, 4])),
        vocab=draw(st.integers(1, vocab)),
        heads=heads,
        kv_heads=draw(st.sampled_from([1, 2, heads])),
        inner=heads,
        tied=tied,
    )
    shapes = parameters(groups)
    stored = {name: name for name in shapes}
    if tied and draw(st.booleans()):  # the trainer has it under the other name
        shapes[HEAD] = shapes.pop(EMBED)
        stored[EMBED] = HEAD
    return groups, shapes, stored, tied

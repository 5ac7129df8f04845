"""Hypothesis strategies for layouts of a trainer and its rollouts, and for syncs between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rollout.weights.params import ParamGroup
from tests.helpers.trainer_bridge.layouts import EMBED, HEAD, decoder_groups, parameters
from tests.helpers.trainer_bridge.sync_hooks import STAGES
from trainer_bridge.sync.shards import SourceShard, local_box

LORA_RANK, SCALE = 2, 0.5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """An error on rank `rank` (modulo all ranks), before or after its step of a stage."""

    stage: str
    moment: str
    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One sync.

    Attributes:
        seed: Seed of the values.
        shadow: Whether it is a shadow update.
        some: Parameters to write, by the trainer's names; None for all.
        lora: Parameters that are derived.
        fault: Error to raise; None for no error.
    """

    seed: int
    shadow: bool
    some: tuple[str, ...] | None
    lora: tuple[str, ...]
    fault: Fault | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The layouts of both sides.

    Attributes:
        groups: Parameters of the decoder.
        shapes: Whole shapes by the trainer's names.
        stored: The trainer's names by the rollout's.
        tied: Whether embedding and head are tied.
        shards: Shards of all trainer ranks.
        places: Device of each trainer rank.
        source_dtype: Dtype of the shards.
        engines: (tensor-parallel size, expert-parallel size, dtype, place and trainer rank of each
            rank) of each engine.
        scratch: Bytes for derived weights; enough for a few rows, or for everything.
    """

    groups: Sequence[Any]
    shapes: dict[str, tuple[int, ...]]
    stored: dict[str, str]
    tied: bool
    shards: list[SourceShard]
    places: list[str]
    source_dtype: torch.dtype
    engines: list[tuple[int, int, torch.dtype, list[tuple[str, int]]]]
    scratch: int


def placements(draw: st.DrawFn, kind: str, mesh: tuple[int, ...], ndim: int) -> list[Placement]:
    dim, tp_dim = draw(st.integers(0, ndim - 1)), draw(st.integers(0, ndim - 1))
    if kind == "fsdp":
        return [Shard(dim)]
    if kind == "hsdp":
        return [Replicate(), Shard(dim)]
    if draw(st.booleans()):  # a parameter that tensor parallelism does not divide
        return [Shard(dim), Replicate()]
    strided = _StridedShard(dim, split_factor=mesh[1])
    return [strided if dim == tp_dim else Shard(dim), Shard(tp_dim)]


def shards_of(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> tuple[list[SourceShard], int]:
    kind = draw(st.sampled_from(["fsdp", "hsdp", "tp+fsdp"]))
    meshes = (
        [(n,) for n in range(1, 9)]
        if kind == "fsdp"
        else [(1, 3), (2, 2), (2, 3), (2, 4), (4, 2), (3, 1)]
    )
    mesh = draw(st.sampled_from(meshes))
    ranks = torch.arange(math.prod(mesh)).view(mesh)
    shards = []
    for name, shape in shapes.items():
        how = placements(draw, kind, mesh, len(shape))
        for at in torch.cartesian_prod(*map(torch.arange, mesh)).view(-1, len(mesh)).tolist():
            start, size = local_box(shape, how, mesh, at)
            rank = int(ranks[tuple(at)])
            shards.append(
                SourceShard(name=name, global_shape=shape, start=start, shape=size, rank=rank)
            )
    return draw(st.permutations(shards)), math.prod(mesh)


def model_of(
    draw: st.DrawFn,
) -> tuple[list[ParamGroup], dict[str, tuple[int, ...]], dict[str, str], bool]:
    """Draw a decoder; returns the fields `groups`, `shapes`, `stored` and `tied` of `Layout`."""
    tied = draw(st.booleans())
    groups = decoder_groups(
        hidden=draw(st.sampled_from([1, 3, 4])),
        vocab=draw(st.integers(1, 11)),
        heads=4,
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        inner=4,
        tied=tied,
    )
    shapes = parameters(groups)
    stored = {name: name for name in shapes}
    if tied and draw(st.booleans()):  # the trainer uses the second name of the tied parameter
        shapes[HEAD] = shapes.pop(EMBED)
        stored[EMBED] = HEAD
    return groups, shapes, stored, tied


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    groups, shapes, stored, tied = model_of(draw)
    shards, world = shards_of(draw, shapes)
    engines = []
    for _ in range(draw(st.integers(1, 2))):  # replicas of perhaps different sizes
        size, experts = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]))
        where = [
            (draw(st.sampled_from(DEVICES)), draw(st.integers(0, world - 1))) for _ in range(size)
        ]
        engines.append((size, experts, draw(st.sampled_from(DTYPES)), where))
    return Layout(
        groups=groups,
        shapes=shapes,
        stored=stored,
        tied=tied,
        shards=shards,
        places=[draw(st.sampled_from(DEVICES)) for _ in range(world)],
        source_dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
        engines=engines,
        scratch=draw(st.sampled_from([32, 1 << 20])),
    )


@st.composite
def steps(draw: st.DrawFn, layout: Layout) -> Step:
    subsets = st.sets(st.sampled_from(sorted(layout.shapes)), min_size=1).map(
        lambda names: tuple(sorted(names))
    )
    matrices = st.sets(
        st.sampled_from(sorted(name for name, shape in layout.shapes.items() if len(shape) == 2))
    )
    faults = st.builds(
        Fault,
        stage=st.sampled_from(STAGES),
        moment=st.sampled_from(["before", "done"]),
        rank=st.integers(0, 7),
    )
    return Step(
        seed=draw(st.integers(1, 1000)),
        shadow=draw(st.booleans()),
        some=draw(st.none() | subsets),
        lora=draw(st.just(()) | matrices.map(lambda names: tuple(sorted(names)))),
        fault=draw(st.none() | st.none() | faults),
    )


@dataclasses.dataclass(frozen=True)
class Whole:
    """Whole parameters of one sync, and the factors `a` and `b` of derived ones."""

    base: dict[str, Tensor]
    a: dict[str, Tensor]
    b: dict[str, Tensor]


def whole(layout: Layout, seed: int, lora: Sequence[str] = ()) -> Whole:
    generator = torch.Generator().manual_seed(seed)
    base = {
        n: torch.randn(s, generator=generator).to(layout.source_dtype)
        for n, s in sorted(layout.shapes.items())
    }
    a = {name: torch.randn(LORA_RANK, layout.shapes[name][1], generator=generator) for name in lora}
    b = {name: torch.randn(layout.shapes[name][0], LORA_RANK, generator=generator) for name in lora}
    return Whole(base, a, b)

"""Drawn layouts of a trainer and its rollouts, syncs to make in them, and the values that are synced."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.trainer_bridge.drawn import DEVICES, DTYPES, model_of, shards_of
from tests.helpers.trainer_bridge.hooked import STAGES
from trainer_bridge.sources import SourceShard

LORA_RANK, SCALE = 2, 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """An error on rank `rank` (modulo all ranks), before or after its step of a stage."""

    stage: str
    moment: str
    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One sync. some: which parameters only, by the trainer's names; None: all. lora: which of them are derived."""

    seed: int
    shadow: bool
    some: tuple[str, ...] | None
    lora: tuple[str, ...]
    fault: Fault | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Both sides. shapes: whole parameters by the trainer's names; stored: the rollout's name -> the trainer's.
    engines: (tensor-parallel size, dtype, place and trainer rank of each of its ranks). scratch: bytes, for derived
    weights: a few rows at a time, or all."""

    groups: Sequence[Any]
    shapes: dict[str, tuple[int, ...]]
    stored: dict[str, str]
    tied: bool
    shards: list[SourceShard]
    places: list[str]
    source_dtype: torch.dtype
    engines: list[tuple[int, torch.dtype, list[tuple[str, int]]]]
    scratch: int


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    groups, shapes, stored, tied = model_of(draw, vocab=11, heads=4)
    shards, world = shards_of(draw, shapes)
    engines = []
    for _ in range(draw(st.integers(1, 2))):  # replicas, not always alike
        size = draw(st.sampled_from([1, 2, 4]))
        where = [(draw(st.sampled_from(DEVICES)), draw(st.integers(0, world - 1))) for _ in range(size)]
        engines.append((size, draw(st.sampled_from(DTYPES)), where))
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
    subsets = st.sets(st.sampled_from(sorted(layout.shapes)), min_size=1).map(lambda names: tuple(sorted(names)))
    matrices = st.sets(st.sampled_from(sorted(name for name, shape in layout.shapes.items() if len(shape) == 2)))
    faults = st.builds(
        Fault, stage=st.sampled_from(STAGES), moment=st.sampled_from(["before", "done"]), rank=st.integers(0, 7)
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
    """All parameters of one sync, whole. a, b: factors of the derived ones."""

    base: dict[str, Tensor]
    a: dict[str, Tensor]
    b: dict[str, Tensor]


def whole(layout: Layout, seed: int, lora: Sequence[str] = ()) -> Whole:
    generator = torch.Generator().manual_seed(seed)
    base = {n: torch.randn(s, generator=generator).to(layout.source_dtype) for n, s in sorted(layout.shapes.items())}
    a = {name: torch.randn(LORA_RANK, layout.shapes[name][1], generator=generator) for name in lora}
    b = {name: torch.randn(layout.shapes[name][0], LORA_RANK, generator=generator) for name in lora}
    return Whole(base, a, b)

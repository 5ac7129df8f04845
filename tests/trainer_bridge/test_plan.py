"""Plans against brute force: execute the copies on bytes and compare with the full tensors, element by element."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memsaver.ops.strided import row_major
from rollout.types import Manifest, ParamSlice
from tests.helpers.trainer_bridge.drawn import DEVICES, DTYPES, model_of, shards_of
from tests.helpers.trainer_bridge.layouts import box_of, manifests
from trainer_bridge.plan import Copy, Plan, SourceShard, Target, itemsize, make_plan, torch_dtype


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer's full tensors and shards, and engines. stored: the rollout's name -> the trainer's."""

    tensors: dict[str, Tensor]
    shards: list[SourceShard]
    places: list[str]
    targets: list[Target]
    stored: dict[str, str]

    def local(self, shard: SourceShard) -> Tensor:
        return self.tensors[shard.name][box_of(shard)].contiguous()

    def held_at(self, name: str, place: str) -> Tensor:
        """Which elements some rank on the device holds, one by one."""
        held = torch.zeros(self.tensors[name].shape, dtype=torch.bool)
        for shard in self.shards:
            if shard.name == name and self.places[shard.rank] == place:
                held[box_of(shard)] = True
        return held


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups, shapes, stored, tied = model_of(draw, vocab=19, heads=8)
    generator = torch.Generator().manual_seed(3)
    shards, world = shards_of(draw, shapes)
    targets = []
    for _ in range(draw(st.integers(1, 2))):  # replicas, not always alike
        size = draw(st.sampled_from([1, 2, 4, 8]))
        layouts = manifests(groups, size, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0, 256])), tied)
        targets += [Target(manifest=layout, place=draw(st.sampled_from([*DEVICES, "other"]))) for layout in layouts]
    return Case(
        tensors={name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        shards=shards,
        places=[draw(st.sampled_from(DEVICES)) for _ in range(world)],
        targets=targets,
        stored=stored,
    )


class Pages:
    """A target's memory: bytes, how often each was written, and the digest's number of the element at each."""

    def __init__(self, manifest: Manifest) -> None:
        self.data = torch.zeros(-(-manifest.nbytes // 8) * 8, dtype=torch.uint8)
        self.written = torch.zeros(len(self.data), dtype=torch.int32)
        self.numbers = torch.full((len(self.data),), -1)

    def write(self, copy: Copy, source: Tensor) -> None:
        size = itemsize(copy.dtype)
        place = self.data.view(torch_dtype(copy.dtype)).as_strided(copy.shape, copy.strides, copy.offset // size)
        box = source[box_of(copy)]
        assert box.shape == copy.shape
        place.copy_(box)
        spread = [stride * size for stride in copy.strides]
        for byte in range(size):
            self.written.as_strided(copy.shape, spread, copy.offset + byte).add_(1)
        number = torch.tensor(copy.index_base)
        for dim, (length, stride) in enumerate(zip(copy.shape, copy.index_strides, strict=True)):
            number = number + (torch.arange(length) * stride).view(-1, *[1] * (len(copy.shape) - dim - 1))
        self.numbers.as_strided(copy.shape, spread, copy.offset).copy_(number)

    def holds(self, piece: ParamSlice, full: Tensor) -> None:
        size, strides, box = itemsize(piece.dtype), strides_of(piece), box_of(piece)
        dtype = torch_dtype(piece.dtype)
        found = self.data.view(dtype).as_strided(piece.shape, strides, piece.offset // size)
        assert torch.equal(found, full[box].to(dtype)), piece
        numbers = piece.index_base + torch.arange(full.numel()).view(full.shape)
        spread = [stride * size for stride in strides]
        assert torch.equal(self.numbers.as_strided(piece.shape, spread, piece.offset), numbers[box]), piece


def strides_of(piece: ParamSlice) -> tuple[int, ...]:
    return piece.strides or row_major(piece.shape)


def execute(case: Case, plan: Plan) -> tuple[list[Pages], Counter[tuple[int, int]]]:
    """All ranks' copies; (rank, target) -> bytes written to another device."""
    pages = [Pages(target.manifest) for target in case.targets]
    links: Counter[tuple[int, int]] = Counter()
    local = {(shard.name, shard.rank): case.local(shard) for shard in case.shards}
    for rank, place in enumerate(case.places):
        for copy in plan.copies(rank):
            assert copy.rank == rank
            pages[copy.target].write(copy, local[copy.name, rank])
            if case.targets[copy.target].place != place:
                links[rank, copy.target] += copy.nbytes
    return pages, links


@settings(max_examples=60)
@given(cases())
def test_every_target_byte_is_written_once_with_the_right_value_and_the_least_over_links(case: Case) -> None:
    plan = make_plan(case.shards, case.targets, case.places)
    pages, links = execute(case, plan)
    assert dict(links) == plan.link_bytes
    for number, (target, page) in enumerate(zip(case.targets, pages, strict=True)):
        expected, crossing = torch.zeros_like(page.written), 0
        for piece in target.manifest.slices:
            name, size = case.stored[piece.name], itemsize(piece.dtype)
            page.holds(piece, case.tensors[name])
            for byte in range(size):
                spread = [stride * size for stride in strides_of(piece)]
                expected.as_strided(piece.shape, spread, piece.offset + byte).add_(1)
            held = case.held_at(name, target.place)[box_of(piece)]
            crossing += int((~held).sum()) * size
        assert torch.equal(page.written, expected)
        assert int(expected.max()) == 1
        assert plan.nbytes[number] == int(expected.sum())
        assert sum(n for (_, to), n in links.items() if to == number) == crossing

"""Plans against brute force: execute the copies on bytes and compare with the full tensors."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memsaver.ops.digest import digest
from rollout.types import Manifest
from tests.trainer_bridge.layouts import manifest, piece
from trainer_bridge.ops.cast_copy import cast_copy
from trainer_bridge.plan import Planner, SourceShard, dim0_shards, make_plan, torch_dtype

Layout = tuple[dict[str, tuple[int, ...]], Manifest]


def shards_of(shapes: dict[str, tuple[int, ...]], world: int) -> list[SourceShard]:
    return [shard for name, shape in shapes.items() for shard in dim0_shards(name, shape, "float32", world)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Parameters of any number of rows, in any order, with gaps; the rollout may hold only some of them."""
    shapes: dict[str, tuple[int, ...]] = {}
    slices, offset, index = [], draw(st.sampled_from([0, 256])), 0
    for i in range(draw(st.integers(1, 4))):
        rows, width = draw(st.integers(1, 11)), draw(st.sampled_from([None, 1, 3]))
        shape = (rows,) if width is None else (rows, width)
        start = draw(st.integers(0, rows - 1))
        height = draw(st.integers(1, rows - start))
        part, first = (height, *shape[1:]), (start, *(0 for _ in shape[1:]))
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        shapes[f"p{i}"] = shape
        slices.append(piece(f"p{i}", offset, part, dtype, global_shape=shape, start=first, index_base=index))
        offset += (math.prod(part) * torch_dtype(dtype).itemsize + 7) // 8 * 8 + draw(st.sampled_from([0, 16]))
        index += math.prod(shape)
    return shapes, manifest(*draw(st.permutations(slices)), nbytes=offset)


def full_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@settings(derandomize=True, deadline=None, max_examples=150)
@given(layouts(), st.integers(1, 8))
def test_every_target_byte_is_written_once_with_the_right_value(layout: Layout, world: int) -> None:
    shapes, target = layout
    tensors = full_tensors(shapes)
    shards = shards_of(shapes, world)
    local = {(s.name, s.rank): tensors[s.name][s.start : s.start + s.shape[0]] for s in shards}
    arena = torch.zeros(target.nbytes, dtype=torch.uint8)
    written = torch.zeros(target.nbytes, dtype=torch.int32)
    plan = make_plan(shards, target)
    total = 0
    for copy in plan.copies:
        source = local[copy.name, copy.rank][copy.row : copy.row + copy.shape[0]]
        place = arena[copy.offset : copy.offset + copy.nbytes].view(torch_dtype(copy.dtype)).view(copy.shape)
        total += cast_copy(place, source, copy.index_base)
        written[copy.offset : copy.offset + copy.nbytes] += 1
    expected_digest, expected_count = 0, torch.zeros_like(written)
    for p in target.slices:
        want = tensors[p.name][p.start[0] : p.start[0] + p.shape[0]].to(torch_dtype(p.dtype))
        nbytes = want.numel() * want.element_size()
        assert torch.equal(arena[p.offset : p.offset + nbytes].view(want.dtype).view(want.shape), want)
        expected_count[p.offset : p.offset + nbytes] += 1
        width = math.prod(p.shape[1:])
        expected_digest += digest(want.contiguous(), p.index_base + p.start[0] * width)
    assert torch.equal(written, expected_count)
    assert total % 2**64 == expected_digest % 2**64
    assert plan.nbytes == int(expected_count.sum())


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 16])
def test_shards_are_those_of_torch_chunk(rows: int, world: int) -> None:
    rows_of = torch.arange(rows * 2).view(rows, 2)
    chunks = list(rows_of.chunk(world)) + [rows_of[:0]] * world
    shards = dim0_shards("p", (rows, 2), "float32", world)
    for shard in shards:
        assert torch.equal(rows_of[shard.start : shard.start + shard.shape[0]], chunks[shard.rank])


def test_tied_names_go_to_the_stored_one() -> None:
    target = manifest(piece("embed", 0, (4, 2)), aliases={"head": "embed"})
    for name in ("embed", "head"):
        (copy,) = make_plan(shards_of({name: (4, 2)}, 1), target).copies
        assert (copy.name, copy.offset) == (name, 0)


@pytest.mark.parametrize(
    ("shapes", "target", "message"),
    [
        ({"a": (4,)}, manifest(piece("a", 0, (4,)), piece("b", 16, (4,))), "missing in the trainer: b"),
        ({"a": (4,), "x": (2,)}, manifest(piece("a", 0, (4,))), "unknown to the rollout: x"),
        ({"a": (4, 2)}, manifest(piece("a", 0, (2, 4))), r"a: shape \(4, 2\) in the trainer, \(2, 4\) in the rollout"),
        ({"a": (4,)}, manifest(piece("a", 0, (4,), global_shape=(5,))), "a: shape"),
        ({"a": (4, 4)}, manifest(piece("a", 0, (4, 2), global_shape=(4, 4))), "not a run of rows"),
        ({"a": (4,), "b": (4,)}, manifest(piece("a", 0, (4,)), piece("b", 8, (4,))), "a and b overlap at byte 8"),
        ({"a": (4,)}, manifest(piece("a", 2, (4,))), "not aligned"),
        ({"a": (4,)}, manifest(piece("a", 0, (4,)), nbytes=12), "ends at byte 16"),
        ({"e": (4,), "h": (4,)}, manifest(piece("e", 0, (4,)), aliases={"h": "e"}), "e and h are one parameter"),
    ],
)
def test_what_does_not_fit_is_named(shapes: dict[str, tuple[int, ...]], target: Manifest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(shards_of(shapes, 2), target)


def test_all_problems_are_listed_at_once() -> None:
    target = manifest(piece("a", 0, (4,)), piece("b", 16, (2,)))
    with pytest.raises(ValueError, match=r"missing in the trainer: b; unknown to the rollout: c; a: shape"):
        make_plan(shards_of({"a": (3,), "c": (1,)}, 1), target)


def test_rows_that_no_rank_or_two_ranks_hold() -> None:
    target = manifest(piece("a", 0, (4,)))
    first, second = dim0_shards("a", (4,), "float32", 2)
    with pytest.raises(ValueError, match="row 2 is held by no rank"):
        make_plan([first], target)
    with pytest.raises(ValueError, match="row 0 is held by no rank"):
        make_plan([second], target)
    with pytest.raises(ValueError, match="held by several ranks"):
        make_plan([first, second, dataclasses.replace(first, rank=2)], target)


def test_a_plan_is_made_once_for_a_layout() -> None:
    target = manifest(piece("a", 0, (4,)))
    planner = Planner(shards_of({"a": (4,)}, 2))
    assert planner.plan(target) is planner.plan(target)
    other = dataclasses.replace(target, layout_hash="other")
    assert planner.plan(other) is not planner.plan(target)
    assert planner.plan(other).layout_hash == "other"

"""What a plan refuses, in words, and what it takes: names, parts, bytes."""

from __future__ import annotations

import dataclasses

import pytest

from rollout.types import Manifest, ModuleTensor
from tests.helpers.trainer_bridge.layouts import manifest, piece
from trainer_bridge.plan import Plan, Planner, SourceShard, Target, make_plan
from trainer_bridge.sources import fsdp_shards

Shapes = dict[str, tuple[int, ...]]


def shards_of(shapes: Shapes, world: int) -> list[SourceShard]:
    return [shard for name, shape in shapes.items() for shard in fsdp_shards(name, shape, "float32", world)]


def plan_of(shards: list[SourceShard], *targets: Manifest, names: list[str] | None = None) -> Plan:
    world = max((shard.rank for shard in shards), default=0) + 1
    return make_plan(shards, [Target(manifest=each, place="cpu") for each in targets], ["cpu"] * world, names)


def at(rank: int, start: tuple[int, ...], shape: tuple[int, ...]) -> SourceShard:
    """A part of "a", [4, 4]."""
    return SourceShard(name="a", global_shape=(4, 4), dtype="float32", start=start, shape=shape, rank=rank)


A = manifest(piece("a", 0, (4, 4)))


@pytest.mark.parametrize(
    ("shapes", "target", "message"),
    [
        ({"a": (4,)}, manifest(piece("a", 0, (4,)), piece("b", 16, (4,))), "missing in the trainer: b"),
        ({"a": (4,), "x": (2,)}, manifest(piece("a", 0, (4,))), "unknown to the rollout: x"),
        ({"a": (4, 2)}, manifest(piece("a", 0, (2, 4))), r"a: shape \(4, 2\) in the trainer, \(2, 4\) in the rollout"),
        ({"a": (4,)}, manifest(piece("a", 0, (4,), global_shape=(5,))), "a: shape"),
        ({"a": (4,), "b": (4,)}, manifest(piece("a", 0, (4,)), piece("b", 8, (4,))), "a and b overlap at byte 8"),
        ({"a": (4,)}, manifest(piece("a", 2, (4,))), "not aligned"),
        ({"a": (4,)}, manifest(piece("a", 0, (4,)), nbytes=12), "ends at byte 16"),
        ({"a": (2, 2)}, manifest(piece("a", 0, (2, 2), strides=(4, 1)), nbytes=20), "ends at byte 24"),
        ({"a": (2, 2)}, manifest(piece("a", 0, (2, 2), strides=(1, 1))), "a and a overlap at byte 4"),
        ({"e": (4,), "h": (4,)}, manifest(piece("e", 0, (4,)), aliases={"h": "e"}), "e and h are one parameter"),
    ],
)
def test_what_does_not_fit_is_named(shapes: Shapes, target: Manifest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(shards_of(shapes, 2), target)


def test_all_problems_of_all_targets_are_listed_at_once_and_each_once() -> None:
    target = manifest(piece("a", 0, (4,)), piece("b", 16, (2,)))
    other = manifest(piece("a", 0, (4,)), piece("b", 16, (2,)), piece("d", 32, (2,)))
    with pytest.raises(ValueError, match="nothing was written") as error:
        plan_of(shards_of({"a": (3,), "c": (1,)}, 1), target, other, target)
    text = str(error.value)
    for problem in ("missing in the trainer: b", "missing in the trainer: d", "unknown to the rollout: c", "a: shape"):
        assert text.count(problem) == 1


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([at(0, (0, 0), (2, 4))], r"a: element \(2, 0\) is held by no rank"),
        ([at(0, (2, 0), (2, 4)), at(1, (0, 0), (2, 2))], r"a: element \(0, 2\) is held by no rank"),
        ([at(0, (0, 0), (4, 0))], r"a: element \(0, 0\) is held by no rank"),
        ([at(0, (0, 0), (3, 4)), at(1, (2, 0), (2, 4))], r"element \(2, 0\) is held by ranks 0 and 1"),
        ([at(0, (0, 0), (4, 4)), at(1, (0, 0), (4, 4)), at(2, (3, 3), (1, 1))], r"\(3, 3\) is held by ranks 0 and 2"),
        ([at(0, (0, 0), (2, 4)), at(0, (2, 0), (2, 4))], "a: rank 0 holds two different parts"),
        ([at(0, (0, 0), (5, 4))], r"a: rank 0 holds \(5, 4\) at \(0, 0\), outside \(4, 4\)"),
        ([at(0, (0,), (4,))], "a: rank 0 holds"),
        ([at(0, (0, 0), (4, 4)), dataclasses.replace(at(1, (0, 0), (4, 4)), global_shape=(4, 5))], r"a: shapes \(4, 4"),
    ],
)
def test_parts_that_are_missing_or_in_each_others_way(shards: list[SourceShard], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(shards, A)


def test_what_nobody_holds_is_no_problem_where_nobody_needs_it() -> None:
    target = manifest(piece("a", 0, (2, 4), global_shape=(4, 4)))
    (copy,) = plan_of([at(0, (0, 0), (3, 4))], target).copies(0)
    assert (copy.start, copy.shape, copy.offset) == ((0, 0), (2, 4), 0)


def test_a_rank_without_a_place_is_named() -> None:
    with pytest.raises(ValueError, match=r"ranks \[2, 3\] hold shards, but places lists 2"):
        Planner(shards_of({"a": (4,)}, 4), ["cpu", "cpu"])


def test_tied_names_go_to_the_stored_one() -> None:
    target = manifest(piece("embed", 0, (4, 2)), aliases={"head": "embed"})
    for name in ("embed", "head"):
        (copy,) = plan_of(shards_of({name: (4, 2)}, 1), target).copies(0)
        assert (copy.name, copy.offset) == (name, 0)


def test_a_name_of_padding_alone_is_known_but_a_fused_one_is_not() -> None:
    first = manifest(piece("a", 0, (4,)), piece("e", 16, (2,)))
    padding = {"e": ModuleTensor(offset=16, shape=(2,), dtype="float32")}
    second = dataclasses.replace(manifest(piece("a", 0, (4,)), nbytes=24), modules=padding)
    shards = shards_of({"a": (4,), "e": (2,)}, 1)
    assert plan_of(shards, first, second).nbytes == (24, 16)
    with pytest.raises(ValueError, match="unknown to the rollout: e"):
        plan_of(shards, second)


def test_a_shard_may_be_given_twice() -> None:
    shards = shards_of({"a": (4,)}, 2)
    target = manifest(piece("a", 0, (4,)))
    once, twice = plan_of(shards, target), plan_of([*shards, *reversed(shards)], target)
    assert once.layout_hash == twice.layout_hash
    assert [once.copies(rank) for rank in range(2)] == [twice.copies(rank) for rank in range(2)]


def test_only_some_names() -> None:
    target = manifest(piece("a", 0, (4,)), piece("b", 16, (2,)), aliases={"c": "b"})
    shards = shards_of({"a": (4,), "b": (2,)}, 1)
    plan = plan_of(shards, target, names=["c"])
    assert [copy.name for copy in plan.copies(0)] == ["b"]
    assert plan.nbytes == (8,)
    assert plan.layout_hash != plan_of(shards, target).layout_hash
    assert plan_of(shards_of({"b": (2,)}, 1), target, names=["b"]).nbytes == (8,)  # the others need not be there
    with pytest.raises(ValueError, match="unknown to both sides: x"):
        plan_of(shards, target, names=["a", "x"])
    with pytest.raises(ValueError, match="missing in the trainer: a"):
        plan_of(shards_of({"b": (2,)}, 1), target, names=["a", "b"])


def test_a_plan_is_made_once_for_the_same_targets() -> None:
    target = Target(manifest=manifest(piece("a", 0, (4,))), place="cpu")
    planner = Planner(shards_of({"a": (4,)}, 2), ["cpu", "cpu"])
    plan = planner.plan([target])
    assert planner.plan([dataclasses.replace(target)]) is plan
    for other in (
        [target, target],
        [dataclasses.replace(target, place="GPU-0")],
        [Target(manifest=manifest(piece("a", 16, (4,))), place="cpu")],
    ):
        assert planner.plan(other).layout_hash != plan.layout_hash


def test_the_hash_tells_other_shards_and_places_apart() -> None:
    targets = [Target(manifest=manifest(piece("a", 0, (4,))), place="cpu")]
    hashes = {
        make_plan(shards_of({"a": (4,)}, world), targets, places).layout_hash
        for world, places in ((1, ["cpu"]), (1, ["GPU-0"]), (2, ["cpu", "cpu"]), (2, ["cpu", "GPU-0"]))
    }
    assert len(hashes) == 4

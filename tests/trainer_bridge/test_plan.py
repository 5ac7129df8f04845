"""Sync plans: refused layouts, choice and order of senders, and the time of a large plan.

The syncs of test_session_property.py show that copies are correct and cross as few links as
possible.
"""

from __future__ import annotations

import dataclasses
import itertools
import resource
import time
from collections import Counter
from multiprocessing.connection import Connection

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from rollout.weights import Manifest, ModuleTensor, WeightLayout
from rollout.weights.params import ParamGroup, one, stack
from tests.helpers.peers import Peer
from tests.helpers.trainer_bridge.layouts import (
    decoder_groups,
    manifest,
    manifests,
    parameters,
    piece,
)
from tests.helpers.trainer_bridge.three_params import fsdp_shards, shards_of
from trainer_bridge.sync.plan import SyncPlan, make_plan
from trainer_bridge.sync.shards import SourceShard, aligned_dims, local_box

Shapes = dict[str, tuple[int, ...]]


def plan_of(shards: list[SourceShard], *targets: Manifest) -> SyncPlan:
    world = max((shard.rank for shard in shards), default=0) + 1
    layouts = [WeightLayout(manifest=target, place="cpu") for target in targets]
    return make_plan(shards, ["cpu"] * world, layouts)


def at(rank: int, start: tuple[int, ...], shape: tuple[int, ...]) -> SourceShard:
    """Return a shard of parameter "a", [4, 4]."""
    return SourceShard(name="a", global_shape=(4, 4), start=start, shape=shape, rank=rank)


A = manifest(piece("a", 0, (4, 4)))


@pytest.mark.parametrize(
    ("shapes", "target", "message"),
    [
        (
            {"a": (4,)},
            manifest(piece("a", 0, (4,)), piece("b", 16, (4,))),
            "missing in the trainer: b",
        ),
        ({"a": (4,), "x": (2,)}, manifest(piece("a", 0, (4,))), "unknown to the rollout: x"),
        (
            {"a": (4, 2)},
            manifest(piece("a", 0, (2, 4))),
            r"a: shape \(4, 2\) in the trainer, \(2, 4\) in the rollout",
        ),
        ({"a": (4,)}, manifest(piece("a", 0, (4,), global_shape=(5,))), "a: shape"),
        (
            {"e": (4,), "h": (4,)},
            manifest(piece("e", 0, (4,)), aliases={"h": "e"}),
            "e and h are one parameter",
        ),
    ],
)
def test_plan_refuses_names_and_shapes_that_do_not_fit(
    shapes: Shapes, target: Manifest, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(shards_of(shapes, 2), target)


def test_plan_lists_problems_of_all_targets_once() -> None:
    target = manifest(piece("a", 0, (4,)), piece("b", 16, (2,)))
    larger = manifest(piece("a", 0, (4,)), piece("b", 16, (2,)), piece("d", 32, (2,)))
    with pytest.raises(ValueError, match="nothing was written") as error:
        plan_of(shards_of({"a": (3,), "c": (1,)}, 1), target, larger, target)
    text = str(error.value)
    for problem in (
        "missing in the trainer: b",
        "missing in the trainer: d",
        "unknown to the rollout: c",
        "a: shape",
    ):
        assert text.count(problem) == 1


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([at(0, (0, 0), (2, 4))], "a: 8 of 16 elements are held by no rank"),
        ([at(0, (2, 0), (2, 4)), at(1, (0, 0), (2, 2))], "a: 4 of 16 elements are held by no rank"),
        ([at(0, (0, 0), (4, 0))], "a: 16 of 16 elements are held by no rank"),
        (
            [at(0, (0, 0), (3, 4)), at(1, (2, 0), (2, 4))],
            r"element \(2, 0\) is held by ranks 0 and 1",
        ),
        (
            [at(0, (0, 0), (4, 4)), at(1, (0, 0), (4, 4)), at(2, (3, 3), (1, 1))],
            r"\(3, 3\) is held by ranks 0 and 2",
        ),
        (
            [
                at(0, (0, 0), (4, 4)),
                dataclasses.replace(at(1, (0, 0), (4, 4)), global_shape=(4, 5)),
            ],
            r"a: shapes \(4, 4",
        ),
    ],
)
def test_plan_refuses_missing_and_overlapping_parts(
    shards: list[SourceShard], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(shards, A)


def test_plan_ignores_missing_parts_that_no_target_needs() -> None:
    target = manifest(piece("a", 0, (2, 4), global_shape=(4, 4)))
    (copy,) = plan_of([at(0, (0, 0), (3, 4))], target).copies(0)
    assert (copy.start, copy.shape, copy.offset) == ((0, 0), (2, 4), 0)


def test_tied_parameter_is_written_to_its_stored_name() -> None:
    target = manifest(piece("embed", 0, (4, 2)), aliases={"head": "embed"})
    for name in ("embed", "head"):
        (copy,) = plan_of(shards_of({name: (4, 2)}, 1), target).copies(0)
        assert (copy.name, copy.offset) == (name, 0)


def test_parameter_of_which_a_target_has_only_padding_is_known() -> None:
    first = manifest(piece("a", 0, (4,)), piece("e", 16, (2,)))
    padding = {"e": ModuleTensor(offset=16, shape=(2,), dtype="float32")}
    second = dataclasses.replace(manifest(piece("a", 0, (4,)), nbytes=24), modules=padding)
    shards = shards_of({"a": (4,), "e": (2,)}, 1)
    assert plan_of(shards, first, second).nbytes == (24, 16)
    with pytest.raises(ValueError, match="unknown to the rollout: e"):
        plan_of(shards, second)


def test_duplicate_shards_do_not_change_the_plan() -> None:
    shards = shards_of({"a": (4,)}, 2)
    target = manifest(piece("a", 0, (4,)))
    once, twice = plan_of(shards, target), plan_of([*shards, *reversed(shards)], target)
    assert [once.copies(rank) for rank in range(2)] == [twice.copies(rank) for rank in range(2)]


def test_plan_only_contains_the_given_names() -> None:
    target = manifest(piece("a", 0, (4,)), piece("b", 16, (2,)), aliases={"c": "b"})
    plan = plan_of(shards_of({"a": (4,), "c": (2,)}, 1), target).only(["c"])
    assert [copy.name for copy in plan.copies(0)] == ["c"]
    assert plan.nbytes == (8,)


ROWS = (4, 8)


def layers(count: int) -> Manifest:
    return manifest(*(piece(f"p{i}", i * 128, ROWS) for i in range(count)))


def hsdp(names: list[str], replicas: int, size: int) -> list[SourceShard]:
    shards = []
    for name, at in itertools.product(names, itertools.product(range(replicas), range(size))):
        start, shape = local_box(ROWS, [Replicate(), Shard(0)], (replicas, size), at)
        rank = at[0] * size + at[1]
        shards.append(
            SourceShard(name=name, global_shape=ROWS, start=start, shape=shape, rank=rank)
        )
    return shards


@pytest.mark.parametrize("targets", [1, 2, 3, 5])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_on_other_devices_share_the_load(replicas: int, targets: int) -> None:
    count = 6
    engines = [WeightLayout(manifest=layers(count), place=f"other-{i}") for i in range(targets)]
    places = [f"GPU-{i}" for i in range(replicas * 2)]
    plan = make_plan(hsdp([f"p{i}" for i in range(count)], replicas, 2), places, engines)
    sent: Counter[int] = Counter()
    for (rank, _), nbytes in plan.link_bytes.items():
        sent[rank] += nbytes
    assert sum(sent.values()) == sum(plan.nbytes) == targets * count * 128
    assert set(sent.values()) == {targets * count * 128 // (replicas * 2)}


def test_replicas_on_the_target_device_are_preferred_and_share_the_load() -> None:
    plan = make_plan(
        hsdp(["p0", "p1"], 2, 1), ["cpu", "cpu"], [WeightLayout(manifest=layers(2), place="cpu")]
    )
    assert [len(plan.copies(rank)) for rank in range(2)] == [1, 1]
    assert plan.link_bytes == {}
    places = [f"GPU-{i}" for i in range(4)]
    engines = [WeightLayout(manifest=layers(3), place=place) for place in places]
    plan = make_plan(hsdp(["p0", "p1", "p2"], 4, 1), places, engines)
    assert plan.link_bytes == {}
    for rank in range(4):
        assert {copy.target for copy in plan.copies(rank)} == {rank}


def test_copies_begin_with_own_device_then_a_different_target_per_rank() -> None:
    places = ["GPU-0", "GPU-1", "GPU-2"]
    engines = [WeightLayout(manifest=layers(2), place=place) for place in (*places, "GPU-1")]
    plan = make_plan([s for i in range(2) for s in fsdp_shards(f"p{i}", ROWS, 3)], places, engines)
    order = [
        [target for target, _ in itertools.groupby(copy.target for copy in plan.copies(r))]
        for r in range(2)
    ]
    assert order == [[0, 1, 2, 3], [1, 3, 2, 0]]
    for rank in range(3):
        for _, copies in itertools.groupby(plan.copies(rank), key=lambda copy: copy.target):
            offsets = [copy.offset for copy in copies]
            assert offsets == sorted(offsets)


def shared_by(
    names_dims: dict[str, int], shapes: dict[str, tuple[int, ...]], layouts: list[Manifest]
) -> SyncPlan:
    world = len(layouts)
    places = [f"GPU-{i}" for i in range(world)]
    shards = [
        s for n, shape in shapes.items() for s in fsdp_shards(n, shape, world, names_dims.get(n, 0))
    ]
    targets = [WeightLayout(manifest=m, place=p) for m, p in zip(layouts, places, strict=True)]
    return make_plan(shards, places, targets)


@pytest.mark.parametrize("vocab", [16, 13])
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 2)])
def test_with_aligned_dims_only_shared_parameters_cross_links(
    size: int, kv_heads: int, vocab: int
) -> None:
    groups = decoder_groups(hidden=12, vocab=vocab, heads=4, kv_heads=kv_heads, inner=8, tied=False)
    groups = [group for group in groups if "experts.gate_up" not in group.params[0].name]
    layouts, shapes = manifests(groups, size, torch.bfloat16), parameters(groups)
    dims = aligned_dims(layouts)
    layer = "model.layers.0."
    assert dims == {
        f"{layer}self_attn.o_proj.weight": 1,
        f"{layer}mlp.down_proj.weight": 1,
        f"{layer}mlp.experts.down_proj": 2,
    }
    plan = shared_by(dims, shapes, layouts)
    crossing = {c.name for rank in range(size) for c in plan.copies(rank) if c.target != rank}
    shared = {f"{layer}input_layernorm.weight"}
    if kv_heads < size:  # two engines hold the same head, and each of their ranks half of it
        shared |= {f"{layer}self_attn.{name}_proj.weight" for name in "kv"}
    assert crossing == shared
    assert sum(plan.link_bytes.values()) < sum(shared_by({}, shapes, layouts).link_bytes.values())


GATE_UP, DOWN = "model.layers.{}.mlp.experts.gate_up_proj", "model.layers.{}.mlp.experts.down_proj"


def test_experts_divided_by_expert_cross_no_link() -> None:
    """Plan a sync from FSDP2 on two devices into two engine ranks on the same devices, in bf16.

    If the engine divides experts by inner channels, half of gate and up crosses, 19.3 GB. If it
    divides by expert, nothing crosses.
    """
    shapes = {GATE_UP.format(i): (128, 2 * 768, 2048) for i in range(48)}
    shapes |= {DOWN.format(i): (128, 2048, 768) for i in range(48)}
    groups = [one(name, *shape) for name, shape in shapes.items()]
    for experts, crossing in ((1, 48 * 128 * 768 * 2048 * 2), (2, 0)):
        layouts = manifests(groups, 2, torch.bfloat16, expert_parallel=experts)
        dims = aligned_dims(layouts)
        assert dims == {name: 2 for name in shapes if experts == 1 and "down" in name}
        plan = shared_by(dims, shapes, layouts)
        assert sum(plan.nbytes) == 48 * 128 * 3 * 768 * 2048 * 2
        assert sum(plan.link_bytes.values()) == crossing


def test_aligned_dims_omits_uneven_dims_and_dims_without_gain() -> None:
    groups = decoder_groups(hidden=4, vocab=8, heads=3, kv_heads=3, inner=3, tied=True)
    whole = manifests(groups, 1, torch.bfloat16, tied=True)
    assert aligned_dims(whole * 2) == {}  # each replica needs everything
    columns = [
        piece("a", 0, (4, 3), start=(0, first), global_shape=(4, 5), strides=(3, 1))
        for first in (0, 2)
    ]
    assert (
        aligned_dims([manifest(part) for part in columns]) == {}
    )  # 2 ranks do not divide 5 columns
    experts = manifests(
        decoder_groups(hidden=4, vocab=8, heads=2, kv_heads=2, inner=4, tied=True),
        2,
        torch.bfloat16,
    )
    assert "model.layers.0.mlp.experts.gate_up_proj" not in aligned_dims(experts)


@pytest.mark.extended
def test_plan_of_235_billion_parameters_takes_at_most_5_s_and_1_gib() -> None:
    """Measure CPU time and resident memory, including torch, of a separate process."""
    peer = Peer(measured)
    try:
        seconds, resident = peer.hear(120)
    finally:
        peer.bury()
    assert seconds < 5 and resident < 1 << 30


def measured(pipe: Connection) -> None:
    """Plan Qwen3-235B-A22B from FSDP over 64 ranks to 8 replicas of tensor parallel 8."""
    start = time.process_time()
    groups = [one("model.embed_tokens.weight", 151_936, 4096), one("lm_head.weight", 151_936, 4096)]
    groups += [group for number in range(94) for group in layer(f"model.layers.{number}.")]
    shapes, layouts = parameters(groups), manifests(groups, 8, torch.bfloat16, head_dim=128)
    places = [f"GPU-{i}" for i in range(64)]
    targets = [WeightLayout(manifest=layouts[i % 8], place=place) for i, place in enumerate(places)]
    make_plan(shards_of(shapes, 64), places, targets).copies(5)
    pipe.send(
        (time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    )


def layer(name: str) -> list[ParamGroup]:
    attention, mlp = f"{name}self_attn.", f"{name}mlp."
    heads = [
        (f"{attention}{n}_proj.weight", (rows, 4096))
        for n, rows in (("q", 8192), ("k", 512), ("v", 512))
    ]
    return [
        stack(f"{attention}qkv_proj.weight", heads),
        one(f"{attention}o_proj.weight", 4096, 8192),
        one(f"{mlp}gate.weight", 128, 4096),
        one(f"{mlp}experts.gate_up_proj", 128, 2 * 1536, 4096),
        one(f"{mlp}experts.down_proj", 128, 4096, 1536),
        *(one(f"{name}{n}.weight", 4096) for n in ("input_layernorm", "post_attention_layernorm")),
        *(one(f"{attention}{n}_norm.weight", 128) for n in "qk"),
    ]

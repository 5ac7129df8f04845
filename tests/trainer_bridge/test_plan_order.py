"""Who sends what, in which order: local first, load spread over replicas; shards lined up with the rollout's slices."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from rollout.types import Manifest
from tests.helpers.trainer_bridge.layouts import decoder_groups, manifest, manifests, parameters, piece
from trainer_bridge.aligned import aligned_dims
from trainer_bridge.plan import Plan, SourceShard, Target, make_plan
from trainer_bridge.sources import fsdp_shards, local_box

ROWS = (4, 8)


def layers(count: int) -> Manifest:
    return manifest(*(piece(f"p{i}", i * 128, ROWS) for i in range(count)))


def hsdp(names: list[str], replicas: int, size: int) -> list[SourceShard]:
    shards = []
    for name, at in itertools.product(names, itertools.product(range(replicas), range(size))):
        start, shape = local_box(ROWS, [Replicate(), Shard(0)], (replicas, size), at)
        rank = at[0] * size + at[1]
        shards.append(SourceShard(name=name, global_shape=ROWS, dtype="float32", start=start, shape=shape, rank=rank))
    return shards


@pytest.mark.parametrize("targets", [1, 2, 3, 5])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_elsewhere_share_the_load(replicas: int, targets: int) -> None:
    count = 6
    engines = [Target(manifest=layers(count), place=f"other-{i}") for i in range(targets)]
    places = [f"GPU-{i}" for i in range(replicas * 2)]
    plan = make_plan(hsdp([f"p{i}" for i in range(count)], replicas, 2), engines, places)
    sent: Counter[int] = Counter()
    for (rank, _), nbytes in plan.link_bytes.items():
        sent[rank] += nbytes
    assert sum(sent.values()) == sum(plan.nbytes) == targets * count * 128
    assert set(sent.values()) == {targets * count * 128 // (replicas * 2)}


def test_ranks_that_share_the_targets_device_share_the_load_too() -> None:
    plan = make_plan(hsdp(["p0", "p1"], 2, 1), [Target(manifest=layers(2), place="cpu")], ["cpu", "cpu"])
    assert [len(plan.copies(rank)) for rank in range(2)] == [1, 1]
    assert plan.link_bytes == {}


def test_a_replica_on_the_targets_device_is_taken() -> None:
    places = [f"GPU-{i}" for i in range(4)]
    engines = [Target(manifest=layers(3), place=place) for place in places]
    plan = make_plan(hsdp(["p0", "p1", "p2"], 4, 1), engines, places)
    assert plan.link_bytes == {}
    for rank in range(4):
        assert {copy.target for copy in plan.copies(rank)} == {rank}


def test_own_device_comes_first_then_each_rank_begins_elsewhere() -> None:
    places = ["GPU-0", "GPU-1", "GPU-2"]
    engines = [Target(manifest=layers(2), place=place) for place in (*places, "GPU-1")]
    plan = make_plan([s for i in range(2) for s in fsdp_shards(f"p{i}", ROWS, "float32", 3)], engines, places)
    order = [[target for target, _ in itertools.groupby(copy.target for copy in plan.copies(r))] for r in range(2)]
    assert order == [[0, 1, 2, 3], [1, 3, 2, 0]]
    for rank in range(3):
        for _, copies in itertools.groupby(plan.copies(rank), key=lambda copy: copy.target):
            offsets = [copy.offset for copy in copies]
            assert offsets == sorted(offsets)


def shared_by(names_dims: dict[str, int], shapes: dict[str, tuple[int, ...]], layouts: list[Manifest]) -> Plan:
    world = len(layouts)
    places = [f"GPU-{i}" for i in range(world)]
    shards = [s for n, shape in shapes.items() for s in fsdp_shards(n, shape, "float32", world, names_dims.get(n, 0))]
    return make_plan(shards, [Target(manifest=m, place=p) for m, p in zip(layouts, places, strict=True)], places)


@pytest.mark.parametrize("vocab", [16, 13])
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 2)])
def test_shards_by_aligned_dims_leave_only_what_all_engines_hold_to_links(size: int, kv_heads: int, vocab: int) -> None:
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
    if kv_heads < size:  # two engines hold each head, a rank has half of it
        shared |= {f"{layer}self_attn.{name}_proj.weight" for name in "kv"}
    assert crossing == shared
    assert sum(plan.link_bytes.values()) < sum(shared_by({}, shapes, layouts).link_bytes.values())


def test_aligned_dims_keep_what_fsdp_cannot_share_and_what_gains_nothing() -> None:
    groups = decoder_groups(hidden=4, vocab=8, heads=3, kv_heads=3, inner=3, tied=True)
    whole = manifests(groups, 1, torch.bfloat16, tied=True)
    assert aligned_dims(whole * 2) == {}  # replicas: each needs everything
    columns = [piece("a", 0, (4, 3), start=(0, first), global_shape=(4, 5), strides=(3, 1)) for first in (0, 2)]
    assert aligned_dims([manifest(each) for each in columns]) == {}  # 5 columns over 2 ranks
    experts = manifests(decoder_groups(hidden=4, vocab=8, heads=2, kv_heads=2, inner=4, tied=True), 2, torch.bfloat16)
    assert "model.layers.0.mlp.experts.gate_up_proj" not in aligned_dims(experts)

"""Syncs from trainers with one tensor per expert into engines with stacked experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.model import spellings
from rollout.weights import WeightLayout
from rollout.weights.params import one, shard_groups
from tests.helpers.case_selection import rounds
from tests.helpers.rollout.tp_splits import decoder_splits
from tests.helpers.trainer_bridge.layouts import HEAD_DIM, box_of, manifests
from tests.helpers.trainer_bridge.stored_weights import StoredWeights
from tests.helpers.trainer_bridge.sync_hooks import HookedAgreement
from tests.helpers.trainer_bridge.targets import Rank, in_ranks
from tests.helpers.trainer_bridge.three_params import shards_of
from trainer_bridge.sync.plan import make_plan
from trainer_bridge.sync.weight_sync import SyncReceipt

MLP = "model.layers.0.mlp."
Shapes = dict[str, tuple[int, ...]]
ENGINES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # (ranks, expert-parallel size)


def shapes_of(experts: int, inner: int, hidden: int) -> Shapes:
    return {
        f"{MLP}gate.weight": (experts, hidden),
        f"{MLP}experts.gate_up_proj": (experts, 2 * inner, hidden),
        f"{MLP}experts.down_proj": (experts, hidden, inner),
        "model.norm.weight": (hidden,),
    }


def named(whole: dict[str, Tensor], way: int) -> dict[str, Tensor]:
    """Return views by the names of a spelling: 1 is that of most families, 2 is Mixtral's."""
    views = {}
    for name, value in whole.items():
        ways = spellings(name, tuple(value.shape))
        for part in ways[min(way, len(ways) - 1)]:
            bounds = zip(part.start, part.box, strict=True)
            views[part.name] = value[tuple(slice(at, at + n) for at, n in bounds)].view(part.shape)
    return views


def sizes(trained: dict[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in trained.items()}


def engines_of(draw: st.DrawFn, shapes: Shapes) -> list[StoredWeights]:
    """Draw the ranks of one or two engines."""
    groups = [one(name, *shape) for name, shape in shapes.items()]
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
    ranks = []
    for _ in range(draw(st.integers(1, 2))):
        size, parts = draw(st.sampled_from(ENGINES))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        for rank in range(size):
            own = shard_groups(groups, decoder_splits(HEAD_DIM, size, parts), rank, size)
            ranks.append(StoredWeights(own, {}, dtype, f"GPU-{rank % 2}", zeros))
    return ranks


@settings(max_examples=rounds(20, 500))
@given(st.data())
def test_experts_stored_one_by_one_are_written_into_stacks(data: st.DataObject) -> None:
    """Divide engines by inner channels, by expert or both; some ranks may have no expert.

    Link traffic must be minimal.
    """
    draw, generator = data.draw, torch.Generator().manual_seed(0)
    experts, inner = draw(st.integers(1, 5)), draw(st.sampled_from([4, 8]))
    shapes = shapes_of(experts, inner, hidden=draw(st.sampled_from([1, 3])))
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    way, world = draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    trained, engines = named(whole, way), engines_of(draw, shapes)
    shards, ranks = shards_of(sizes(trained), world), list[Rank]()
    held = {f"GPU-{i}": {name: torch.zeros(shapes[name]) for name in shapes} for i in range(3)}
    for number in range(world):
        own_shards = [shard for shard in shards if shard.rank == number]
        sources = {shard.name: trained[shard.name][box_of(shard)].clone() for shard in own_shards}
        place = f"GPU-{number}"
        ranks.append(Rank(sources=sources, targets=() if number else engines, place=place))
        covered = named(held[place], way)
        for shard in own_shards:
            covered[shard.name][box_of(shard)] = 1
    receipts = in_ranks(ranks, sync, shards, 60.0, HookedAgreement)
    assert all(isinstance(receipt, SyncReceipt) for receipt in receipts), receipts
    least = nbytes = 0
    for engine in engines:
        engine.check_bytes()
        for piece in engine.store.manifest.slices:
            stored, box = engine.read(piece), box_of(piece)
            assert torch.equal(stored, whole[piece.name][box].to(stored.dtype))
            nbytes += stored.nbytes
            least += int((held[engine.place][piece.name][box] == 0).sum()) * stored.element_size()
        engine.saver.close()
    for receipt in receipts:
        assert (receipt.nbytes, receipt.link_bytes) == (nbytes, least)


def sync(number: int, rank: Rank) -> SyncReceipt:
    assert rank.sync is not None
    return rank.sync.sync(1)


def test_expert_missing_in_the_trainer_is_named() -> None:
    """Include an engine rank that has no part of the missing expert."""
    shapes = shapes_of(3, 4, 2)
    groups = [one(name, *shape) for name, shape in shapes.items()]
    layouts = manifests(groups, 2, torch.float32, expert_parallel=2)
    trained = named({name: torch.zeros(shape) for name, shape in shapes.items()}, 1)
    trained[f"{MLP}experts.3.up_proj.weight"] = trained.pop(f"{MLP}experts.1.up_proj.weight")
    targets = [WeightLayout(manifest=layout, place="cpu") for layout in layouts]
    with pytest.raises(ValueError) as caught:
        make_plan(shards_of(sizes(trained), 1), ["cpu"], targets)
    assert f"missing in the trainer: {MLP}experts.1.up_proj.weight" in str(caught.value)
    assert f"unknown to the rollout: {MLP}experts.3.up_proj.weight" in str(caught.value)

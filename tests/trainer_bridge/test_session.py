"""Syncs of a single rank: written pages, mapped leases, and refused syncs that touch nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import memsaver
from rollout.weights import Manifest, torch_dtype
from tests.helpers.trainer_bridge.layouts import box_of, manifest, piece
from tests.helpers.trainer_bridge.targets import PageTarget
from tests.helpers.trainer_bridge.three_params import SHAPES, full, shards, whole
from trainer_bridge import Trainer
from trainer_bridge.sync.shards import local_shard
from trainer_bridge.sync.weight_sync import WeightSync
from trainer_bridge.sync.writer import Writer

Make = Callable[..., PageTarget]


@pytest.fixture
def make_target(device: str) -> Iterator[Make]:
    targets: list[PageTarget] = []

    def make(layout: Manifest | None = None) -> PageTarget:
        targets.append(PageTarget(layout or whole(), device))
        return targets[-1]

    yield make
    for target in targets:
        target.saver.close()  # fails with a LeaseError if a lease outlives its sync


def check(target: PageTarget, tensors: dict[str, Tensor]) -> None:
    for number, p in enumerate(target.layout.slices):
        assert torch.equal(
            target.read(number), tensors[p.name][box_of(p)].to(torch_dtype(p.dtype))
        ), p.name


def single_rank_sync(*targets: PageTarget, **sources: Any) -> WeightSync:
    device = str(targets[0].arena.device)
    tensors = {
        name: tensor for name, tensor in {**full(device), **sources}.items() if tensor is not None
    }
    return WeightSync(shards(1), lambda: tensors, targets, place=targets[0].place)


def test_pages_stay_mapped_until_the_engine_moves_them(device: str, make_target: Make) -> None:
    target = make_target(whole("bfloat16"))
    sync = single_rank_sync(target)
    for version in (1, 2):
        receipt = sync.sync(version)
        assert target.version == receipt.version == version
        assert receipt.digests == (target.digest(),)
        assert (receipt.nbytes, receipt.link_bytes) == (2 * sum(map(math.prod, SHAPES.values())), 0)
        assert target.leases() == 1
    assert list(receipt.stages) == ["prepare", "open", "map", "write", "verify", "commit"]
    assert int((target.arena == 0xA5).sum()) >= target.layout.nbytes - receipt.nbytes, (
        "padding was written"
    )
    target.saver.pause()
    target.saver.resume()
    assert target.leases() == 0
    sync.sync(3)
    check(target, full(device))
    sync.close()
    assert target.leases() == 0


def test_sync_refuses_a_layout_that_is_not_the_plans(make_target: Make) -> None:
    target = make_target()
    sync = single_rank_sync(target)
    target.layout = dataclasses.replace(target.layout, layout_hash="newer")
    stale = "stale plan for version 9: made for layout .*, the rollout offers newer"
    with pytest.raises(ValueError, match=stale):
        sync.sync(9)
    assert target.untouched()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proj": None}, "no shard proj"),
        ({"proj": torch.zeros(6, 3)}, r"proj: shard \(6, 3\), \(7, 3\) in the plan"),
    ],
)
def test_missing_or_misshapen_sources_leave_target_untouched(
    change: dict[str, Any], message: str, device: str, make_target: Make
) -> None:
    target = make_target()
    change = {
        name: tensor if tensor is None else tensor.to(device) for name, tensor in change.items()
    }
    with pytest.raises(ValueError, match=f"nothing was written: .*{message}"):
        single_rank_sync(target, **change).sync(1)
    assert target.untouched() and target.version == 0, "the update was begun"


def test_trainer_keeps_tables_and_refuses_older_versions(
    model_path: str,
    make_trainer: Callable[..., Trainer],
    make_target: Make,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(model_path, device=device)
    with pytest.raises(memsaver.StateError, match=r"call connect\(\[engine\]\) first"):
        trainer.sync_weights(1)
    slices, offset, index = [], 0, 0
    for name, shard in trainer.shards().items():
        slices.append(piece(name, offset, tuple(shard.shape), "bfloat16", index_base=index))
        offset += shard.numel() * 2
        index += shard.numel()
    target = make_target(manifest(*slices))
    writer = mock.Mock(wraps=Writer)
    monkeypatch.setattr("trainer_bridge.sync.weight_sync.Writer", writer)
    trainer.connect([target])
    receipt = trainer.sync_weights(3)
    assert (receipt.version, receipt.nbytes, target.version) == (3, offset, 3)
    check(target, dict(trainer.shards()))
    for param in trainer.model.parameters():
        local_shard(param).mul_(-2)
    second = trainer.sync_weights(3)
    check(target, dict(trainer.shards()))
    assert second.digests != receipt.digests and writer.call_count == 1, "tables must be kept"
    before = target.arena.clone()
    with pytest.raises(ValueError, match="version 2 is stale: version 3 has been written"):
        trainer.sync_weights(2)
    assert torch.equal(target.arena, before) and target.version == 3
    trainer.offload("params")
    with pytest.raises(memsaver.StateError, match=r"sync_weights\(\) needs tag 'params'"):
        trainer.sync_weights(4)

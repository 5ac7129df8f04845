"""A sync of one rank: what lies in the rollout's pages afterwards, on any device, and what is
refused untouched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import memsaver
from rollout.weights import Manifest
from tests.helpers.trainer_bridge.layouts import box_of, manifest, piece
from tests.helpers.trainer_bridge.small import SHAPES, columns, full, shards, whole
from tests.helpers.trainer_bridge.targets import PageTarget
from tests.helpers.trainer_bridge.tolerance import assert_merged
from trainer_bridge import Trainer
from trainer_bridge.sync.shards import local_shard, torch_dtype
from trainer_bridge.sync.weight_sync import WeightSync
from trainer_bridge.sync.writer import DerivedCopies, LowRank, Writer

Make = Callable[..., PageTarget]


@pytest.fixture
def make_target(device: str) -> Iterator[Make]:
    made: list[PageTarget] = []

    def make(layout: Manifest | None = None) -> PageTarget:
        made.append(PageTarget(layout or whole(), device))
        return made[-1]

    yield make
    for target in made:
        target.saver.close()  # LeaseError: a lease is used beyond its sync


def check(target: PageTarget, tensors: dict[str, Tensor]) -> None:
    for number, p in enumerate(target.layout.slices):
        assert torch.equal(
            target.read(number), tensors[p.name][box_of(p)].to(torch_dtype(p.dtype))
        ), p.name


def alone(
    *targets: PageTarget, derived: dict[str, LowRank] | None = None, **sources: Any
) -> WeightSync:
    device = str(targets[0].arena.device)
    mine = {
        name: tensor for name, tensor in {**full(device), **sources}.items() if tensor is not None
    }
    return WeightSync(
        shards(1), lambda: mine, targets, place=targets[0].place, derived=lambda: derived or {}
    )


def test_pages_stay_mapped_until_the_engine_moves_them(device: str, make_target: Make) -> None:
    target = make_target(whole("bfloat16"))
    sync = alone(target)
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


@pytest.mark.parametrize("stage", ["begin", "verify", "commit"])
def test_all_targets_that_were_opened_hear_of_one_that_fails(stage: str, make_target: Make) -> None:
    first, second = make_target(), make_target()
    second.fail_at = stage
    with pytest.raises(OSError, match=f"cosmic ray in {stage}"):
        alone(first, second).sync(1)
    assert first.version is None and "cosmic ray" in first.reason
    expected = (0, True) if stage == "begin" else (None, False)
    assert (second.version, second.untouched()) == expected


@pytest.mark.parametrize("scratch", [16, 80, 1 << 20])
def test_derived_weights_are_written_in_pieces_of_any_size(
    scratch: int, device: str, make_target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row, five rows or all at once, from one shard into two tensor-parallel column slices."""
    monkeypatch.setattr(
        "trainer_bridge.sync.writer.DerivedCopies",
        partial(DerivedCopies, scratch_bytes=scratch),
    )
    draw = torch.Generator().manual_seed(5)
    a, b = torch.randn((3, 4), generator=draw), torch.randn((10, 3), generator=draw)
    halves = make_target(columns(0)), make_target(columns(1))
    alone(*halves, derived={"embed": LowRank(a=a.to(device), b=b.to(device), scale=0.5)}).sync(1)
    for target, mine in zip(halves, (slice(0, 2), slice(2, 4)), strict=True):
        assert_merged(target.read(0).cpu(), full("cpu")["embed"][:, mine], a[:, mine], b, 0.5)


@pytest.mark.parametrize("b", [(6, 3), (7, 2)])
def test_factors_that_do_not_fit_are_refused_untouched(
    b: tuple[int, int], make_target: Make
) -> None:
    target, misfit = make_target(), LowRank(a=torch.zeros(3, 3), b=torch.zeros(b), scale=1.0)
    with pytest.raises(
        ValueError,
        match=rf"nothing was written: proj: b \({b[0]}, {b[1]}\) @ a \(3, 3\) does not fit",
    ):
        alone(target, derived={"proj": misfit}).sync(1)
    assert target.untouched() and target.version == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layout_hash": "newer"},
            "stale plan for version 9: made for layout .*, the rollout offers newer",
        ),
        ({"nbytes": 1 << 30}, "its manifest describes 1073741824"),
    ],
)
def test_pages_that_are_not_those_of_the_plan_are_refused(
    change: dict[str, Any], message: str, device: str, make_target: Make
) -> None:
    target = make_target()
    sync = alone(target)
    target.layout = dataclasses.replace(target.layout, **change)
    with pytest.raises(ValueError, match=message):
        sync.sync(9)
    assert target.untouched()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proj": None}, "no shard proj"),
        ({"proj": torch.zeros(6, 3)}, r"proj: shard \(6, 3\), \(7, 3\) in the plan"),
    ],
)
def test_sources_that_do_not_do_leave_the_target_as_it_was(
    change: dict[str, Any], message: str, device: str, make_target: Make
) -> None:
    target = make_target()
    change = {
        name: tensor if tensor is None else tensor.to(device) for name, tensor in change.items()
    }
    with pytest.raises(ValueError, match=f"nothing was written: .*{message}"):
        alone(target, **change).sync(1)
    assert target.untouched() and target.version == 0, "it was not even begun"


def test_a_trainer_keeps_its_tables_and_refuses_older_versions(
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
    made = mock.Mock(wraps=Writer)
    monkeypatch.setattr("trainer_bridge.sync.weight_sync.Writer", made)
    trainer.connect([target])
    receipt = trainer.sync_weights(3)
    assert (receipt.version, receipt.nbytes, target.version) == (3, offset, 3)
    check(target, dict(trainer.shards()))
    for param in trainer.model.parameters():
        local_shard(param).mul_(-2)
    again = trainer.sync_weights(3)
    check(target, dict(trainer.shards()))
    assert again.digests != receipt.digests and made.call_count == 1, "tables last, values do not"
    before = target.arena.clone()
    with pytest.raises(ValueError, match="version 2 is stale: version 3 has been written"):
        trainer.sync_weights(2)
    assert torch.equal(target.arena, before) and target.version == 3
    trainer.offload("params")
    with pytest.raises(memsaver.StateError, match=r"sync_weights\(\) needs tag 'params'"):
        trainer.sync_weights(4)

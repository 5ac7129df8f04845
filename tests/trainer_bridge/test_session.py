"""A sync over all ranks: what lies in the rollouts' pages afterwards, who serves what, what is refused untouched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import memsaver
from rollout.types import Manifest
from tests.helpers.trainer_bridge.layouts import box_of, manifest, piece
from tests.helpers.trainer_bridge.small import SHAPES, columns, full, shards, whole
from tests.helpers.trainer_bridge.targets import PageTarget, Rank, in_ranks
from trainer_bridge import Trainer
from trainer_bridge.errors import SyncError
from trainer_bridge.model import local_shard
from trainer_bridge.plan import torch_dtype
from trainer_bridge.rank_copies import RankCopies
from trainer_bridge.session import SyncReceipt, WeightSync


@pytest.fixture
def make_target(device: str) -> Iterator[Callable[..., PageTarget]]:
    made: list[PageTarget] = []

    def make(layout: Manifest | None = None, **options: Any) -> PageTarget:
        made.append(PageTarget(layout or whole(), device, **options))
        return made[-1]

    yield make
    for target in made:
        target.saver.close()  # LeaseError: a lease is used beyond its sync


def ranks(device: str, world: int, targets: Sequence[Sequence[PageTarget]]) -> list[Rank]:
    tensors = full(device)
    made = []
    for rank in range(world):
        mine = {s.name: tensors[s.name][s.start[0] : s.start[0] + s.shape[0]] for s in shards(world) if s.rank == rank}
        made.append(Rank(sources=mine, targets=targets[rank]))
    return made


def check(target: PageTarget, tensors: dict[str, Tensor]) -> None:
    for number, p in enumerate(target.layout.slices):
        assert torch.equal(target.read(number), tensors[p.name][box_of(p)].to(torch_dtype(p.dtype))), p.name


def alone(target: PageTarget, device: str, **sources: Any) -> WeightSync:
    mine = {name: tensor for name, tensor in {**full(device), **sources}.items() if tensor is not None}
    return WeightSync(shards(1), lambda: mine, [target], place=target.place)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_rank_and_one_target(dtype: str, device: str, make_target: Callable[..., PageTarget]) -> None:
    target = make_target(whole(dtype))
    sync = alone(target, device)
    receipt = sync.sync(5)
    check(target, full(device))
    assert target.version == receipt.version == 5 and receipt.digests == (target.digest(),)
    assert receipt.nbytes == sum(map(math.prod, SHAPES.values())) * torch_dtype(dtype).itemsize
    assert receipt.link_bytes == 0
    assert list(receipt.stages) == ["prepare", "open", "map", "write", "verify", "commit"]
    assert int((target.arena == 0xA5).sum()) >= target.layout.nbytes - receipt.nbytes, "padding was written"


def test_pages_stay_mapped_until_the_engine_moves_them(device: str, make_target: Callable[..., PageTarget]) -> None:
    target = make_target(whole("float32"))
    sync = alone(target, device)
    for version in (1, 2):
        sync.sync(version)
        assert target.leases() == 1
    target.saver.pause()
    target.saver.resume()
    assert target.leases() == 0
    sync.sync(3)
    check(target, full(device))
    sync.close()
    assert target.leases() == 0


def test_ranks_write_into_each_others_targets(device: str, make_target: Callable[..., PageTarget]) -> None:
    """Two tensor-parallel targets of rank 0, one replica of the last rank."""
    parts = [make_target(columns(rank), place="elsewhere" if rank else "here") for rank in range(2)]
    replica, world = make_target(place="here"), 3
    made = ranks(device, world, [parts, [], [replica]])

    def run(number: int, rank: Rank) -> SyncReceipt:
        assert rank.sync is not None
        rank.sync.sync(1)
        for tensor in rank.sources.values():
            tensor.mul_(-2)
        return rank.sync.sync(2)

    results = in_ranks(made, run, shards(world))
    tensors = {name: tensor * -2 for name, tensor in full(device).items()}
    for target in (*parts, replica):
        check(target, tensors)
        assert target.version == 2
    for result in results:
        assert result.digests == tuple(target.digest() for target in (*parts, replica))
        assert result.link_bytes == sum(parts[1].read(i).nbytes for i in range(3)), "all ranks are here"


@pytest.mark.parametrize(("stage", "failing"), [("begin", 0), ("verify", 1), ("commit", 0), ("commit", 1)])
def test_a_target_that_fails_ends_the_sync_on_all_ranks(
    stage: str, failing: int, make_target: Callable[..., PageTarget], device: str
) -> None:
    targets = [make_target(), make_target()]
    targets[failing].fail_at = stage
    made = ranks(device, 2, [[targets[0]], [targets[1]]])

    def run(number: int, rank: Rank) -> None:
        assert rank.sync is not None
        rank.sync.sync(1)

    for number, error in enumerate(in_ranks(made, run, shards(2))):
        text = f"cosmic ray in {stage}"
        assert text in str(error) and isinstance(error, OSError if number == failing else SyncError)
        if number != failing:
            assert f"rank {failing}: OSError" in error.reason
    for number, target in enumerate(targets):
        begun = stage != "begin" or number != failing
        assert target.version is (None if begun else 0), "some serve the new version, others do not"
        assert target.reason == "" if not begun else "cosmic ray" in target.reason


def test_a_writer_that_fails_half_way(device: str, make_target: Callable[..., PageTarget]) -> None:
    target = make_target()

    def stop(done: int, total: int) -> None:
        assert target.leases() == 1
        if done == 1:
            raise RuntimeError("cosmic ray")

    with pytest.raises(RuntimeError, match="cosmic ray"):
        alone(target, device).sync(1, on_part=stop)
    assert target.version is None and "cosmic ray" in target.reason
    target.saver.pause("weights")


def test_a_layout_that_changed_is_refused(device: str, make_target: Callable[..., PageTarget]) -> None:
    target = make_target()
    sync = alone(target, device)
    target.layout = dataclasses.replace(target.layout, layout_hash="newer")
    with pytest.raises(ValueError, match="stale plan for version 9: made for layout .*, the rollout offers newer"):
        sync.sync(9)
    assert target.untouched()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proj": None}, "no shard proj"),
        ({"proj": torch.zeros(6, 3)}, r"proj: shard \(6, 3\), \(7, 3\) in the plan"),
        ({"norm": torch.tensor([0.0, math.nan, 0.0, 0.0])}, "norm has NaN or infinite values"),
        ({"norm": torch.tensor([0.0, math.inf, 0.0, 0.0])}, "norm has NaN or infinite values"),
    ],
)
def test_sources_that_do_not_do_leave_the_target_as_it_was(
    change: dict[str, Any], message: str, device: str, make_target: Callable[..., PageTarget]
) -> None:
    target = make_target()
    change = {name: tensor if tensor is None else tensor.to(device) for name, tensor in change.items()}
    with pytest.raises(ValueError, match=f"nothing was written: .*{message}"):
        alone(target, device, **change).sync(1, check_finite=True)
    assert target.untouched() and target.version == 0, "it was not even begun"


def test_names_that_do_not_fit_are_refused_when_connecting(
    model_path: str, make_trainer: Callable[..., Trainer], make_target: Callable[..., PageTarget], device: str
) -> None:
    trainer, target = make_trainer(model_path, device=device), make_target()
    with pytest.raises(memsaver.StateError, match=r"call connect\(\[engine\]\) first"):
        trainer.sync_weights(1)
    with pytest.raises(ValueError, match="nothing was written: missing in the trainer: embed") as caught:
        trainer.connect([target])
    assert "unknown to the rollout: model.layers.0.input_layernorm.weight" in str(caught.value)
    assert target.untouched() and target.version == 0


def test_pages_smaller_than_the_manifest_are_refused(device: str, make_target: Callable[..., PageTarget]) -> None:
    target = make_target()
    target.layout = dataclasses.replace(target.layout, nbytes=1 << 30)
    with pytest.raises(ValueError, match="its manifest describes 1073741824"):
        alone(target, device).sync(1)
    assert target.untouched()


def test_a_trainer_keeps_its_tables_and_refuses_older_versions(
    model_path: str,
    make_trainer: Callable[..., Trainer],
    make_target: Callable[..., PageTarget],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(model_path, device=device)
    slices, offset, index = [], 0, 0
    for name, shard in trainer.shards().items():
        slices.append(piece(name, offset, tuple(shard.shape), "bfloat16", index_base=index))
        offset += shard.numel() * 2
        index += shard.numel()
    target = make_target(manifest(*slices))
    made = mock.Mock(wraps=RankCopies)
    monkeypatch.setattr("trainer_bridge.session.RankCopies", made)
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
    trainer.park("params")
    with pytest.raises(memsaver.StateError, match=r"sync_weights\(\) needs tag 'params'"):
        trainer.sync_weights(4)

"""Writing an offer: what lies in the rollout's pages afterwards, and what is refused before the first byte."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import memsaver
from memsaver.ops.digest import digest
from rollout.types import Manifest, WeightOffer, WriteReceipt
from tests.trainer_bridge.layouts import manifest, piece
from trainer_bridge import Trainer
from trainer_bridge.model import local_shard
from trainer_bridge.plan import dim0_shards, make_plan, torch_dtype
from trainer_bridge.session import RankCopies, WriteSession

UNTOUCHED = 0xA5
SHAPES: dict[str, tuple[int, ...]] = {"embed": (10, 4), "norm": (4,), "proj": (7, 3)}


class Target:
    """A rollout's pages: a tag of a saver, filled with a pattern, and its manifest."""

    def __init__(self, layout: Manifest, device: str) -> None:
        self.saver = memsaver.MemorySaver(device=device)
        self.arena = self.saver.empty((layout.nbytes,), torch.uint8, tag="weights")
        self.arena.fill_(UNTOUCHED)
        self.layout = layout

    def offer(self, version: int = 1, **changes: Any) -> WeightOffer:
        ticket = self.saver.share("weights", writable=True)
        return WeightOffer(version=version, manifest=dataclasses.replace(self.layout, **changes), ticket=ticket)

    def read(self, name: str) -> Tensor:
        (p,) = [p for p in self.layout.slices if p.name == name]
        dtype = torch_dtype(p.dtype)
        return self.arena[p.offset : p.offset + math.prod(p.shape) * dtype.itemsize].view(dtype).view(p.shape)

    def digest(self) -> int:
        return sum(digest(self.read(p.name), p.index_base) for p in self.layout.slices) % 2**64

    def untouched(self) -> bool:
        return bool((self.arena == UNTOUCHED).all())

    def leases(self) -> int:
        return self.saver.report().tags["weights"].leases


def layout(dtype: str) -> Manifest:
    size = torch_dtype(dtype).itemsize
    return manifest(
        piece("embed", 0, (10, 4), dtype),
        piece("norm", 256, (4,), dtype, index_base=40),
        piece("proj", 256 + 4 * size, (7, 3), dtype, index_base=44),
    )


@pytest.fixture
def make_target(device: str) -> Iterator[Callable[..., Target]]:
    made: list[Target] = []

    def make(dtype: str = "float32") -> Target:
        made.append(Target(layout(dtype), device))
        return made[-1]

    yield make
    for target in made:
        assert target.leases() == 0, "a lease outlived its session"
        target.saver.close()


def sources(device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}


def plan_for(target: Target, world: int = 1) -> Any:
    shards = [s for name, shape in SHAPES.items() for s in dim0_shards(name, shape, "float32", world)]
    return make_plan(shards, target.layout)


def copies_for(target: Target, device: str) -> RankCopies:
    return RankCopies(plan_for(target), sources(device))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("world", [1, 3])
def test_the_target_holds_the_cast_source(
    dtype: str, world: int, device: str, make_target: Callable[..., Target]
) -> None:
    target, full = make_target(dtype), sources(device)
    plan = plan_for(target, world)
    receipts: list[WriteReceipt] = []
    for rank in range(world):
        local = {
            s.name: full[s.name][s.start : s.start + s.shape[0]]
            for name, shape in SHAPES.items()
            for s in dim0_shards(name, shape, "float32", world)
            if s.rank == rank
        }
        receipts.append(WriteSession(target.offer(5), RankCopies(plan, local, rank=rank)).write())
    for name, tensor in full.items():
        assert torch.equal(target.read(name), tensor.to(torch_dtype(dtype))), name
    assert sum(receipt.digest for receipt in receipts) % 2**64 == target.digest()
    written = sum(math.prod(shape) for shape in SHAPES.values()) * torch_dtype(dtype).itemsize
    assert sum(receipt.nbytes for receipt in receipts) == plan.nbytes == written
    assert int((target.arena == UNTOUCHED).sum()) >= target.layout.nbytes - written, "padding was written"
    assert {(r.version, r.layout_hash) for r in receipts} == {(5, target.layout.layout_hash)}


def test_the_digest_says_what_should_be_there_not_what_is(device: str, make_target: Callable[..., Target]) -> None:
    target = make_target()
    receipt = WriteSession(target.offer(), copies_for(target, device)).write()
    assert receipt.digest == target.digest()
    target.read("proj")[3, 1] += 1
    assert receipt.digest != target.digest()


def test_progress_is_told_before_each_batch_of_copies(device: str, make_target: Callable[..., Target]) -> None:
    target, seen = make_target(), list[tuple[int, int, bool]]()
    session = WriteSession(
        target.offer(),
        copies_for(target, device),
        on_copy=lambda done, total: seen.append((done, total, target.untouched())),
    )
    receipt = session.write()
    per_copy = [(0, 3, True), (1, 3, False), (2, 3, False)]
    assert seen == (per_copy if device == "cpu" else per_copy[:2]), "a GPU's batches begin at none and at half of them"
    assert receipt.digest == target.digest()


def test_a_writer_that_fails_half_way_gives_the_lease_back(device: str, make_target: Callable[..., Target]) -> None:
    def fail(done: int, total: int) -> None:
        assert target.leases() == 1
        if done == 1:
            raise RuntimeError("cosmic ray")

    target = make_target()
    with pytest.raises(RuntimeError, match="cosmic ray"):
        WriteSession(target.offer(), copies_for(target, device), on_copy=fail).write()
    assert target.leases() == 0
    target.saver.pause("weights")


def test_a_plan_for_another_layout_is_refused(device: str, make_target: Callable[..., Target]) -> None:
    target = make_target()
    with pytest.raises(ValueError, match="stale plan for version 9: made for layout layout, the rollout offers newer"):
        WriteSession(target.offer(9, layout_hash="newer"), copies_for(target, device))
    assert target.untouched()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proj": None}, "no shard proj"),
        ({"proj": torch.zeros(6, 3)}, r"proj: shard \(6, 3\) lacks rows 0\+7"),
        ({"norm": torch.tensor([0.0, math.nan, 0.0, 0.0])}, "norm has NaN or infinite values"),
        ({"norm": torch.tensor([0.0, math.inf, 0.0, 0.0])}, "norm has NaN or infinite values"),
    ],
)
def test_sources_that_do_not_do_leave_the_target_untouched(
    change: dict[str, Tensor | None], message: str, device: str, make_target: Callable[..., Target]
) -> None:
    target = make_target()
    local = {name: tensor for name, tensor in {**sources(device), **change}.items() if tensor is not None}
    with pytest.raises(ValueError, match=f"nothing was written: {message}"):
        copies = RankCopies(plan_for(target), local)
        WriteSession(target.offer(), copies, check_finite=True).write()
    assert target.untouched()


def test_pages_smaller_than_the_manifest_are_refused(device: str, make_target: Callable[..., Target]) -> None:
    target = make_target()
    offer = target.offer(nbytes=1 << 30)
    with pytest.raises(ValueError, match="its manifest describes 1073741824"):
        WriteSession(offer, copies_for(target, device)).write()
    assert target.untouched()


def test_a_trainer_refuses_versions_that_go_back_and_names_that_do_not_fit(
    model_path: str, make_trainer: Callable[..., Trainer], make_target: Callable[..., Target], device: str
) -> None:
    trainer = make_trainer(model_path, device=device)
    target = make_target()
    with pytest.raises(ValueError, match="nothing was written: missing in the trainer: embed") as caught:
        trainer.sync_weights(target.offer(1))
    assert "unknown to the rollout: model.layers.0.input_layernorm.weight" in str(caught.value)
    assert target.untouched()
    slices, offset, index = [], 0, 0
    for name, shard in trainer.shards().items():
        slices.append(piece(name, offset, tuple(shard.shape), "bfloat16", index_base=index))
        offset += shard.numel() * 2
        index += shard.numel()
    whole = Target(manifest(*slices), device)
    receipt = trainer.sync_weights(whole.offer(3))
    assert (receipt.version, receipt.digest, receipt.nbytes) == (3, whole.digest(), offset)
    for name, shard in trainer.shards().items():
        assert torch.equal(whole.read(name), shard.bfloat16())
    made = trainer._copies
    for param in trainer.model.parameters():
        local_shard(param).mul_(-2)
    again = trainer.sync_weights(whole.offer(3))
    assert trainer._copies is made and again.digest == whole.digest() != receipt.digest, "tables last, values do not"
    before = whole.arena.clone()
    with pytest.raises(ValueError, match="stale offer of version 2: version 3 has been written"):
        trainer.sync_weights(whole.offer(2))
    assert torch.equal(whole.arena, before)
    trainer.park("params")
    with pytest.raises(memsaver.StateError, match=r"sync_weights\(\) needs tag 'params'"):
        trainer.sync_weights(whole.offer(4))
    whole.saver.close()

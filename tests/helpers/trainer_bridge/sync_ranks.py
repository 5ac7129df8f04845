"""Ranks in processes of their own, that sync the same shards by one way after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from memsaver.system.devices import place_of
from rollout.weights import torch_dtype
from tests.helpers.trainer_bridge.layouts import box_of
from tests.helpers.trainer_bridge.targets import PageTarget
from tests.helpers.trainer_bridge.three_params import columns, full, shards, whole
from trainer_bridge.errors import SyncError
from trainer_bridge.sync import relay
from trainer_bridge.sync.agree import group_agreement
from trainer_bridge.sync.weight_sync import WeightSync
from trainer_bridge.sync.writer import LowRank

SMALL = 80  # bytes of a message: a row of `embed` is 16, all of it 160


@dataclass(frozen=True, kw_only=True)
class Case:
    """ranks, targets: hosts that they claim to be on, one each; None: where they are. low_rank:
    `proj` is base + b @ a.
    only: write these parameters.
    message_bytes: small enough for boxes to be split.
    """

    ranks: Sequence[str] | None = None
    targets: Sequence[str] | None = None
    low_rank: bool = False
    only: tuple[str, ...] | None = None
    message_bytes: int = SMALL


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank saw of a case. right: its targets hold what they should, and serve it. messages:
    bytes of each that came by the handle, of this rank's targets.
    """

    digests: tuple[int, ...]
    own: tuple[int, ...]
    link_bytes: int
    stages: list[str]
    right: bool
    messages: list[list[int]]


def make_targets(rank: int, world: int, device: str, dtype: str = "float32") -> list[PageTarget]:
    """Two tensor-parallel parts beside rank 0, a replica in `dtype` beside the last rank: targets
    0, 1 and 2.
    """
    made = [PageTarget(columns(part), device) for part in range(2)] if rank == 0 else []
    return made + ([PageTarget(whole(dtype), device)] if rank == world - 1 else [])


def connected(
    rank: int,
    world: int,
    case: Case,
    targets: Sequence[PageTarget],
    device: str,
    timeout: float = 20.0,
) -> WeightSync:
    assert dist.group.WORLD is not None
    numbers = ([0, 1] if rank == 0 else []) + ([2] if rank == world - 1 else [])
    here = place_of(torch.device(device))
    key = here.rpartition("/")[2]
    for target, number in zip(targets, numbers, strict=True):
        target.place = here if case.targets is None else f"{case.targets[number]}/{key}"
    mine = sources(rank, world, device)
    place = here if case.ranks is None else f"{case.ranks[rank]}/{key}"
    return WeightSync(
        [shard for shard in shards(world) if shard.rank == rank],
        lambda: mine,
        targets,
        group_agreement(dist.group.WORLD, timeout=timeout),
        place=place,
    )


def sources(rank: int, world: int, device: str) -> dict[str, Tensor]:
    tensors = full(device)
    mine = [shard for shard in shards(world) if shard.rank == rank]
    return {s.name: tensors[s.name][s.start[0] : s.start[0] + s.shape[0]] for s in mine}


def low_rank(base: Tensor, rank: int, world: int) -> LowRank:
    first = next(s.start[0] for s in shards(world) if s.rank == rank and s.name == "proj")
    b = torch.arange(7.0).view(7, 1)[first : first + len(base)]
    return LowRank(a=torch.ones(1, 3, device=base.device), b=b.to(base.device), scale=0.5)


def sync_cases(
    rank: int, world: int, device: str, dtype: str, cases: Mapping[str, Case]
) -> dict[str, Seen]:
    """One sync a case, of the same shards into the same targets, which forget between the cases."""
    targets = make_targets(rank, world, device, dtype)
    seen = {}
    for version, (name, case) in enumerate(cases.items(), start=1):
        for target in targets:
            target.arena.fill_(0xA5)
            target.messages.clear()
            target.only = case.only
        if device != "cpu":
            torch.cuda.synchronize()  # others write next
        sync = connected(rank, world, case, targets, device)
        proj = sources(rank, world, device)["proj"]
        derived = {"proj": low_rank(proj, rank, world)} if case.low_rank else {}
        with mock.patch.object(relay, "MESSAGE_BYTES", case.message_bytes):
            for _ in range(2):  # tables are used again
                receipt = sync.sync(version, names=case.only, derived=derived)
        seen[name] = Seen(
            digests=receipt.digests,
            own=tuple(target.digest() for target in targets),
            link_bytes=receipt.link_bytes,
            stages=list(receipt.stages),
            right=all(
                holds(target, device, case.low_rank) and target.version == version
                for target in targets
            ),
            messages=[list(target.messages) for target in targets],
        )
    return seen


def holds(target: PageTarget, device: str, changed: bool = False) -> bool:
    """All slices are what the shards say, and the bytes between them what they were."""
    tensors, covered = full(device), torch.zeros_like(target.arena)
    if changed:
        tensors["proj"] += 0.5 * torch.arange(7.0, device=device).view(7, 1)
    for number, p in target.meant():
        if not torch.equal(
            target.read(number), tensors[p.name][box_of(p)].to(torch_dtype(p.dtype))
        ):
            return False
        # slices of these layouts are runs
        covered[p.offset : p.offset + target.read(number).nbytes] = 1
    return bool((target.arena[covered == 0] == 0xA5).all())


Break = Callable[[int, pytest.MonkeyPatch], None]
"""(rank, patch): sees to it that something fails."""


def failing(
    rank: int, world: int, broken: Mapping[str, tuple[Break, Case]], timeout: float
) -> tuple[dict[str, tuple[Exception | None, list[int | None]]], bool]:
    """One sync each: its error and the targets' versions; and whether the ranks are fit for another
    one afterwards.
    """
    targets = make_targets(rank, world, "cpu")
    seen = {}
    for name, (break_it, case) in broken.items():
        sync = connected(rank, world, case, targets, "cpu", timeout)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(relay, "MESSAGE_BYTES", case.message_bytes)
            break_it(rank, patch)
            try:
                sync.sync(1)
                error = None
            except Exception as caught:
                error = caught
        seen[name] = error, [target.version for target in targets]
        if isinstance(error, SyncError) and "broke off" in error.reason:
            return seen, False
        for target in targets:  # LeaseError: a lease is used beyond its sync
            target.saver.pause("weights")
            target.saver.resume("weights")
    for target in targets:
        target.arena.fill_(0xA5)
    sync.sync(2)
    return seen, all(holds(target, "cpu") for target in targets)

"""Ranks in separate processes, which sync the same shards over different routes."""

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
    """One sync.

    Attributes:
        ranks: Host that each rank pretends to be on; None for the real one.
        targets: Host that each target pretends to be on; None for the real one.
        low_rank: Whether `proj` is base + b @ a.
        only: Parameters to write; None for all.
        message_bytes: Limit of a message. The default splits boxes.
    """

    ranks: Sequence[str] | None = None
    targets: Sequence[str] | None = None
    low_rank: bool = False
    only: tuple[str, ...] | None = None
    message_bytes: int = SMALL


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The result of a case on one rank.

    Attributes:
        digests: Digests of the receipt.
        own: Digests of this rank's targets.
        link_bytes: As in the receipt.
        stages: Stages of the receipt.
        right: Whether this rank's targets hold the expected bytes and serve the version.
        messages: Bytes of each message that came by the handle, per target of this rank.
    """

    digests: tuple[int, ...]
    own: tuple[int, ...]
    link_bytes: int
    stages: list[str]
    right: bool
    messages: list[list[int]]


def make_targets(rank: int, world: int, device: str, dtype: str = "float32") -> list[PageTarget]:
    """Create this rank's targets.

    Targets 0 and 1 are two tensor-parallel parts on rank 0's device. Target 2 is a replica in
    `dtype` on the last rank's device.
    """
    targets = [PageTarget(columns(part), device) for part in range(2)] if rank == 0 else []
    return targets + ([PageTarget(whole(dtype), device)] if rank == world - 1 else [])


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
    tensors = sources(rank, world, device)
    place = here if case.ranks is None else f"{case.ranks[rank]}/{key}"
    return WeightSync(
        [shard for shard in shards(world) if shard.rank == rank],
        lambda: tensors,
        targets,
        group_agreement(dist.group.WORLD, timeout=timeout),
        place=place,
    )


def sources(rank: int, world: int, device: str) -> dict[str, Tensor]:
    tensors = full(device)
    own_shards = [shard for shard in shards(world) if shard.rank == rank]
    return {s.name: tensors[s.name][s.start[0] : s.start[0] + s.shape[0]] for s in own_shards}


def low_rank(base: Tensor, rank: int, world: int) -> LowRank:
    first = next(s.start[0] for s in shards(world) if s.rank == rank and s.name == "proj")
    b = torch.arange(7.0).view(7, 1)[first : first + len(base)]
    return LowRank(a=torch.ones(1, 3, device=base.device), b=b.to(base.device), scale=0.5)


def sync_cases(
    rank: int, world: int, device: str, dtype: str, cases: Mapping[str, Case]
) -> dict[str, Seen]:
    """Sync the same shards in all cases, clearing the targets between them."""
    targets = make_targets(rank, world, device, dtype)
    results = {}
    for version, (name, case) in enumerate(cases.items(), start=1):
        for target in targets:
            target.arena.fill_(0xA5)
            target.messages.clear()
            target.only = case.only
        if device != "cpu":
            torch.cuda.synchronize()  # other processes write next
        sync = connected(rank, world, case, targets, device)
        proj = sources(rank, world, device)["proj"]
        derived = {"proj": low_rank(proj, rank, world)} if case.low_rank else {}
        with mock.patch.object(relay, "MESSAGE_BYTES", case.message_bytes):
            for _ in range(2):  # the second sync uses the tables again
                receipt = sync.sync(version, names=case.only, derived=derived)
        results[name] = Seen(
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
    return results


def holds(target: PageTarget, device: str, changed: bool = False) -> bool:
    """Return whether slices equal the shards, and bytes between them are unchanged."""
    tensors, covered = full(device), torch.zeros_like(target.arena)
    if changed:
        tensors["proj"] += 0.5 * torch.arange(7.0, device=device).view(7, 1)
    for number, p in target.meant():
        if not torch.equal(
            target.read(number), tensors[p.name][box_of(p)].to(torch_dtype(p.dtype))
        ):
            return False
        # Slices of these layouts are contiguous.
        covered[p.offset : p.offset + target.read(number).nbytes] = 1
    return bool((target.arena[covered == 0] == 0xA5).all())


Break = Callable[[int, pytest.MonkeyPatch], None]
"""Called with (rank, patch) to make a sync fail."""


def failing(
    rank: int, world: int, broken: Mapping[str, tuple[Break, Case]], timeout: float
) -> tuple[dict[str, tuple[Exception | None, list[int | None]]], bool]:
    """Run one sync per way to break it.

    Returns:
        Each sync's error and the targets' versions; whether the ranks can sync again afterwards.
    """
    targets = make_targets(rank, world, "cpu")
    results = {}
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
        results[name] = error, [target.version for target in targets]
        if isinstance(error, SyncError) and "the exchange" in error.reason:
            return results, False
        for target in targets:  # fails with a LeaseError if a lease outlives its sync
            target.saver.pause("weights")
            target.saver.resume("weights")
    for target in targets:
        target.arena.fill_(0xA5)
    sync.sync(2)
    return results, all(holds(target, "cpu") for target in targets)

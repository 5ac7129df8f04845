"""FSDP2 over two ranks -> a replica on each one's GPU, gathered by NCCL. The replica lies in the
trainer's own process: what people pay on top to reach an engine in another one is not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.common import Figures, settle, timed
from benchmarks.sync import base
from benchmarks.sync.base import RANKS, TARGET, WARMUP, Source, SyncScale, content, synced
from benchmarks.sync.rivals_ipc import split

Seen = dict[str, list[float]]
"""Of each way: ms of the rounds."""


def replicas(scale: SyncScale) -> Figures:
    """`full_tensor()` + copy, and gathered buckets."""
    found, by_rank = [], base.ranks(scale, _replicas)
    for source, *seen in zip(scale.sources, *by_rank, strict=True):
        found += _figures(scale, f"{source}: ", source.params // RANKS, seen)
    return found


def all_gather(scale: SyncScale) -> Figures:
    """One NCCL all-gather of the whole model in bf16, as it comes: nothing is where an engine wants
    it.
    """
    part = scale.sources[0].params // RANKS
    name = f"bfloat16, {part * RANKS / 1e9:.2f} G: "
    return _figures(scale, name, part, base.ranks(scale, _all_gather, part))


def _figures(scale: SyncScale, name: str, part: int, seen: list[Seen]) -> Figures:
    """A round takes as long as its slowest rank. part: elements that a rank holds."""
    linked = part * (RANKS - 1) * TARGET.itemsize
    slowest = {
        way: [max(times) for times in zip(*(each[way] for each in seen), strict=True)]
        for way in seen[0]
    }
    found = []
    for way, times in slowest.items():
        found += synced(scale, name + way, statistics.median(times), linked=linked)
    return found


def _warm_up(device: torch.device) -> None:
    """NCCL connects at the first collective."""
    part = torch.zeros(1 << 20, dtype=TARGET, device=device)
    dist.all_gather_into_tensor(torch.empty(RANKS << 20, dtype=TARGET, device=device), part)
    dist.barrier()
    settle(device)


def _rounds(scale: SyncScale, device: torch.device, run: Callable[[], object]) -> list[float]:
    """All ranks start together."""
    times = []
    for _ in range(WARMUP + scale.repeats):
        dist.barrier()
        times.append(timed(run, device))
    return times[WARMUP:]


# ---------------------------------------------------------------- ranks


def _replicas(rank: int, scale: SyncScale) -> list[Seen]:
    """Of each source; in one start, for joining NCCL takes seconds."""
    _warm_up(scale.place(rank))
    return [_of_source(rank, scale, source) for source in scale.sources]


def _of_source(rank: int, scale: SyncScale, source: Source) -> Seen:
    device = scale.place(rank)
    shards, target, seen = _shards(rank, scale, source), base.make_target(source, device), Seen()
    for name, way in WAYS.items():
        for tensor in target.values():
            tensor.zero_()
        seen[name] = _rounds(scale, device, partial(way, scale, shards, target))
        base.check(target, source)
    return seen


def _shards(rank: int, scale: SyncScale, source: Source) -> dict[str, DTensor]:
    """A rank's rows of every parameter, as FSDP2 lays them out; ranks have equal parts."""
    mesh = init_device_mesh(scale.device.type, (RANKS,))
    shards = {}
    for name, shape in source.shapes.items():
        local = (
            content(name, shape, scale.place(rank))
            .chunk(RANKS)[rank]
            .to(source.torch_dtype, copy=True)
        )
        shards[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return shards


def _full_tensor(scale: SyncScale, shards: dict[str, DTensor], target: dict[str, Tensor]) -> None:
    for name, shard in shards.items():
        target[name].copy_(shard.full_tensor())


def _buckets(scale: SyncScale, shards: dict[str, DTensor], target: dict[str, Tensor]) -> None:
    """As verl's: local rows packed and cast, one all-gather a bucket, copied out by rank."""
    for names in split(
        {name: tuple(tensor.shape) for name, tensor in target.items()}, scale.bucket
    ):
        rows = [shards[name].to_local().view(-1) for name in names]
        sizes = [each.numel() for each in rows]
        packed = torch.empty(sum(sizes), dtype=TARGET, device=rows[0].device)
        for part, local in zip(packed.split(sizes), rows, strict=True):
            part.copy_(local)
        gathered = torch.empty(RANKS * packed.numel(), dtype=TARGET, device=packed.device)
        dist.all_gather_into_tensor(gathered, packed)
        for rank, whole in enumerate(gathered.view(RANKS, -1)):
            for name, part in zip(names, whole.split(sizes), strict=True):
                place = target[name].chunk(RANKS)[rank]
                place.copy_(part.view(place.shape))


WAYS = {"full_tensor() + copy_": _full_tensor, "all-gather of buckets + copy_": _buckets}


def _all_gather(rank: int, scale: SyncScale, part: int) -> Seen:
    device = scale.place(rank)
    _warm_up(device)
    mine = _filled(rank, part, device)
    whole = torch.zeros(RANKS * part, dtype=TARGET, device=device)
    seen = {
        "one all-gather": _rounds(scale, device, lambda: dist.all_gather_into_tensor(whole, mine))
    }
    for other, got in enumerate(whole.chunk(RANKS)):
        assert torch.equal(got, _filled(other, part, device)), f"of rank {other}"
    return seen


def _filled(rank: int, part: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rank)
    return torch.empty(part, dtype=TARGET, device=device).normal_(generator=generator)

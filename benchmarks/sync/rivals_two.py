"""FSDP2 over two ranks -> a replica on each rank's GPU, gathered by NCCL.

The replica is in the trainer's own process: the time to reach an engine in another process is not
counted.
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

Rounds = dict[str, list[float]]
"""Milliseconds of the rounds, by way."""


def replicas(scale: SyncScale) -> Figures:
    """Measure `full_tensor()` + copy, and gathered buckets."""
    measured, by_rank = [], base.ranks(scale, _replicas)
    for source, *rounds in zip(scale.sources, *by_rank, strict=True):
        measured += _figures(scale, f"{source}: ", source.params // RANKS, rounds)
    return measured


def all_gather(scale: SyncScale) -> Figures:
    """Measure one NCCL all-gather of the whole model in bf16, not in the layout of an engine."""
    part = scale.sources[0].params // RANKS
    name = f"bfloat16, {part * RANKS / 1e9:.2f} G: "
    return _figures(scale, name, part, base.ranks(scale, _all_gather, part))


def _figures(scale: SyncScale, name: str, part: int, by_rank: list[Rounds]) -> Figures:
    """Return figures of rounds, in which every rank holds `part` elements; the slowest counts."""
    linked = part * (RANKS - 1) * TARGET.itemsize
    slowest = {
        way: [max(times) for times in zip(*(rounds[way] for rounds in by_rank), strict=True)]
        for way in by_rank[0]
    }
    measured = []
    for way, times in slowest.items():
        measured += synced(scale, name + way, statistics.median(times), linked=linked)
    return measured


def _warm_up(device: torch.device) -> None:
    """Run a collective, because NCCL connects at the first one."""
    part = torch.zeros(1 << 20, dtype=TARGET, device=device)
    dist.all_gather_into_tensor(torch.empty(RANKS << 20, dtype=TARGET, device=device), part)
    dist.barrier()
    settle(device)


def _rounds(scale: SyncScale, device: torch.device, run: Callable[[], object]) -> list[float]:
    """Return the times of rounds that all ranks start together."""
    times = []
    for _ in range(WARMUP + scale.repeats):
        dist.barrier()
        times.append(timed(run, device))
    return times[WARMUP:]


# ---------------------------------------------------------------- ranks


def _replicas(rank: int, scale: SyncScale) -> list[Rounds]:
    """Measure all sources in one process, because joining NCCL takes seconds."""
    _warm_up(scale.place(rank))
    return [_of_source(rank, scale, source) for source in scale.sources]


def _of_source(rank: int, scale: SyncScale, source: Source) -> Rounds:
    device = scale.place(rank)
    shards, target = _shards(rank, scale, source), base.make_target(source, device)
    rounds = Rounds()
    for name, way in WAYS.items():
        for tensor in target.values():
            tensor.zero_()
        rounds[name] = _rounds(scale, device, partial(way, scale, shards, target))
        base.check(target, source)
    return rounds


def _shards(rank: int, scale: SyncScale, source: Source) -> dict[str, DTensor]:
    """Return a rank's rows of every parameter, in the layout of FSDP2; ranks have equal parts."""
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
    """Pack and cast local rows, gather one bucket at a time, and copy out by rank, like verl."""
    for names in split(
        {name: tuple(tensor.shape) for name, tensor in target.items()}, scale.bucket
    ):
        rows = [shards[name].to_local().view(-1) for name in names]
        sizes = [local.numel() for local in rows]
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


def _all_gather(rank: int, scale: SyncScale, part: int) -> Rounds:
    device = scale.place(rank)
    _warm_up(device)
    mine = _filled(rank, part, device)
    whole = torch.zeros(RANKS * part, dtype=TARGET, device=device)
    rounds = {
        "one all-gather": _rounds(scale, device, lambda: dist.all_gather_into_tensor(whole, mine))
    }
    for sender, received in enumerate(whole.chunk(RANKS)):
        assert torch.equal(received, _filled(sender, part, device)), f"part of rank {sender}"
    return rounds


def _filled(rank: int, part: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rank)
    return torch.empty(part, dtype=TARGET, device=device).normal_(generator=generator)

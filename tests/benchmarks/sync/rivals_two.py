"""FSDP2 over two ranks -> a replica on each one's GPU, gathered by NCCL. The replica lies in the trainer's own process:
what people pay on top to reach an engine in another one is not counted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.sync.base import (
    TARGET,
    Figure,
    Scale,
    Source,
    check,
    content,
    elapsed_ms,
    make_target,
    memory_rise,
    settle,
)
from tests.benchmarks.sync.processes import ranks
from tests.benchmarks.sync.rivals_ipc import split
from tests.benchmarks.sync.shapes import Shape, shard_box

RANKS = 2
Way = Callable[["Shards", dict[str, Tensor]], None]
"""Fills the replica."""
Seen = dict[str, tuple[list[float], int | None]]
"""Of each way: ms of the rounds, the device's rise in the first."""


def replicas(scale: Scale) -> list[Figure]:
    """`full_tensor()` + copy, the same of shards cast before, and gathered buckets."""
    figures = []
    by_rank: list[list[Seen]] = ranks(_replicas, RANKS, scale)
    for source, *seen in zip(scale.sources, *by_rank, strict=True):
        linked = source.params * TARGET.itemsize * (RANKS - 1) // RANKS
        figures += [_figure(f"{source}: {way}", way, seen, linked) for way in seen[0]]
    return figures


def all_gather(scale: Scale) -> list[Figure]:
    """One NCCL all-gather of the whole model in bf16, as it comes: nothing is where an engine wants it."""
    part = scale.sources[0].params // RANKS
    seen: list[Seen] = ranks(_all_gather, RANKS, scale, part)
    name = f"one all-gather, bfloat16, {part * RANKS / 1e9:.2f} G"
    return [_figure(name, "all-gather", seen, part * (RANKS - 1) * TARGET.itemsize)]


def _figure(name: str, way: str, seen: list[Seen], linked: int) -> Figure:
    """A round takes as long as its slowest rank."""
    rounds = [max(times) for times in zip(*(each[way][0] for each in seen), strict=True)]
    rises = [rise for rise in (each[way][1] for each in seen) if rise is not None]
    return Figure(what=name, ms=statistics.median(rounds), linked=linked, rise=max(rises) if rises else None)


def _warm_up(device: torch.device) -> None:
    """NCCL takes its buffers at the first collective; they are no way's staging."""
    part = torch.zeros(1 << 20, dtype=TARGET, device=device)
    dist.all_gather_into_tensor(torch.empty(RANKS << 20, dtype=TARGET, device=device), part)
    dist.barrier()
    settle(device)


def _rounds(scale: Scale, device: torch.device, run: Callable[[], None]) -> tuple[list[float], int | None]:
    """All ranks start together."""
    with memory_rise(device) as rise:
        run()
        settle(device)
    times = []
    for _ in range(scale.warmup + scale.repeats):
        dist.barrier()
        times.append(elapsed_ms(device, run))
    return times[scale.warmup :], rise[0] if rise else None


# ---------------------------------------------------------------- ranks


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A rank's rows of every parameter, as FSDP2 lays them out: Shard(0) DTensors."""

    bucket: int
    source: Source
    params: dict[str, Any]

    def local(self, name: str) -> Tensor:
        tensor: Tensor = self.params[name].to_local()
        return tensor

    def rows(self, name: str, rank: int) -> slice:
        (start, *_), (count, *_) = shard_box(self.source.shapes[name], rank, RANKS)
        return slice(start, start + count)


def make_shards(rank: int, scale: Scale, source: Source) -> Shards:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cuda" if scale.on_gpu else "cpu", (RANKS,))
    params = {}
    for name, shape in source.shapes.items():
        (start, *_), (count, *_) = shard_box(shape, rank, RANKS)
        local = content(name, shape, scale.device(rank))[start : start + count].to(source.torch_dtype, copy=True)
        params[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=_strides(shape)
        )
    return Shards(bucket=scale.bucket, source=source, params=params)


def _strides(shape: Shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _replicas(rank: int, scale: Scale) -> list[Seen]:
    """Of each source; in one start, for joining NCCL takes seconds."""
    _warm_up(scale.device(rank))
    return [_of_source(rank, scale, source) for source in scale.sources]


def _of_source(rank: int, scale: Scale, source: Source) -> Seen:
    device = scale.device(rank)
    shards, target = make_shards(rank, scale, source), make_target(source, device)
    seen: Seen = {}
    for name, way in WAYS.items():
        if way is _cast_first and source.torch_dtype == TARGET:
            continue
        for tensor in target.values():
            tensor.zero_()
        seen[name] = _rounds(scale, device, partial(way, shards, target))
        check(target, source)
    return seen


def _full_tensor(shards: Shards, target: dict[str, Tensor]) -> None:
    for name, param in shards.params.items():
        target[name].copy_(param.full_tensor())


def _cast_first(shards: Shards, target: dict[str, Tensor]) -> None:
    for name, param in shards.params.items():
        target[name].copy_(param.to(TARGET).full_tensor())


def _buckets(shards: Shards, target: dict[str, Tensor]) -> None:
    """As verl's: local rows packed and cast, one all-gather a bucket, copied out by rank."""
    device = next(iter(target.values())).device
    for names in split(shards.source.shapes, shards.bucket):
        sizes = {name: _part(shards, name) for name in names}
        packed = torch.empty(sum(sizes.values()), dtype=TARGET, device=device)
        first = 0
        for name, size in sizes.items():
            local = shards.local(name)
            packed[first : first + local.numel()].copy_(local.view(-1))
            first += size
        gathered = torch.empty(RANKS * packed.numel(), dtype=TARGET, device=device)
        dist.all_gather_into_tensor(gathered, packed)
        _unpack(shards, gathered.view(RANKS, -1), sizes, target)


def _part(shards: Shards, name: str) -> int:
    """Elements that every rank has room for: the first rank's, the largest."""
    shape = shards.source.shapes[name]
    return math.prod(shard_box(shape, 0, RANKS)[1])


def _unpack(shards: Shards, gathered: Tensor, sizes: dict[str, int], target: dict[str, Tensor]) -> None:
    """gathered: `[ranks, elements]`."""
    first = 0
    for name, size in sizes.items():
        for rank in range(RANKS):
            rows = target[name][shards.rows(name, rank)]
            rows.copy_(gathered[rank, first : first + rows.numel()].view(rows.shape))
        first += size


WAYS: dict[str, Way] = {
    "full_tensor() + copy_": _full_tensor,
    "cast, full_tensor() + copy_": _cast_first,
    "all-gather of buckets + copy_": _buckets,
}


def _all_gather(rank: int, scale: Scale, part: int) -> Seen:
    device = scale.device(rank)
    _warm_up(device)
    mine = _filled(rank, part, device)
    whole = torch.zeros(RANKS * part, dtype=TARGET, device=device)
    seen = {"all-gather": _rounds(scale, device, lambda: dist.all_gather_into_tensor(whole, mine))}
    for other in range(RANKS):
        assert torch.equal(whole[other * part : (other + 1) * part], _filled(other, part, device)), f"of rank {other}"
    return seen


def _filled(rank: int, part: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rank)
    return torch.empty(part, dtype=TARGET, device=device).normal_(generator=generator)

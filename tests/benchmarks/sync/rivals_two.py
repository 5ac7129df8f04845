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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.benchmarks.common import Figures, settle, timed
from tests.benchmarks.sync.base import (
    RANKS,
    TARGET,
    WARMUP,
    Source,
    SyncScale,
    check,
    content,
    make_target,
    ranks,
    synced,
)
from tests.benchmarks.sync.rivals_ipc import split
from tests.benchmarks.sync.shapes import Shape, held_box

Seen = dict[str, list[float]]
"""Of each way: ms of the rounds."""


def replicas(scale: SyncScale) -> Figures:
    """`full_tensor()` + copy, and gathered buckets."""
    found, by_rank = [], ranks(scale, _replicas)
    for source, *seen in zip(scale.sources, *by_rank, strict=True):
        found += _figures(scale, f"{source}: ", source.params // RANKS, seen)
    return found


def all_gather(scale: SyncScale) -> Figures:
    """One NCCL all-gather of the whole model in bf16, as it comes: nothing is where an engine wants it."""
    part = scale.sources[0].params // RANKS
    name = f"bfloat16, {part * RANKS / 1e9:.2f} G: "
    return _figures(scale, name, part, ranks(scale, _all_gather, part))


def _figures(scale: SyncScale, name: str, part: int, seen: list[Seen]) -> Figures:
    """A round takes as long as its slowest rank. part: elements that a rank holds."""
    linked = part * (RANKS - 1) * TARGET.itemsize
    slowest = {way: [max(times) for times in zip(*(each[way] for each in seen), strict=True)] for way in seen[0]}
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
        (start, *_), (count, *_) = held_box(name, self.source.shapes[name], rank, RANKS)
        return slice(start, start + count)


def make_shards(rank: int, scale: SyncScale, source: Source) -> Shards:
    mesh = init_device_mesh(scale.device.type, (RANKS,))
    params = {}
    for name, shape in source.shapes.items():
        (start, *_), (count, *_) = held_box(name, shape, rank, RANKS)
        local = content(name, shape, scale.place(rank))[start : start + count].to(source.torch_dtype, copy=True)
        params[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=_strides(shape)
        )
    return Shards(bucket=scale.bucket, source=source, params=params)


def _strides(shape: Shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _replicas(rank: int, scale: SyncScale) -> list[Seen]:
    """Of each source; in one start, for joining NCCL takes seconds."""
    _warm_up(scale.place(rank))
    return [_of_source(rank, scale, source) for source in scale.sources]


def _of_source(rank: int, scale: SyncScale, source: Source) -> Seen:
    device = scale.place(rank)
    shards, target = make_shards(rank, scale, source), make_target(source, device)
    seen: Seen = {}
    for name, way in WAYS.items():
        for tensor in target.values():
            tensor.zero_()
        seen[name] = _rounds(scale, device, partial(way, shards, target))
        check(target, source)
    return seen


def _full_tensor(shards: Shards, target: dict[str, Tensor]) -> None:
    for name, param in shards.params.items():
        target[name].copy_(param.full_tensor())


def _buckets(shards: Shards, target: dict[str, Tensor]) -> None:
    """As verl's: local rows packed and cast, one all-gather a bucket, copied out by rank."""
    device = next(iter(target.values())).device
    for names in split(shards.source.shapes, shards.bucket):
        # room for the first rank's rows, the most
        sizes = {name: math.prod(held_box(name, shards.source.shapes[name], 0, RANKS)[1]) for name in names}
        packed = torch.empty(sum(sizes.values()), dtype=TARGET, device=device)
        first = 0
        for name, size in sizes.items():
            local = shards.local(name)
            packed[first : first + local.numel()].copy_(local.view(-1))
            first += size
        gathered = torch.empty(RANKS * packed.numel(), dtype=TARGET, device=device)
        dist.all_gather_into_tensor(gathered, packed)
        _unpack(shards, gathered.view(RANKS, -1), sizes, target)


def _unpack(shards: Shards, gathered: Tensor, sizes: dict[str, int], target: dict[str, Tensor]) -> None:
    """gathered: `[ranks, elements]`."""
    first = 0
    for name, size in sizes.items():
        for rank in range(RANKS):
            rows = target[name][shards.rows(name, rank)]
            rows.copy_(gathered[rank, first : first + rows.numel()].view(rows.shape))
        first += size


WAYS: dict[str, Callable[[Shards, dict[str, Tensor]], None]] = {
    "full_tensor() + copy_": _full_tensor,
    "all-gather of buckets + copy_": _buckets,
}


def _all_gather(rank: int, scale: SyncScale, part: int) -> Seen:
    device = scale.place(rank)
    _warm_up(device)
    mine = _filled(rank, part, device)
    whole = torch.zeros(RANKS * part, dtype=TARGET, device=device)
    seen = {"one all-gather": _rounds(scale, device, lambda: dist.all_gather_into_tensor(whole, mine))}
    for other in range(RANKS):
        assert torch.equal(whole[other * part : (other + 1) * part], _filled(other, part, device)), f"of rank {other}"
    return seen


def _filled(rank: int, part: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rank)
    return torch.empty(part, dtype=TARGET, device=device).normal_(generator=generator)

"""The sync to an engine on another machine, against a broadcast of the same bytes.

Both GPUs are in this machine. NCCL is limited to sockets between them, and the engine's place names
another machine, so no pages are mapped between the two processes.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import memsaver
from benchmarks.common import MIB, Figure, Figures, medians, settle, timed
from benchmarks.sync.base import TARGET, WARMUP, Source, SyncScale, content, ranks
from benchmarks.sync.ours import Case, _check, _engine, _row
from memsaver.system.devices import device_key, place_of
from rollout import Engine
from rollout.process_group import widen_nccl_sockets
from rollout.weights import WeightLayout
from trainer_bridge.sync.agree import group_agreement
from trainer_bridge.sync.shards import SourceShard
from trainer_bridge.sync.weight_sync import WeightSync

SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
_PIECE = 256 * MIB  # bytes of one broadcast
Rows = list[dict[str, float]]


class FarEngine:
    """An engine whose weights are on another machine by name."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def weight_layout(self) -> WeightLayout:
        return dataclasses.replace(
            self._engine.weight_layout(), place=far(self._engine.saver.device)
        )


def far(device: torch.device) -> str:
    return f"far/{device_key(device)}"


def far_node(scale: SyncScale) -> Figures:
    """Measure a trainer on one GPU and a receiving rank on another one, over sockets."""
    source = scale.sources[0]
    trainer, receiver = ranks(dataclasses.replace(scale, seconds=5 * scale.seconds), _sync, source)
    rows = [
        {key: max(row[key] for row in both) for key in both[0]}
        for both in zip(trainer, receiver, strict=True)
    ]
    middle, name = medians(rows), f"{source}: memsaver, far node over sockets"
    nbytes = source.params * TARGET.itemsize
    assert nbytes <= middle["between"] < 1.01 * nbytes + 4096, "not all bytes crossed once"
    floor = middle["broadcast"]
    return [
        Figure(what=f"{name}, whole sync", value=middle["sync"]),
        Figure(what=f"{name}, whole sync", value=floor, unit="ms, floor"),
        Figure(what=f"{name}, whole sync", value=middle["sync"] / floor, unit="x floor"),
        Figure(what=f"{name}, write", value=middle["write"]),
        Figure(what=f"{name}, write", value=middle["write"] / floor, unit="x floor"),
        Figure(what=f"{name}, broadcast", value=nbytes / floor / 1e6, unit="GB/s"),
    ]


def _sync(rank: int, scale: SyncScale, source: Source) -> Rows:
    os.environ.update(SOCKETS)  # NCCL reads them when it connects, below
    widen_nccl_sockets()
    device, agreement = scale.place(rank), group_agreement(dist.group.WORLD)
    floor = _broadcasts(scale, source.params * TARGET.itemsize, device)
    if rank == 0:
        return _timed(scale, _trainer(source, agreement, device), floor, follows=False)
    case, saver = Case("far", source, "replica", False), memsaver.MemorySaver(device=device)
    engine = _engine(scale, case, saver)
    target = FarEngine(engine)
    sync = WeightSync((), dict, [target], agreement, place=far(device), device=device)
    rows = _timed(scale, sync, floor, follows=True)
    _check(engine, case)
    saver.close()
    return rows


def _trainer(source: Source, agreement: Any, device: torch.device) -> WeightSync:
    tensors: dict[str, Tensor] = {
        name: content(name, shape, device).to(source.torch_dtype)
        for name, shape in source.shapes.items()
    }
    shards = [
        SourceShard(name=name, global_shape=shape, start=(0,) * len(shape), shape=shape, rank=0)
        for name, shape in source.shapes.items()
    ]
    return WeightSync(shards, lambda: tensors, [], agreement, place=place_of(device))


def _timed(scale: SyncScale, sync: WeightSync, floor: float, follows: bool) -> Rows:
    rows = []
    for version in range(WARMUP + scale.repeats):
        dist.barrier()
        receipt = sync.follow(version) if follows else sync.sync(version)
        between = {"between": float(receipt.node_bytes), "broadcast": floor}
        rows.append({**_row(receipt), **between})
    return rows[WARMUP:]


def _broadcasts(scale: SyncScale, nbytes: int, device: torch.device) -> float:
    """Return the milliseconds of broadcasts of `nbytes` in all, in the median round."""
    piece = torch.empty(min(_PIECE, nbytes), dtype=torch.uint8, device=device)

    def broadcast() -> None:
        for first in range(0, nbytes, len(piece)):
            dist.broadcast(piece[: nbytes - first], src=0)
        settle(device)

    times = []
    for _ in range(WARMUP + scale.repeats):
        dist.barrier()
        times.append({"ms": timed(broadcast, device)})
    return medians(times[WARMUP:])["ms"]

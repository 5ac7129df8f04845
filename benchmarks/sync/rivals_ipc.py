"""Trainer and engine in two processes on one GPU, with CUDA IPC: single tensors, or buckets.

`reduce_tensor` makes the handles (on the CPU: shared memory), and a pipe carries them. The engine
maps, copies, unmaps and answers. The trainer's clock runs from the first handle to the last answer.
"""

from __future__ import annotations

import math
import pickle
import statistics
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from benchmarks.common import Figures, rise_of, settle, timed
from benchmarks.sync import base
from benchmarks.sync.base import TARGET, WARMUP, Shapes, Source, SyncScale, synced

Message = list[tuple[Any, list[tuple[str, int]]]]
"""Handles, each with its parameters: (name, index of the first element)."""
Send = Callable[[Connection, SyncScale, dict[str, Tensor]], None]
"""A function that makes one sync."""
END = b""


def per_tensor(scale: SyncScale) -> Figures:
    """Measure `update_weights_from_tensor`: the engine maps and copies every parameter."""
    return _measure("a CUDA IPC handle a tensor", _send_each, scale)


def buckets(scale: SyncScale) -> Figures:
    """Measure buckets in the engine's dtype, which are packed, shared and copied out in turn.

    verl and slime sync like this.
    """
    return _measure(
        f"buckets of {scale.bucket / 2**30:.3g} GiB over CUDA IPC", _send_buckets, scale
    )


def _measure(name: str, send: Send, scale: SyncScale) -> Figures:
    measured = []
    for source in scale.sources:
        (ms, rise), _ = base.pair(scale, _trainer, _engine, send, scale, source)
        measured += synced(scale, f"{source}: {name}", ms, source.copied, rise=rise)
    return measured


# ---------------------------------------------------------------- the trainer


def _trainer(pipe: Connection, send: Send, scale: SyncScale, source: Source) -> tuple[float, int]:
    """Return the median ms, and the rise of used bytes in the first sync, with nothing cached."""
    device = scale.place()
    tensors = base.make_source(source, device)
    settle(device)
    assert pipe.recv() == "ready"

    def sync() -> None:
        send(pipe, scale, tensors)

    rise = rise_of(device, sync)
    times = [timed(sync, device) for _ in range(WARMUP + scale.repeats)]
    pipe.send_bytes(END)
    assert pipe.recv() == "checked"
    return statistics.median(times[WARMUP:]), rise


def _send_each(pipe: Connection, scale: SyncScale, tensors: dict[str, Tensor]) -> None:
    _ask(pipe, [(reduce_tensor(tensor), [(name, 0)]) for name, tensor in tensors.items()])


def _send_buckets(pipe: Connection, scale: SyncScale, tensors: dict[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    largest = max(math.prod(shape) for shape in shapes.values())
    for names in split(shapes, scale.bucket):
        # buckets of one size, so that torch reuses the same memory
        bucket = torch.empty(
            max(scale.bucket // TARGET.itemsize, largest), dtype=TARGET, device=scale.place()
        )
        starts, first = [], 0
        for name in names:  # one after the other, cast
            bucket[first : first + tensors[name].numel()].copy_(tensors[name].view(-1))
            starts.append((name, first))
            first += tensors[name].numel()
        settle(scale.place())
        _ask(pipe, [(reduce_tensor(bucket), starts)])
        del bucket


def _ask(pipe: Connection, message: Message) -> None:
    pipe.send_bytes(bytes(ForkingPickler.dumps(message)))
    assert pipe.recv() == "copied"


def split(shapes: Shapes, nbytes: int) -> Iterator[list[str]]:
    """Yield groups of names, in order, that fit into `nbytes` in the target's dtype.

    A parameter that is larger than `nbytes` is a group of one.
    """
    names: list[str] = []
    used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * TARGET.itemsize
        if names and used + size > nbytes:
            yield names
            names, used = [], 0
        names.append(name)
        used += size
    if names:
        yield names


# ---------------------------------------------------------------- the engine


def _engine(pipe: Connection, send: Send, scale: SyncScale, source: Source) -> None:
    device = scale.place()
    target = base.make_target(source, device)
    settle(device)
    pipe.send("ready")
    while (data := pipe.recv_bytes()) != END:
        _take(data, target)
        pipe.send("copied")
    base.check(target, source)
    pipe.send("checked")


def _take(data: bytes, target: dict[str, Tensor]) -> None:
    """Map the handles, copy their parameters, and unmap."""
    message: Message = pickle.loads(data)
    mapped = [(rebuild(*arguments).view(-1), parts) for (rebuild, arguments), parts in message]
    for flat, parts in mapped:
        for name, first in parts:
            target[name].copy_(flat[first : first + target[name].numel()].view(target[name].shape))
    settle()

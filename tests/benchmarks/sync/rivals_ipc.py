"""Trainer and engine in two processes on one GPU, by CUDA IPC as people do it: a handle a tensor, or buckets.

`reduce_tensor` makes the handles (on the CPU: shared memory), a pipe carries them, the engine maps, copies, lets go
and answers. The trainer's clock runs from the first handle to the last answer.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tests.benchmarks.sync.base import (
    TARGET,
    Figure,
    Scale,
    Source,
    check,
    make_source,
    make_target,
    medians,
    memory_rise,
    settle,
)
from tests.benchmarks.sync.processes import pairs
from tests.benchmarks.sync.shapes import Shape, Shapes

Message = list[tuple[Any, list[tuple[str, int]]]]
"""Handles, and of each the parameters in it with the number of their first element."""
Row = dict[str, float]
Send = Callable[[Connection, Scale, dict[str, Tensor]], Row]
"""One sync: ms of its phases, the engine's included."""
END = b""


def per_tensor(scale: Scale) -> list[Figure]:
    """`update_weights_from_tensor`: the engine maps every parameter of the trainer and copies it."""
    return [_measure("a CUDA IPC handle a tensor", _send_each, scale, source) for source in scale.sources]


def buckets(scale: Scale) -> list[Figure]:
    """As verl and slime: packed into a bucket of the engine's dtype, shared, copied out, one bucket after the other."""
    name = f"buckets of {scale.bucket / 2**30:.3g} GiB over CUDA IPC"
    return [_measure(name, _send_buckets, scale, source) for source in scale.sources]


def _measure(name: str, send: Send, scale: Scale, source: Source) -> Figure:
    seen, checked = pairs(_trainer, _engine, send, scale, source, seconds=scale.seconds)
    assert checked == len(source.shapes)
    parts = medians(seen["rows"])
    rise = {"rise": seen["rise"]}
    return Figure(what=f"{source}: {name}", ms=parts.pop("ms"), copied=source.copied, parts=parts, **rise)


# ---------------------------------------------------------------- the trainer


def _trainer(pipe: Connection, number: int, send: Send, scale: Scale, source: Source) -> dict[str, Any]:
    """rise: of the first sync, which has nothing cached."""
    device = scale.device()
    tensors = make_source(source, device)
    settle(device)
    assert pipe.recv() == "ready"
    with memory_rise(device) as rise:
        _round(pipe, send, scale, tensors)
    rows = [_round(pipe, send, scale, tensors) for _ in range(scale.warmup + scale.repeats)]
    pipe.send_bytes(END)
    return {"rows": rows[scale.warmup :], "rise": rise[0] if rise else None}


def _round(pipe: Connection, send: Send, scale: Scale, tensors: dict[str, Tensor]) -> Row:
    started = time.perf_counter()
    row = send(pipe, scale, tensors)
    return {"ms": (time.perf_counter() - started) * 1e3, **row}


def _send_each(pipe: Connection, scale: Scale, tensors: dict[str, Tensor]) -> Row:
    started = time.perf_counter()
    message: Message = [(reduce_tensor(tensor), [(name, 0)]) for name, tensor in tensors.items()]
    data = bytes(ForkingPickler.dumps(message))
    handles = (time.perf_counter() - started) * 1e3
    return {"handles": handles, **_ask(pipe, data)}


def _send_buckets(pipe: Connection, scale: Scale, tensors: dict[str, Tensor]) -> Row:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    largest = max(math.prod(shape) for shape in shapes.values())
    device = next(iter(tensors.values())).device
    row = {"pack": 0.0, "handles": 0.0, "open": 0.0, "copy": 0.0, "close": 0.0}
    for names in split(shapes, scale.bucket):
        started = time.perf_counter()
        # of one size, so that torch gives the same memory each time
        bucket = torch.empty(max(scale.bucket // TARGET.itemsize, largest), dtype=TARGET, device=device)
        starts = _pack(bucket, [(name, tensors[name]) for name in names])
        settle(device)
        packed = time.perf_counter()
        data = bytes(ForkingPickler.dumps([(reduce_tensor(bucket), starts)]))
        answer = {"pack": (packed - started) * 1e3, "handles": (time.perf_counter() - packed) * 1e3, **_ask(pipe, data)}
        row = {key: value + answer[key] for key, value in row.items()}
        del bucket
    return row


def _pack(bucket: Tensor, named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, int]]:
    """One after the other, cast; the first element of each."""
    starts, first = [], 0
    for name, tensor in named:
        bucket[first : first + tensor.numel()].copy_(tensor.view(-1))
        starts.append((name, first))
        first += tensor.numel()
    return starts


def split(shapes: Shapes, nbytes: int) -> Iterator[list[str]]:
    """Names in their order, so many as fit into `nbytes` in the target's dtype; what fits nowhere goes alone."""
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


def _ask(pipe: Connection, data: bytes) -> Row:
    pipe.send_bytes(data)
    answer: Row = pipe.recv()
    return answer


# ---------------------------------------------------------------- the engine


def _engine(pipe: Connection, number: int, send: Send, scale: Scale, source: Source) -> int:
    """How many parameters were checked."""
    device = scale.device()
    target = make_target(source, device)
    settle(device)
    pipe.send("ready")
    while (data := pipe.recv_bytes()) != END:
        pipe.send(_take(data, target, source.shapes, device))
    check(target, source)
    return len(target)


def _take(data: bytes, target: dict[str, Tensor], shapes: dict[str, Shape], device: torch.device) -> Row:
    started = time.perf_counter()
    message: Message = pickle.loads(data)
    mapped = [(rebuild(*arguments).view(-1), parts) for (rebuild, arguments), parts in message]
    opened = time.perf_counter()
    for flat, parts in mapped:
        for name, first in parts:
            target[name].copy_(flat[first : first + target[name].numel()].view(shapes[name]))
    settle(device)
    copied = time.perf_counter()
    del mapped, message, flat
    closed = time.perf_counter()
    return {"open": (opened - started) * 1e3, "copy": (copied - opened) * 1e3, "close": (closed - copied) * 1e3}

"""checkpoint-engine (PyPI) where it is installed: a ParameterServer beside an engine on each GPU.

One sync is `register_checkpoint` (the trainer's tensors to pinned host memory), `gather_metas`, `update` (back to the
device in buckets, broadcast, a CUDA IPC handle, the engine copies). Each server registers its share of the names.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.sync.base import (
    Figure,
    Scale,
    Skipped,
    Source,
    check,
    content,
    make_target,
    medians,
    memory_rise,
    settle,
)
from tests.benchmarks.sync.processes import pairs

NAME = "model"
ROUNDS = 3  # after one: pinning the host's memory takes most of that one


def absent() -> bool:
    return importlib.util.find_spec("checkpoint_engine") is None


def one_gpu(scale: Scale) -> list[Figure]:
    return _measure(scale, 1)


def two_gpus(scale: Scale) -> list[Figure]:
    return _measure(scale, 2)


def _measure(scale: Scale, gpus: int) -> list[Figure]:
    """Of the first source: it copies bytes and casts nothing. ``Skipped`` where it is not installed."""
    if absent() or not scale.on_gpu:
        raise Skipped("checkpoint-engine is absent" if absent() else "it needs a GPU")
    source, port = scale.sources[0], _free_port()
    seen = pairs(_server, _engine, gpus, port, scale, source, seconds=scale.seconds, count=gpus)[:gpus]
    rounds = zip(*(each["rows"] for each in seen), strict=True)
    parts = medians([{key: max(row[key] for row in rows) for key in rows[0]} for rows in rounds])  # slowest server
    linked = source.params * 2 * (gpus - 1) // gpus
    return [
        Figure(
            what=f"{source}: checkpoint-engine, {gpus} GPU" + "s" * (gpus > 1),
            ms=parts.pop("ms"),
            copied=source.copied,
            linked=linked,
            rise=max(each["rise"] for each in seen),
            parts={**parts, "the first one": max(each["first"] for each in seen)},
        )
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---------------------------------------------------------------- servers


def _server(pipe: Connection, rank: int, gpus: int, port: int, scale: Scale, source: Source) -> dict[str, Any]:
    device = scale.device(rank)
    torch.cuda.set_device(device)
    tensors = {
        name: content(name, shape, device).to(source.torch_dtype)
        for number, (name, shape) in enumerate(source.shapes.items())
        if number % gpus == rank
    }
    server = _start(rank, gpus, port, scale)
    assert pipe.recv() == "ready"
    with memory_rise(device) as rise:
        first = _sync(server, pipe, tensors)
    rows = []
    for _ in range(ROUNDS):
        server.unregister_checkpoint(NAME)  # its pinned memory stays
        rows.append(_sync(server, pipe, tensors))
    pipe.send(None)
    dist.barrier()
    dist.destroy_process_group()
    return {"rows": rows, "rise": rise[0], "first": first["ms"]}


def _start(rank: int, gpus: int, port: int, scale: Scale) -> Any:
    """In its own process: the library reads the environment."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1"}
    os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(scale.bucket / 2**30)
    from checkpoint_engine import ParameterServer, ps
    from loguru import logger

    logger.disable("checkpoint_engine")  # some lines a bucket
    ps.get_ip = lambda: "127.0.0.1"  # it asks the network, and a host without one may not know its own name
    server = ParameterServer(rank=rank, world_size=gpus, auto_pg=False, master_addr="127.0.0.1", master_port=port)
    server.init_process_group()  # kept: by default it makes one for each update
    return server


def _sync(server: Any, pipe: Connection, tensors: dict[str, Tensor]) -> dict[str, float]:
    times = [time.perf_counter()]
    server.register_checkpoint(NAME, named_tensors=tensors, use_shared_memory_pool=True)
    times.append(time.perf_counter())
    server.gather_metas(NAME)
    times.append(time.perf_counter())
    server.update(NAME, pipe.send)
    times.append(time.perf_counter())
    assert pipe.recv() == "updated"
    names = ("to the host", "gather_metas", "update")
    parts = {name: (after - before) * 1e3 for name, before, after in zip(names, times, times[1:], strict=False)}
    return {"ms": (times[-1] - times[0]) * 1e3, **parts}


# ---------------------------------------------------------------- engines


def _engine(pipe: Connection, rank: int, gpus: int, port: int, scale: Scale, source: Source) -> int:
    """How many parameters were checked."""
    import zmq
    from checkpoint_engine import update_weights_from_ipc

    device = scale.device(rank)
    torch.cuda.set_device(device)
    target = make_target(source, device)
    settle(device)

    def load(weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            target[name].copy_(tensor)

    context = zmq.Context()
    pipe.send("ready")
    while (paths := pipe.recv()) is not None:
        update_weights_from_ipc(context, paths[rank][1], rank, run=load)
        pipe.send("updated")
    check(target, source)
    return len(target)

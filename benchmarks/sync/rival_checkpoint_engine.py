"""checkpoint-engine (PyPI) where it is installed: a ParameterServer beside an engine on one GPU.

One sync is `register_checkpoint` (the trainer's tensors to pinned host memory), `gather_metas`,
`update` (back to the device in buckets, broadcast, a CUDA IPC handle, the engine copies).
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import GIB, Figures, Skipped, medians, rise_of, settle
from benchmarks.sync.base import (
    Source,
    SyncScale,
    check,
    make_source,
    make_target,
    pair,
    synced,
)

NAME = "model"
ROUNDS = 3  # after one: pinning the host's memory takes most of that one


def one_gpu(scale: SyncScale) -> Figures:
    """Of the first source: it copies bytes and casts nothing.

    ``Skipped`` where it is not installed.
    """
    absent = importlib.util.find_spec("checkpoint_engine") is None
    if absent or not scale.on_gpu:
        raise Skipped("checkpoint-engine is absent" if absent else "it needs a GPU")
    source = scale.sources[0]
    (rows, first, rise), _ = pair(scale, _server, _engine, _free_port(), scale, source)
    parts = medians(rows)
    name, ms = f"{source}: checkpoint-engine", parts.pop("ms")
    return synced(
        scale, name, ms, source.copied, rise=rise, parts={**parts, "the first one": first}
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _server(
    pipe: Connection, port: int, scale: SyncScale, source: Source
) -> tuple[list[dict[str, float]], float, int]:
    """Milliseconds of the rounds, of the first one, and the rise of the device's use in that."""
    device = scale.place()
    torch.cuda.set_device(device)
    tensors = make_source(source, device)
    server = _start(port, scale)
    assert pipe.recv() == "ready"
    first: list[dict[str, float]] = []
    rise = rise_of(device, lambda: first.append(_sync(server, pipe, tensors)))
    rows = []
    for _ in range(ROUNDS):
        server.unregister_checkpoint(NAME)  # its pinned memory stays
        rows.append(_sync(server, pipe, tensors))
    pipe.send(None)
    assert pipe.recv() == "checked"
    return rows, first[0]["ms"], rise


def _start(port: int, scale: SyncScale) -> Any:
    """In its own process: the library reads the environment."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(scale.bucket / GIB)
    from checkpoint_engine import ParameterServer, ps
    from loguru import logger

    logger.disable("checkpoint_engine")  # some lines a bucket
    # it asks the network, and a host without one may not know its own name
    ps.get_ip = lambda: "127.0.0.1"
    server = ParameterServer(
        rank=0, world_size=1, auto_pg=False, master_addr="127.0.0.1", master_port=port
    )
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
    parts = {
        name: (after - before) * 1e3
        for name, before, after in zip(names, times, times[1:], strict=False)
    }
    return {"ms": (times[-1] - times[0]) * 1e3, **parts}


def _engine(pipe: Connection, port: int, scale: SyncScale, source: Source) -> None:
    import zmq
    from checkpoint_engine import update_weights_from_ipc

    device = scale.place()
    torch.cuda.set_device(device)
    target = make_target(source, device)
    settle(device)

    def load(weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            target[name].copy_(tensor)

    context = zmq.Context()
    pipe.send("ready")
    while (paths := pipe.recv()) is not None:
        update_weights_from_ipc(context, paths[0][1], 0, run=load)
        pipe.send("updated")
    check(target, source)
    pipe.send("checked")

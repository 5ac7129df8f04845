"""Processes joined by gloo or NCCL, each of which runs one function and returns its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.helpers.peers import Peer

Run = Callable[..., Any]
"""(rank, *args) -> the result; defined at the module level of a test."""


class Joined(NamedTuple):
    """Settings by which the processes find each other."""

    count: int
    meet: str
    seconds: float
    backend: str


def start_ranks(
    run: Run, count: int, meet: Path, *args: Any, seconds: float = 60.0, backend: str = "gloo"
) -> list[Peer]:
    """Start processes that call `run(rank, *args)` in a default process group.

    They meet at a new file `meet`, and the group's timeout is `seconds`. On NCCL each has its own
    GPU.
    """
    joined = Joined(count=count, meet=str(meet), seconds=seconds, backend=backend)
    return [Peer(_enter, run, rank, joined, args) for rank in range(count)]


def results(ranks: Sequence[Peer], seconds: float = 120.0) -> list[Any]:
    """Return the result of each rank, and end all of them.

    A rank that failed raises `peers.Failed` with its traceback.
    """
    try:
        return [rank.hear(seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def _enter(pipe: Connection, run: Run, rank: int, joined: Joined, args: tuple[Any, ...]) -> None:
    if joined.backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        joined.backend,
        store=dist.FileStore(joined.meet, joined.count),
        rank=rank,
        world_size=joined.count,
        timeout=timedelta(seconds=joined.seconds),
    )
    pipe.send(run(rank, *args))
    pipe.poll(60)  # wait until the test has all results: a rank that leaves closes connections

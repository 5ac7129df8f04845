"""Several processes joined by gloo or NCCL, for tests: each runs one function, and what it returns
comes back.
"""

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
"""(rank, *args) -> what the test wants to know of it; at module level of a test."""


class Joined(NamedTuple):
    """How the processes find each other."""

    count: int
    meet: str
    seconds: float
    backend: str


def start_ranks(
    run: Run, count: int, meet: Path, *args: Any, seconds: float = 60.0, backend: str = "gloo"
) -> list[Peer]:
    """Processes that call `run(rank, *args)` in a default group with a time-out of `seconds`; meet:
    a new file. On NCCL each has a GPU of its own.
    """
    joined = Joined(count=count, meet=str(meet), seconds=seconds, backend=backend)
    return [Peer(_enter, run, rank, joined, args) for rank in range(count)]


def results(ranks: Sequence[Peer], seconds: float = 120.0) -> list[Any]:
    """What each returned; `peers.Failed` with its traceback for one that raised.

    All have ended afterwards.
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
    pipe.poll(60)  # until the test has heard all of them: who leaves first takes connections along

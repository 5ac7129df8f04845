"""Several processes joined by gloo, for tests: each runs one function, and what it returns comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.peers import Peer

Run = Callable[..., Any]
"""(rank, *args) -> what the test wants to know of it; at module level of a test."""


def start_ranks(run: Run, count: int, meet: Path, *args: Any, seconds: float = 60.0) -> list[Peer]:
    """Processes that call `run(rank, *args)` in a default gloo group with a time-out of `seconds`; meet: a new file."""
    return [Peer(_enter, run, rank, count, str(meet), seconds, args) for rank in range(count)]


def results(ranks: Sequence[Peer], seconds: float = 120.0) -> list[Any]:
    """What each returned; `peers.Failed` with its traceback for one that raised. All have ended afterwards."""
    try:
        return [rank.hear(seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def _enter(pipe: Connection, run: Run, rank: int, count: int, meet: str, seconds: float, args: tuple[Any, ...]) -> None:
    store = dist.FileStore(meet, count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=seconds))
    pipe.send(run(rank, *args))
    pipe.poll(60)  # until the test has heard all of them: who leaves first takes connections along

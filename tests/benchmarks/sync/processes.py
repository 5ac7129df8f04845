"""The processes of a case: each runs one function, what they return comes back, and none outlives the case."""

from __future__ import annotations

import contextlib
import math
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.benchmarks.sync.base import Scale
from tests.helpers.peers import server

END_SECONDS = 5.0  # for all to end by themselves, collectives closed


class Call(NamedTuple):
    """A function at module level and its arguments, which can be pickled."""

    run: Callable[..., Any]
    args: tuple[Any, ...]


class CaseFailed(RuntimeError):
    """A process raised (its traceback is the text), died, or had no answer in time."""


def run_all(calls: Sequence[Call], seconds: float) -> list[Any]:
    """What each call returns, each in a process of its own. The first failure ends all; ``CaseFailed``."""
    pipes, running = [], []
    for call in calls:
        pipe, theirs = server.Pipe()
        running.append(server.Process(target=_enter, args=(theirs, call, seconds), daemon=True))
        running[-1].start()
        theirs.close()
        pipes.append(pipe)
    try:
        answers = _answers(pipes, seconds)
        for pipe in pipes:
            pipe.close()  # all have answered: they may leave
        deadline = time.monotonic() + END_SECONDS
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
        return answers
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.join()  # so that its memory is free


def alone(run: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """In one process: its device memory is free again afterwards."""
    return run_all([Call(run, args)], seconds)[0]


def pairs(
    trainer: Callable[..., Any], engine: Callable[..., Any], *args: Any, seconds: float, count: int = 1
) -> list[Any]:
    """`count` trainers, then as many engines: `run(pipe, number, *args)`, the pipe to the other of its number."""
    ends = [server.Pipe() for _ in range(count)]
    calls = [Call(trainer, (mine, number, *args)) for number, (mine, _) in enumerate(ends)]
    calls += [Call(engine, (theirs, number, *args)) for number, (_, theirs) in enumerate(ends)]
    started = _closing(ends)
    with started:
        return run_all(calls, seconds)


def ranks(run: Callable[..., Any], count: int, scale: Scale, *args: Any) -> list[Any]:
    """`run(rank, scale, *args)` in a default group of NCCL, a GPU each, or of gloo."""
    with tempfile.TemporaryDirectory() as folder:
        meet = str(Path(folder) / "store")
        calls = [Call(_join, (run, rank, count, meet, scale, args)) for rank in range(count)]
        return run_all(calls, scale.seconds)


@contextlib.contextmanager
def _closing(ends: Sequence[tuple[Connection, Connection]]) -> Any:
    try:
        yield
    finally:
        for end in (each for pair in ends for each in pair):
            end.close()


def _answers(pipes: Sequence[Connection], seconds: float) -> list[Any]:
    """In the order of the pipes."""
    deadline = time.monotonic() + seconds
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        missing = [pipe for i, pipe in enumerate(pipes) if i not in answers]
        ready = wait(missing, max(0.0, deadline - time.monotonic()))
        if not ready:
            numbers = [i for i in range(len(pipes)) if i not in answers]
            raise CaseFailed(f"no answer of processes {numbers} for {seconds:g} s")
        number = next(i for i, pipe in enumerate(pipes) if pipe is ready[0])
        try:
            good, answers[number] = pipes[number].recv()
        except (EOFError, ConnectionError) as error:
            raise CaseFailed(f"process {number} has died") from error
        if not good:
            raise CaseFailed(f"process {number} failed:\n{answers[number]}")
    return [answers[i] for i in range(len(pipes))]


def _enter(pipe: Connection, call: Call, seconds: float) -> None:
    signal.alarm(math.ceil(seconds + END_SECONDS))  # ends it should the parent have been killed
    torch.set_num_threads(1)
    try:
        pipe.send((True, call.run(*call.args)))
    except BaseException:
        with contextlib.suppress(OSError):  # the parent has given up before
            pipe.send((False, traceback.format_exc()))
        return
    pipe.poll(seconds)  # who leaves first takes connections and shared memory along


def _join(run: Callable[..., Any], rank: int, count: int, meet: str, scale: Scale, args: tuple[Any, ...]) -> Any:
    device = scale.device(rank)
    if scale.on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        scale.backend,
        store=dist.FileStore(meet, count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=scale.seconds),
        device_id=device if scale.on_gpu else None,
    )
    result = run(rank, scale, *args)
    dist.barrier()
    dist.destroy_process_group()
    return result

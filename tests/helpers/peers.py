"""Processes for tests, forked within 20 ms from a clean server with the needed imports."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

import memsaver

PATIENCE = 7.0  # seconds for an operation; one that waits for a lost message takes 8 or 10

# The server imports these once, in 6 s of CPU time; a child that needs engines and trainers would
# take 4 s for them. The imports do not initialize CUDA, so that children can use it.
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "tests.helpers.trainer_bridge.sync_pair",
        "transformers.models.auto.modeling_auto",
    ]
)


class Address(NamedTuple):
    """Tickets by which other processes use a saver."""

    pool: memsaver.PoolTicket
    tags: tuple[memsaver.Ticket, ...]


class Gone(Exception):
    """The process has died."""


class Failed(Exception):
    """The exception of the process, as text."""


class Peer:
    """A process that runs ``target(pipe, *args)``.

    A request always ends: the process answers, fails, or is gone.
    """

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = server.Pipe()
        self.process = server.Process(target=_run, args=(target, theirs, args), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def tell(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # gone: the next hear() says so
            self.pipe.send(message)

    def hear(self, seconds: float = 120.0) -> Any:
        try:
            assert self.pipe.poll(seconds), f"process {self.pid} gave no answer for {seconds:g} s"
            answer = self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            self.process.join(1)
            raise Gone(
                f"process {self.pid} has ended, exit code {self.process.exitcode}"
            ) from error
        if isinstance(answer, Failed):
            raise answer
        return answer

    def ask(self, message: Any, seconds: float = 120.0) -> Any:
        self.tell(message)
        return self.hear(seconds)

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()

    def dies_within(self, seconds: float) -> bool:
        self.process.join(seconds)
        return self.process.exitcode is not None

    def bury(self) -> None:
        """End the process and close its pipe; raise ``Failed`` if it had failed."""
        self.kill()
        assert self.dies_within(30)
        try:
            while True:
                self.hear(0)
        except (Gone, AssertionError):
            pass
        finally:
            self.pipe.close()
            self.process.close()


def _run(target: Callable[..., None], pipe: Connection, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # exclude imported objects from collections, so that their pages stay shared with the server
    gc.freeze()
    faulthandler.enable()  # print the stack if a signal ends the process
    try:
        target(pipe, *args)
    except BaseException:
        with contextlib.suppress(OSError):  # the test has ended before
            pipe.send(Failed(traceback.format_exc()))

"""Other processes for tests, forked from a clean one that has imported what they need: one begins
after 20 ms.
"""

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

PATIENCE = 7.0  # seconds for an operation: one that waits for what does not come takes 8 or 10

# The server imports these once, in 6 s of a core; a child that needs engines and trainers would
# take 4 s of its own. Importing leaves CUDA alone, so that its children may use it.
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
    """What other processes need to use a saver."""

    pool: memsaver.PoolTicket
    tags: tuple[memsaver.Ticket, ...]


class Gone(Exception):
    """The process has died."""


class Failed(Exception):
    """What the process raised, as text."""


class Peer:
    """A process that runs ``target(pipe, *args)``.

    What is asked of it has an end: it answers, fails, or is gone.
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
        """End it if it has not ended, and let go of what this process has of it; raises ``Failed``
        if it had failed.
        """
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
    # what the server imported: a collection need not go through it, and its pages stay shared
    gc.freeze()
    faulthandler.enable()  # where it was, should a signal end it
    try:
        target(pipe, *args)
    except BaseException:
        with contextlib.suppress(OSError):  # the test has ended before
            pipe.send(Failed(traceback.format_exc()))

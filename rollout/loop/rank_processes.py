"""The processes of an engine, one per rank, which another process starts and calls."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from memsaver import StateError
from rollout.loop.loop_actor import LoopActor
from rollout.loop.owner import fail, settle, when_cancelled
from rollout.process_group import RankAddress
from rollout.requests import Completion, SamplingParams

_HOST = "127.0.0.1"  # all ranks run on one machine
_SECONDS = 600.0
_EXIT_SECONDS = 2.0


class RankProcesses:
    """An engine in processes that end with this one. Any thread may call it.

    Requests of `submit` are computed together, and the other calls run between two steps, in their
    order.
    """

    def __init__(self, make: Callable[[int], LoopActor], size: int) -> None:
        """Start a process per rank, and call `build(places)` of its actor.

        Args:
            make: Makes the actor of a rank, in its process; pickled.
            size: Number of ranks.

        Raises:
            Exception: The error of a rank's start.
        """
        context = multiprocessing.get_context("spawn")
        self._ranks: list[_Rank] = []
        self._end: StateError | None = None
        self._lock = threading.Lock()  # of the line above
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (theirs, make, rank)
            process = context.Process(target=_run, args=args, daemon=True, name=f"engine-{rank}")
            process.start()
            theirs.close()
            self._ranks.append(_Rank(ours, process, self._ended))
        try:
            places: list[RankAddress | None] = [None]
            if size > 1:
                host, port = self._ranks[0].ask("meet", host=_HOST).result()
                fixed = {"host": host, "port": port, "size": size, "seconds": _SECONDS}
                places = [RankAddress(rank=rank, **fixed) for rank in range(size)]
            self.call("build", places)
        except BaseException:
            self.close()
            raise

    def submit(self, prompt: list[int], params: SamplingParams) -> Future[list[Completion]]:
        """Begin to answer a request; see `EngineLoop.submit`. A StateError says that a rank ended.

        To cancel the future ends the request, too.
        """
        future = self._ranks[0].ask("submit", prompt, params)
        when_cancelled(future, self.abort)
        return future

    def abort(self, *futures: Future[list[Completion]]) -> None:
        """End requests of `submit` with their present answers."""
        self._ranks[0].abort({*futures})

    def start(self, method: str, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Call a method of all ranks, and return the answers by rank.

        A StateError says that a rank has ended. The others are ended, too, because they would wait
        for it.
        """
        return [rank.ask(method, *args, **kwargs) for rank in self._ranks]

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all ranks, and wait for the answers; the first error is raised."""
        return [future.result() for future in self.start(method, *args, **kwargs)]

    def close(self) -> None:
        """End the processes, which releases their memory."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()

    def _ended(self) -> StateError:
        """End the processes after one has ended, and return the error of all calls."""
        with self._lock:
            if self._end is None:
                codes = [rank.process.exitcode for rank in self._ranks]
                self._end = StateError(
                    f"a process of the engine has ended (exit codes by rank: {codes}), and its "
                    f"weights with it; its log says why; start the run again"
                )
                self.close()
            return self._end


class _Rank:
    """One process, and the calls that it has not answered."""

    def __init__(self, channel: Connection, process: Any, ended: Callable[[], Exception]) -> None:
        self.process = process
        self._channel, self._ended = channel, ended
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()  # of the calls and their order in the channel
        threading.Thread(target=self._receive, daemon=True, name="answers").start()

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            message = pickle.dumps((number, method, args, kwargs))
            self._asked[number] = future
            sent = self._send(message)
        if not sent:
            self._fail()
        return future

    def abort(self, futures: set[Future[Any]]) -> None:
        with self._lock:
            numbers = [number for number, future in self._asked.items() if future in futures]
            self._send(pickle.dumps((None, "abort", numbers, {})))  # has no answer

    def _send(self, message: bytes) -> bool:
        """Send a message, and return whether the process was there."""
        try:
            self._channel.send_bytes(message)
        except OSError:
            return False
        return True

    def _receive(self) -> None:
        while True:
            try:
                number, good, answer = pickle.loads(self._channel.recv_bytes())
            except (EOFError, OSError):
                self._fail()
                return
            settle(self._asked.pop(number), partial(_unpacked, good, answer))

    def _fail(self) -> None:
        self.process.join(_EXIT_SECONDS)  # its end of the channel is closed
        error = self._ended()
        with self._lock:
            asked, self._asked = [*self._asked.values()], {}
        for future in asked:
            fail(future, error)


def _packed(future: Future[Any]) -> tuple[bool, bytes]:
    """Return whether a call succeeded, and its pickled result or error."""
    try:
        return True, pickle.dumps(future.result())
    except Exception as error:
        return False, pickle.dumps(error)


def _unpacked(good: bool, answer: bytes) -> Any:
    value = pickle.loads(answer)
    if not good:
        raise value
    return value


def _run(channel: Connection, make: Callable[[int], LoopActor], rank: int) -> None:
    """Make the actor of a rank, and answer calls until the other process ends."""
    actor, asked, sending = make(rank), dict[int, Future[Any]](), threading.Lock()

    def answer(number: int, future: Future[Any]) -> None:
        asked.pop(number, None)
        message = pickle.dumps((number, *_packed(future)))
        with sending, contextlib.suppress(OSError):  # raised if the other process has ended
            channel.send_bytes(message)

    while True:
        try:
            number, method, args, kwargs = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # without waiting for the threads of CUDA and of the other ranks
        loop: Any = actor.loop
        if method == "abort":
            loop.abort(*[asked[known] for known in args if known in asked])
        elif method == "submit":
            asked[number] = loop.submit(*args, **kwargs)
            asked[number].add_done_callback(partial(answer, number))
        else:
            actor.begin(method, *args, **kwargs).add_done_callback(partial(answer, number))

"""Worker processes that call reward functions; they are replaced when a call hangs or crashes."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait

from recipes.errors import ScorerError
from recipes.rewards.function import Row, too_long
from recipes.rewards.score import Outcome

SECONDS = 0.1
"""Seconds after which a worker hands back the rest of its answers."""
LOADING = 300.0
"""Seconds that a worker may take to load the functions, unless a call may take longer."""
STARTS = 3
"""Number of workers in a row that may end before they have loaded the functions."""
GRACE = 1.0
"""Seconds that a process may take to end after it has closed its socket, or after a kill."""
COMMAND = "import sys; sys.path[:] = {path}; from recipes.rewards.worker import main; main({ids})"


class PoolClosed(RuntimeError):
    """The pool was closed during the call."""


@dataclass(frozen=True)
class Part:
    """A reward function, and some of the answers of a step that it scores.

    Attributes:
        function: Number of the reward function.
        places: Indices of the answers in the step.
        rows: Keywords of the answers.
    """

    function: int
    places: Sequence[int]
    rows: Sequence[Row]

    def keyed(self, outcomes: Sequence[Outcome]) -> Outcomes:
        """Return the outcomes of the first rows by function and place."""
        return {(self.function, p): o for p, o in zip(self.places, outcomes, strict=False)}

    def pieces(self, size: int, start: int = 0) -> Iterator[Part]:
        """Divide the rows from `start` on into parts of at most `size` rows."""
        for begin in range(start, len(self.rows), size):
            yield self._between(begin, begin + size)

    def in_groups(self, number: int) -> Iterator[Part]:
        """Divide the rows into about `number` parts; rows of one prompt stay together."""
        size, begin = -(-len(self.rows) // number), 0
        while begin < len(self.rows):
            end = begin + size
            while end < len(self.rows) and self.rows[end]["prompt"] == self.rows[end - 1]["prompt"]:
                end += 1
            yield self._between(begin, end)
            begin = end

    def _between(self, begin: int, end: int) -> Part:
        return Part(self.function, self.places[begin:end], self.rows[begin:end])


Outcomes = dict[tuple[int, int], Outcome]
"""Outcomes by number of the function and index of the answer."""
Sources = Mapping[int, tuple[str, bytes]]
"""Reward functions by number, as `worker.main` takes them."""


class Worker:
    """A worker process, which leads a process group, and the call that it is busy with.

    Ctrl-C in a terminal does not reach the group. The kernel kills the process when the thread that
    started it ends.

    Args:
        functions: The functions to load.
        seconds: Seconds that loading may take.

    Attributes:
        connection: Readable when the functions are loaded, a call has ended, or the process has.
        loaded: Whether the functions are loaded.
        part: The call; None: it loads, or is idle.
        deadline: When the loading or the call has taken too long.
    """

    def __init__(self, functions: Sources, seconds: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            ids = f"{theirs.fileno()}, {os.getpid()}"
            command = [sys.executable, "-u", "-c", COMMAND.format(path=sys.path, ids=ids)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
            )
        self._socket = ours
        self.connection = Connection(os.dup(ours.fileno()))
        self.loaded = False
        self._hung_up = False
        self.part: Part | None = None
        self.deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # It has ended, which is noticed later.
            self.connection.send(functions)

    @property
    def idle(self) -> bool:
        """Return whether it waits for a call and has not ended."""
        return self.loaded and self.part is None and not self.connection.poll()

    def call(self, part: Part, timeout: float) -> None:
        self.part, self.deadline = part, time.monotonic() + timeout + SECONDS
        with contextlib.suppress(OSError):  # It has ended, which is noticed later.
            self.connection.send((part.function, part.rows, SECONDS))

    def receive(self) -> list[Outcome] | None:
        """Return the results of the call, nothing if it has loaded, None if it has ended.

        Raises:
            ScorerError: The process cannot load a function.
        """
        self.part, self.deadline = None, math.inf
        try:
            results = self.connection.recv()
        except (EOFError, OSError):
            self._hung_up = True
            return None
        if isinstance(results, str):
            raise ScorerError(results)
        self.loaded = True
        return results or []

    def kill(self) -> str:
        """End the process and all processes that it started; return how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE if self._hung_up else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # Processes that left the group may hold the other end.
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:  # In an uninterruptible system call.
            return "SIGKILL"
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


class Pool:
    """Worker processes that call reward functions.

    A call that takes longer than `timeout`, or ends its process, costs one answer its outcome: a
    call for several answers is repeated for each of them alone.

    One thread uses a pool, except for `close`. The processes end with that thread.
    """

    def __init__(self, functions: Sources, size: int, timeout: float) -> None:
        self.size = size
        self._functions = functions
        self._timeout = timeout
        self._loading = max(LOADING, timeout)
        self._workers: list[Worker] = []
        self._lost = 0  # workers in a row that ended before they had loaded the functions
        self._closing = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the processes that are missing; they load the functions."""
        with self._closing:
            if self._closed:
                raise PoolClosed
            while len(self._workers) < self.size:
                self._workers.append(Worker(self._functions, self._loading))

    def outcomes(self, calls: Sequence[Part]) -> Outcomes:
        """Call each part's function for its rows; return the outcomes.

        Raises:
            ScorerError: Workers cannot load the functions.
        """
        for worker in [worker for worker in self._workers if worker.part]:
            self._remove(worker)  # An earlier call of this method raised.
        waiting = deque(chain.from_iterable(part.in_groups(self.size) for part in calls))
        outcomes: Outcomes = {}
        while len(outcomes) < sum(len(part.rows) for part in calls):
            for part, results in self._settle(waiting):
                outcomes |= part.keyed(results)
                waiting += part.pieces(max(1, len(results)), start=len(results))
        return outcomes

    def _settle(self, waiting: deque[Part]) -> Iterator[tuple[Part, list[Outcome]]]:
        """Dispatch parts, wait for a worker, and yield the parts whose calls ended with results.

        The results belong to the first rows; there are none if each row must be called alone.
        """
        self.start()
        for worker in self._workers:
            if waiting and worker.idle:
                worker.call(waiting.popleft(), self._timeout)
        limit = min(worker.deadline for worker in self._workers) - time.monotonic()
        connections = [worker.connection for worker in self._workers]
        readable = wait(connections, None if limit == math.inf else max(0.0, limit))
        for worker in self._workers[:]:
            part, ready = worker.part, worker.connection in readable
            if not ready and worker.deadline > time.monotonic():
                continue
            results = worker.receive() if ready else None
            if results is None:
                how = self._remove(worker)
                if not (ready or part):
                    rule = f"task.rewards: take longer than {self._loading:g} s to load"
                    raise ScorerError(f"{rule}; correct them, or set task.timeout higher")
                fault = f"ended its process: {how}" if ready else too_long(self._timeout)
                results = [Outcome(fault=fault)] if part and len(part.rows) == 1 else []
            if part is not None:
                yield part, results

    def _remove(self, worker: Worker) -> str:
        """Kill a worker, which `start` replaces; return how it ended."""
        with self._closing:
            if self._closed:
                raise PoolClosed
            self._workers.remove(worker)
            how = worker.kill()
        self._lost = 0 if worker.loaded else self._lost + 1
        if self._lost == STARTS:
            self._lost = 0
            rule = f"worker processes end while they load the functions: {how}"
            raise ScorerError(f"task.rewards: {rule}; correct them")
        return how

    def close(self) -> None:
        """End the processes, even busy ones; a call in another thread raises `PoolClosed`."""
        with self._closing:
            self._closed = True
            for worker in self._workers:
                worker.kill()

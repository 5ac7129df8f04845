"""Worker processes that call reward functions; they are replaced when a call hangs or crashes."""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import wait

from recipes.errors import ScorerError, counted
from recipes.rewards.function import Kind, too_long
from recipes.rewards.score import Answer, Score
from recipes.supervised_process import SupervisedProcess

SECONDS = 0.1
"""Seconds after which a worker hands back the rest of its answers."""
PATIENCE = 1.0
"""Seconds of one call after which other workers take the rest of its worker's answers."""
TICK = 0.25
"""Longest wait for a message before the deadlines are looked at."""
LOADING = 300.0
"""Seconds that a worker may take to load the functions, unless a call may take longer."""
STARTS = 3
"""Number of workers in a row that may end before they have loaded the functions."""


class PoolClosed(RuntimeError):
    """The pool was closed during the call."""


@dataclass(frozen=True)
class Part:
    """A reward function, and some of the answers of a step that it scores.

    Attributes:
        function: Number of the reward function.
        places: Indices of the answers in the step.
        answers: The answers.
    """

    function: int
    places: Sequence[int]
    answers: Sequence[Answer]

    def keyed(self, scores: Sequence[Score]) -> "Scores":
        """Return the scores of the first answers by function and place."""
        return {(self.function, p): score for p, score in zip(self.places, scores, strict=False)}

    def __getitem__(self, chosen: slice) -> "Part":
        return Part(self.function, self.places[chosen], self.answers[chosen])

    def units(self, kind: Kind) -> "Iterator[Part]":
        """Divide the answers into the smallest parts that a function of this kind is called for."""
        return self.in_groups(len(self.answers)) if kind == "groups" else self.pieces(1)

    def pieces(self, size: int) -> "Iterator[Part]":
        """Divide the answers into parts of at most `size`."""
        for begin in range(0, len(self.answers), size):
            yield self[begin : begin + size]

    def in_groups(self, number: int) -> "Iterator[Part]":
        """Divide the answers into about `number` parts; those to one prompt stay together."""
        answers, size, begin = self.answers, -(-len(self.answers) // max(1, number)), 0
        while begin < len(answers):
            end = begin + size
            while end < len(answers) and answers[end].prompt == answers[end - 1].prompt:
                end += 1
            yield self[begin:end]
            begin = end


Scores = dict[tuple[int, int], Score]
"""Scores by number of the function and index of the answer."""
Sources = Mapping[int, tuple[str, bytes]]
"""Reward functions by number, as `worker.serve` takes them."""


class Worker(SupervisedProcess):
    """A worker process, and the call that it is busy with.

    Args:
        functions: The functions to load.
        seconds: Seconds that loading may take.

    Attributes:
        kinds: Kind of each function and seconds of a call; empty until they are loaded.
        part: The call; None: it loads, or is idle.
        scores: The scores of the first answers of the call.
        since: When the last answer of the call began.
        deadline: When the loading or the call has taken too long.
    """

    def __init__(self, functions: Sources, seconds: float) -> None:
        super().__init__("recipes.rewards.worker")
        self.kinds: dict[int, tuple[Kind, float]] = {}
        self.part: Part | None = None
        self.scores: list[Score] = []
        self.since = time.monotonic()
        self.deadline = self.since + seconds
        self.send(functions)

    @property
    def idle(self) -> bool:
        """Return whether it waits for a call and has not ended."""
        return bool(self.kinds) and self.part is None and not self.connection.poll()

    @property
    def seconds(self) -> float:
        """Return the seconds that the present call has taken for its last answer; 0 without one."""
        return time.monotonic() - self.since if self.part else 0.0

    @property
    def kind(self) -> Kind | None:
        """Return the kind of the function that is called, if one is."""
        return self.kinds[self.part.function][0] if self.part else None

    def call(self, part: Part, turns: int) -> None:
        """Begin a call, in which the answers take so many turns."""
        self.part, self.scores, self.since = part, [], time.monotonic()
        self.deadline = self.since + self.kinds[part.function][1] * turns + SECONDS
        self.send((part.function, part.answers, SECONDS))

    def take(self) -> bool | None:
        """Take one message; return whether the call or the loading has ended, None at its death.

        Raises:
            ScorerError: The process cannot load a function.
        """
        try:
            message = self.receive()
        except EOFError:
            return None
        if isinstance(message, str):
            raise ScorerError(message)
        if isinstance(message, Score):
            self.scores.append(message)
            now = time.monotonic()
            self.deadline += now - self.since
            self.since = now
            return False
        self.kinds, self.deadline = message or self.kinds, math.inf
        return True

    def reclaim(self) -> Part | None:
        """Return the answers behind the current one, which this call will not reach any more."""
        part, count = self.part, len(self.scores) + 1
        if part is None or self.kind != "each" or len(part.answers) <= count:
            return None
        self.part = part[:count]
        return part[count:]


class Pool:
    """Worker processes that call reward functions.

    A call that takes longer than its limit, or ends its process, costs the answer its score, or the
    answers of one prompt if the function is batched: a call for several of these is repeated for
    each. A call that takes far longer than all before is presumed to hang: further processes take
    its place until it ends, so calls that hang do not wait for each other. After as many time-outs
    in a row as there may be processes, the function is not called any more in the step.

    One thread uses a pool, except for `close`. The processes end with that thread.

    Attributes:
        state: What the workers are busy with, for a line; empty while they load functions.
    """

    def __init__(
        self, functions: Sources, size: int, timeout: float, concurrency: int | None = None
    ) -> None:
        self.size = size
        self.state = ""
        self._most = max(16, 4 * size)
        self._functions = functions
        self._timeout = timeout
        self._concurrency = concurrency
        self._loading = max(LOADING, timeout)
        self._workers: list[Worker] = []
        self._lost = 0  # workers in a row that ended before they had loaded the functions
        self._kinds: dict[int, tuple[Kind, float]] = {}
        self._longest: dict[int, float] = {}  # seconds of each function's longest call so far
        self._late = Counter[int]()  # time-outs in a row, by function
        self._waiting = deque[Part]()
        self._closing = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the processes that are missing; they load the functions."""
        more = min(2 * sum(map(self._hangs, self._workers)), len(self._waiting))
        with self._closing:
            if self._closed:
                raise PoolClosed
            while len(self._workers) < min(self.size + more, self._most):
                self._workers.append(Worker(self._functions, self._loading))

    def scores(self, calls: Sequence[Part]) -> Scores:
        """Call each part's function for its answers; return the scores.

        Raises:
            ScorerError: Workers cannot load the functions.
        """
        for worker in [worker for worker in self._workers if worker.part]:
            self._remove(worker)  # An earlier call of this method raised.
        self._late.clear()
        self._waiting.clear()
        while calls and not self._kinds:
            list(self._settled())
        self._waiting.extend(chain.from_iterable(map(self._shared, calls)))
        scores: Scores = {}
        while len(scores) < sum(len(part.answers) for part in calls):
            for part, results in self._settled():
                scores |= part.keyed(results)
        for worker in [worker for worker in self._workers if worker.idle][self.size :]:
            self._remove(worker)
        return scores

    def _shared(self, part: Part) -> Iterator[Part]:
        """Divide a part among the workers; one worker gets all calls that share a limit."""
        return part.in_groups(1 if self._limit(part) else self.size)

    def _limit(self, part: Part) -> int | None:
        return self._concurrency if self._kinds[part.function][0] == "together" else None

    def _settled(self) -> Iterator[tuple[Part, list[Score]]]:
        """Dispatch parts, wait for workers, and yield parts with the scores of their first answers.

        The other answers of a part wait again.
        """
        self.start()
        yield from self._given_up()
        for worker in self._workers:
            if self._waiting and worker.idle:
                self._dispatch(worker, self._waiting.popleft())
        limit = min(worker.deadline for worker in self._workers) - time.monotonic()
        connections = [worker.connection for worker in self._workers]
        readable = wait(connections, max(0.0, min(limit, TICK)))
        for worker in self._workers[:]:
            if worker.connection in readable:
                yield from self._received(worker)
            elif worker.deadline <= time.monotonic():
                yield from self._ended(worker, late=True)
            elif worker.seconds > PATIENCE and (rest := worker.reclaim()):
                self._waiting += rest.pieces(1)
        self._describe()

    def _dispatch(self, worker: Worker, part: Part) -> None:
        limit = self._limit(part)
        worker.call(part, turns=-(-len(part.answers) // limit) if limit else 1)

    def _received(self, worker: Worker) -> Iterator[tuple[Part, list[Score]]]:
        part, seconds = worker.part, worker.seconds
        ended = worker.take()
        if ended is None:
            yield from self._ended(worker, late=False)
        elif part is None:
            self._kinds = worker.kinds
        else:
            self._late[part.function] = 0
            self._longest[part.function] = max(seconds, self._longest.get(part.function, 0.0))
            if ended:
                yield from self._finished(worker, part)

    def _ended(self, worker: Worker, late: bool) -> Iterator[tuple[Part, list[Score]]]:
        """Replace a worker that is late or has ended; its call costs an answer its score."""
        how, part, kind = self._remove(worker), worker.part, worker.kind
        if part is None or kind is None:
            if late:
                rule = f"task.rewards: take longer than {self._loading:g} s to load"
                raise ScorerError(f"{rule}; correct them, or set task.timeout higher")
            return
        fault = Score(fault=too_long(self._timeout) if late else f"ended its process: {how}")
        units, done = [*part.units(kind)], list[Score]()
        if kind == "each":
            done = [*worker.scores, fault]
        elif len(units) == 1:
            done = [fault] * len(part.answers)
        self._late[part.function] += late and bool(done)  # Else the call is repeated in parts.
        yield part, done
        self._waiting += part[len(done) :].units(kind)

    def _finished(self, worker: Worker, part: Part) -> Iterator[tuple[Part, list[Score]]]:
        """Take the scores of a call that has ended; as many answers as it scored are the next."""
        worker.part, done = None, worker.scores
        yield part, done
        rest, kind = part[len(done) :], self._kinds[part.function][0]
        self._waiting += rest.pieces(max(1, len(done))) if kind == "each" else rest.units(kind)

    def _given_up(self) -> Iterator[tuple[Part, list[Score]]]:
        """Yield the waiting parts of functions that only time out, with the fault."""
        for part in [part for part in self._waiting if self._late[part.function] >= self._most]:
            self._waiting.remove(part)
            rule = f"was not called: {self._most} calls in a row {too_long(self._timeout)}"
            yield part, [Score(fault=rule)] * len(part.answers)

    def _hangs(self, worker: Worker) -> bool:
        """Return whether a call takes so long that another worker should take its place."""
        if worker.part is None or worker.kind != "each":
            return False
        longest = self._longest.get(worker.part.function, math.inf)
        return worker.seconds > min(max(PATIENCE, 10 * longest), self._timeout / 2)

    def _describe(self) -> None:
        busy: dict[int, list[float]] = {}
        for worker in self._workers:
            if worker.part:
                busy.setdefault(worker.part.function, []).append(worker.seconds)
        texts = [
            f"{counted(len(seconds), 'call')} of {self._functions[number][0]}, the longest for"
            f" {max(seconds):.0f} of {self._timeout:g} s"
            for number, seconds in busy.items()
        ]
        behind = sum(len(part.answers) for part in self._waiting)
        self.state = f"{', '.join(texts)}; {counted(behind, 'answer')} behind" if texts else ""

    def _remove(self, worker: Worker) -> str:
        """Kill a worker, which `start` replaces; return how it ended."""
        with self._closing:
            if self._closed:
                raise PoolClosed
            self._workers.remove(worker)
            how = worker.kill()
        self._lost = 0 if worker.kinds else self._lost + 1
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

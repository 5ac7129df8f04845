"""The processes of an engine, one per rank, which another process starts and calls."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from memsaver import StateError
from memsaver.types import check_choice
from rollout.engine.stepping import Asleep
from rollout.loop.engine_loop import OnOutput, PauseMode, name_of_all
from rollout.loop.loop_actor import LoopActor
from rollout.loop.owner import fail, settle, when_cancelled
from rollout.process_group import RankAddress
from rollout.requests import Completion, Output, SamplingParams

_HOST = "127.0.0.1"  # all ranks run on one machine
_SECONDS = 600.0
_EXIT_SECONDS = 2.0


class RankProcesses:
    """An engine in processes that end with this one. Any thread may call it.

    Requests of `submit` are computed together, and the other calls run between two steps, in their
    order. It takes the place of an `EngineLoop`.

    Attributes:
        on_turn: Called in a thread of this object after outputs have come. The first tokens and the
            ends of samples are told at once, all else when `have_read` has been called for what was
            told before.
        busy_seconds: Time of all steps, as far as the outputs have told.
    """

    def __init__(self, make: Callable[[int], LoopActor], size: int) -> None:
        """Start a process per rank, and call `build` of its actor with its place among them.

        Args:
            make: Makes the actor of a rank, in its process; pickled.
            size: Number of ranks.

        Raises:
            Exception: The error of a rank's start.
        """
        context = multiprocessing.get_context("spawn")
        self.on_turn: Callable[[], None] = lambda: None
        self.busy_seconds = 0.0
        self._ranks: list[_Rank] = []
        self._end: StateError | None = None
        self._lock = threading.Lock()  # of the line above
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (theirs, make, rank)
            process = context.Process(target=_run, args=args, daemon=True, name=f"engine-{rank}")
            process.start()
            theirs.close()
            self._ranks.append(_Rank(ours, process, self._ended, self._told))
        try:
            places: list[RankAddress | None] = [None]
            if size > 1:
                host, port = self._ranks[0].ask("meet", host=_HOST).result()
                fixed = {"host": host, "port": port, "size": size, "seconds": _SECONDS}
                places = [RankAddress(rank=rank, **fixed) for rank in range(size)]
            pairs = zip(self._ranks, places, strict=True)
            for future in [rank.ask("build", place) for rank, place in pairs]:
                future.result()
        except BaseException:
            self.close()
            raise

    @property
    def ended(self) -> bool:
        """Return whether a process has ended, and with it all."""
        return self._end is not None

    failed = ended

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_output: OnOutput | None = None,
        asleep: Asleep = "refuse",
    ) -> Future[list[Completion]]:
        """Begin to answer a request; see `EngineLoop.submit`. A StateError says that a rank ended.

        To cancel the future ends the request, too.
        """
        future = self._ranks[0].submit(prompt, params, on_output, asleep)
        when_cancelled(future, self.abort)
        return future

    def abort(self, *futures: Future[list[Completion]]) -> None:
        """End requests of `submit` with their present answers."""
        self._ranks[0].abort({*futures})

    def have_read(self) -> None:
        """Say that all outputs that were told have been read."""
        self._ranks[0].tell("have_read")

    def pause_generation(self, mode: PauseMode = "keep") -> Future[None]:
        """Run no steps until `resume_generation`; see `EngineLoop.pause_generation`."""
        check_choice("mode", mode, PauseMode)
        return self._ranks[0].ask("pause_generation", mode)

    def resume_generation(self) -> Future[None]:
        """Run steps again; see `EngineLoop.resume_generation`."""
        return self._ranks[0].ask("resume_generation")

    def begin_call(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the engine, or read a property, and return the first rank's answer.

        All ranks make the calls that change what a step computes.
        """
        if name_of_all(name):
            return self.start(name, *args, **kwargs)[0]
        return self._ranks[0].ask(name, *args, **kwargs)

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

    def _told(self, busy_seconds: float) -> None:
        """Note that outputs have come, with the time of the steps until then."""
        self.busy_seconds = busy_seconds
        self.on_turn()

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

    def __init__(
        self,
        channel: Connection,
        process: Any,
        ended: Callable[[], Exception],
        told: Callable[[float], None],
    ) -> None:
        self.process = process
        self._channel, self._ended, self._told = channel, ended, told
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._streams: dict[int, OnOutput] = {}  # of some of these
        self._dead = False
        self._outbox: SimpleQueue[bytes] = SimpleQueue()
        self._lock = threading.Lock()  # of all but the channel
        threading.Thread(target=self._send, daemon=True, name="calls").start()
        threading.Thread(target=self._receive, daemon=True, name="answers").start()

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._ask(method, args, kwargs, None)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_output: OnOutput | None,
        asleep: Asleep,
    ) -> Future[list[Completion]]:
        args = ([*prompt], params, on_output is not None, asleep)
        return self._ask("submit", args, {}, on_output)

    def abort(self, futures: set[Future[Any]]) -> None:
        with self._lock:
            numbers = [number for number, future in self._asked.items() if future in futures]
        self.tell("abort", *numbers)

    def tell(self, method: str, *args: Any) -> None:
        """Make a call that has no answer."""
        self._outbox.put(pickle.dumps((None, method, args, {})))

    def _ask(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_output: OnOutput | None,
    ) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._outbox.put(pickle.dumps((number, method, args, kwargs)))
            self._asked[number] = future
            if on_output is not None:
                self._streams[number] = on_output
            dead = self._dead
        if dead:
            self._fail()
        return future

    def _send(self) -> None:
        """Send all calls; whoever makes them does not wait while the process reads nothing."""
        try:
            while message := self._outbox.get():
                self._channel.send_bytes(message)
        except OSError:
            self._fail()

    def _receive(self) -> None:
        while True:
            try:
                number, good, answer = pickle.loads(self._channel.recv_bytes())
            except (EOFError, OSError):
                self._fail()
                return
            if number is None:
                self._deliver(*answer)
                continue
            self._streams.pop(number, None)
            with self._lock:
                future = self._asked.pop(number, None)
            if future is not None:  # it has not failed with the process
                settle(future, partial(_unpacked, good, answer))

    def _deliver(self, news: Sequence[tuple[int, Output]], busy_seconds: float) -> None:
        for number, output in news:
            if (on_output := self._streams.get(number)) is not None:
                on_output(output)
        self._told(busy_seconds)

    def _fail(self) -> None:
        self.process.join(_EXIT_SECONDS)  # its end of the channel is closed
        error = self._ended()
        with self._lock:
            asked, self._asked, self._dead = [*self._asked.values()], {}, True
        self._outbox.put(b"")  # ends the thread that sends
        for future in asked:
            fail(future, error)


class _Replies:
    """The calls in the process of a rank, whose answers it sends back, and outputs before them.

    Outputs and answers keep their order, whatever thread they come from.
    """

    def __init__(self, channel: Connection, actor: LoopActor) -> None:
        self._channel, self._actor = channel, actor
        self._lock = threading.Lock()  # of the channel and the news
        self._news: list[tuple[int, Output]] = []
        self.unread = False  # whether news were sent since `have_read`
        self._asked: dict[int, Future[Any]] = {}  # requests

    def begin(
        self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """Begin a call, and return its answer."""
        actor = self._actor
        if method == "submit":
            prompt, params, stream, asleep = args
            told = partial(self._add, number) if stream else None
            self._asked[number] = actor.first_loop.submit(prompt, params, told, asleep)
            return self._asked[number]
        if method in ("pause_generation", "resume_generation"):
            future: Future[Any] = getattr(actor.first_loop, method)(*args)
            return future
        future = actor.begin(method, *args, **kwargs)
        if method == "build":
            gc.freeze()  # a pass over all that was imported takes longer than a step
        return future

    def abort(self, numbers: Sequence[int]) -> None:
        """End requests; those that have ended are left alone."""
        known = [self._asked[number] for number in numbers if number in self._asked]
        self._actor.first_loop.abort(*known)

    def _add(self, number: int, output: Output) -> None:
        with self._lock:
            self._news.append((number, output))

    def flush(self) -> None:
        """Send the outputs of a step."""
        with self._lock:
            self._send_news()

    def answer(self, number: int, future: Future[Any]) -> None:
        self._asked.pop(number, None)
        message = pickle.dumps((number, *_packed(future)))
        with self._lock:
            self._send_news()
            self._send(message)

    def _send_news(self) -> None:
        news, self._news = self._news, []
        if news:
            self.unread = True
            loop: Any = self._actor.loop
            self._send(pickle.dumps((None, True, (news, loop.busy_seconds))))

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # raised if the other process has ended
            self._channel.send_bytes(message)


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other process's to handle
    actor = make(rank)
    replies = _Replies(channel, actor)
    actor.on_turn, actor.reading = replies.flush, lambda: replies.unread
    while True:
        try:
            number, method, args, kwargs = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # without waiting for the threads of CUDA and of the other ranks
        if method == "have_read":
            replies.unread = False
        elif method == "abort":
            replies.abort(args)
        else:
            future = replies.begin(number, method, args, kwargs)
            future.add_done_callback(partial(replies.answer, number))

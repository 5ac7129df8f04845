"""An engine that coroutines share: requests at any time, streams of what is new, pauses."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

from kvcache.config import check_counts
from memsaver import StateError
from rollout.engine.stepping import SteppedEngine
from rollout.loop.engine_loop import EngineLoop, PauseMode
from rollout.loop.owned_engine import OwnedEngine
from rollout.loop.rank_processes import RankProcesses
from rollout.loop.router import most_tokens
from rollout.requests import Completion, Output, SamplingParams

_PLAIN = SamplingParams()
_PATIENCE = 15  # as long as readers hold a step up, before they are told more
_RECENT = 128  # steps whose tokens tell the rate


class QueueFull(RuntimeError):
    """So many requests wait for their first tokens that another one is refused.

    Attributes:
        waiting: Number of requests that wait.
        tokens: Their tokens: prompts, and the most that their answers may have.
        seconds: Time that the engine needs for these at its present rate; None: it has none yet.
    """

    def __init__(self, waiting: int, tokens: int, seconds: float | None) -> None:
        self.waiting, self.tokens, self.seconds = waiting, tokens, seconds
        late = "" if seconds is None else f", about {seconds:.0f} s of work"
        text = (
            f"{waiting} requests with {tokens} tokens wait{late}; ask later, or raise max_waiting"
        )
        super().__init__(text)


class TokenStream:
    """The answer to one request: an asynchronous iterator of what is new.

    Each `Output` has the tokens of one sample that have come since the last one; a slow reader gets
    longer ones. The error of the request is raised after its last tokens. A task that is cancelled
    while it reads ends the request; so does the end of `async with stream`. A loop over the stream
    that is left in another way leaves it running.

    `AsyncEngine.submit` makes it, in a coroutine.

    Args:
        abort: Ends the request of a future.

    Attributes:
        events: The event loop of its readers.
        arrived: What came since the last read, from the engine's thread.
        future: The samples as a whole.
    """

    future: Future[list[Completion]]

    def __init__(self, abort: Callable[[Future[list[Completion]]], None]) -> None:
        self.events = asyncio.get_running_loop()
        self.arrived = deque[Output]()
        self._abort = abort
        self._news = asyncio.Event()
        self._pieces = deque[Output]()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._pieces:
            ended = self.future.done()  # before the last tokens are taken
            self._pieces.extend(_joined(self.arrived))
            if not self._pieces:
                if ended:
                    self.future.result()
                    raise StopAsyncIteration
                await self._wait(self.arrived)
        return self._pieces.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._abort(self.future)

    async def result(self) -> list[Completion]:
        """Wait for all samples, as a whole, whatever of them was read.

        Returns:
            The samples.

        Raises:
            Exception: As `EngineLoop.submit` says.
        """
        while not self.future.done():
            await self._wait()
        return self.future.result()

    async def abort(self) -> list[Completion]:
        """End the request; one that has ended is left alone.

        Returns:
            Its samples, with their present answers.
        """
        self._abort(self.future)
        return await self.result()

    def wake(self) -> None:
        """Let readers look for news, in the event loop."""
        self._news.set()

    async def _wait(self, arrived: Collection[Output] = ()) -> None:
        """Wait for news, unless something has arrived or the request has ended."""
        self._news.clear()
        if arrived or self.future.done():
            return
        try:
            await self._news.wait()
        except asyncio.CancelledError:
            self._abort(self.future)
            raise


class AsyncEngine:
    """An engine that a thread of its own steps, for any number of coroutines.

    Requests of all callers are computed together. The engine's memory, weights and adapters are
    changed through `engine`, between two steps.

    Args:
        engine: The engine, which nothing else may use until `close`; of several ranks, the first.
            Or its processes, which `close` ends: they need none of this process's time.
        max_waiting: Number of requests that may wait for their first tokens.

    Attributes:
        engine: The engine, for callers in other threads than its own: its methods run between two
            steps. It is a target of `Trainer.connect`. None: it has processes of its own.

    Raises:
        StateError: This is not the engine's first rank.
        ValueError: `max_waiting` is no positive integer.
    """

    def __init__(self, engine: SteppedEngine | RankProcesses, max_waiting: int = 1024) -> None:
        self.max_waiting = max_waiting
        check_counts(self, "max_waiting")
        self._waiting: dict[TokenStream, int] = {}  # tokens of each
        self._touched: defaultdict[asyncio.AbstractEventLoop, dict[TokenStream, None]]
        self._touched = defaultdict(dict)
        self._told = deque[tuple[float, int]](maxlen=_RECENT)  # (seconds of steps, tokens)
        self._tokens, self._busy = 0, 0.0  # since then, and the seconds of steps until then
        self._closed = False
        self._reading: set[asyncio.AbstractEventLoop] = set()  # which have news to read
        self._read_seconds = self._read_at = 0.0  # duration and end of the last readings
        self._loop: EngineLoop | RankProcesses
        self.engine: Any = None
        if isinstance(engine, RankProcesses):
            self._loop, engine.on_turn = engine, self._flush
        else:
            self._loop = EngineLoop(engine, self._flush, self._is_early)
            self.engine = OwnedEngine(self._loop)
        gc.freeze()  # a pass over all that was imported takes longer than a step

    @property
    def ended(self) -> bool:
        """Return whether it is closed, or its engine has failed for good."""
        return self._closed or self._loop.failed

    @property
    def full(self) -> bool:
        """Return whether `submit` would raise `QueueFull` now."""
        return len(self._waiting) >= self.max_waiting

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close(abort=error[0] is not None)

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams = _PLAIN,
        session: Hashable | None = None,
    ) -> TokenStream:
        """Begin to answer a request. It waits while the engine sleeps, or generation is paused.

        Args:
            token_ids: The prompt.
            params: Sampling parameters.
            session: As of `AsyncReplicas`; one engine has all sessions.

        Returns:
            The answer. A ValueError of its readers says that the prompt is invalid.

        Raises:
            QueueFull: `max_waiting` requests wait.
            StateError: The engine is closed.
            ValueError: The prompt is no sequence.
        """
        return self._begin(token_ids, params, self._arrived)

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams = _PLAIN
    ) -> list[Completion]:
        """Answer a request as a whole, which takes less of the host's time than a stream.

        The request ends if the task that waits is cancelled.

        Args:
            token_ids: The prompt.
            params: Sampling parameters.

        Returns:
            The samples.

        Raises:
            QueueFull: `max_waiting` requests wait; this one does so until its end.
            StateError: The engine is closed.
            ValueError: The prompt is invalid or can never fit.
        """
        return await self._begin(token_ids, params, None).result()

    def _begin(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        arrived: Callable[[TokenStream, Output], None] | None,
    ) -> TokenStream:
        tokens = most_tokens(token_ids, params)
        if self._closed:
            raise StateError("this AsyncEngine is closed, and takes no requests")
        if self.full:
            waiting = [*self._waiting.values()]
            raise QueueFull(len(waiting), sum(waiting), self._seconds(sum(waiting)))
        stream = TokenStream(self._loop.abort)
        self._waiting[stream] = tokens
        told = partial(arrived, stream) if arrived is not None else None
        stream.future = self._loop.submit(token_ids, params, told, asleep="queue")
        stream.future.add_done_callback(lambda _: self._ended(stream))
        return stream

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        """Run no steps until `resume_generation`; later requests wait. See `EngineLoop`.

        Args:
            mode: What this means for unfinished requests.
        """
        await asyncio.wrap_future(self._loop.pause_generation(mode))

    async def resume_generation(self) -> None:
        """Run steps again."""
        await asyncio.wrap_future(self._loop.resume_generation())

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine between two steps, and wait for it, such as "sleep".

        Args:
            method: Its name.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Returns:
            What it returns.
        """
        return await asyncio.wrap_future(self._loop.begin_call(method, *args, **kwargs))

    async def close(self, *, abort: bool = False) -> None:
        """Take no more requests, wait for the open ones, and end the thread.

        Then anything may use the engine again.

        Args:
            abort: End the open requests with their present answers instead.

        Raises:
            StateError: The engine cannot answer the open requests, which have ended with an error.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self._loop.ended:
                await self._finish(abort)
        finally:
            await asyncio.to_thread(self._loop.close)
            gc.unfreeze()

    async def _finish(self, abort: bool) -> None:
        if not abort:
            await self.resume_generation()
        await self.pause_generation("abort" if abort else "wait")

    def _seconds(self, tokens: int) -> float | None:
        """Return the time for tokens at the rate of the last steps."""
        if not (told := [*self._told]):
            return None
        return tokens * sum(seconds for seconds, _ in told) / sum(count for _, count in told)

    # ---------------------------------------------------------------- in the engine's thread

    def _arrived(self, stream: TokenStream, output: Output) -> None:
        self._waiting.pop(stream, None)
        stream.arrived.append(output)
        self._touched[stream.events][stream] = None
        self._tokens += len(output.token_ids)

    def _ended(self, stream: TokenStream) -> None:
        self._waiting.pop(stream, None)
        with contextlib.suppress(RuntimeError):  # raised if nobody can read any more
            stream.events.call_soon_threadsafe(stream.wake)

    def _is_early(self) -> bool:
        """Return whether readers would slow the engine down if the next step told them more.

        They share Python's lock with the engine's thread. What they do while that waits for the
        device costs nothing. For the rest they get a small share of the time.
        """
        if any(not events.is_closed() for events in [*self._reading]):
            return True
        assert isinstance(self._loop, EngineLoop)
        costly = self._read_seconds - self._loop.engine.idle_seconds
        return time.monotonic() < self._read_at + _PATIENCE * costly

    def _flush(self) -> None:
        """Wake each event loop once, for all news of a turn."""
        busy = self._loop.busy_seconds
        if self._tokens:
            self._told.append((busy - self._busy, self._tokens))
            self._tokens, self._busy = 0, busy
        while self._touched:
            events, streams = self._touched.popitem()
            self._reading.add(events)
            try:
                events.call_soon_threadsafe(self._wake, events, streams)
            except RuntimeError:  # the event loop is closed: nobody reads
                self._reading.discard(events)
                self._loop.abort(*(stream.future for stream in streams))
        self._confirm()

    # ---------------------------------------------------------------- in an event loop

    def _wake(self, events: asyncio.AbstractEventLoop, streams: dict[TokenStream, None]) -> None:
        began = time.monotonic()  # the event loop may have been busy with other things until now
        for stream in streams:
            stream.wake()
        events.call_soon(self._have_read, events, began)  # after the tasks that read

    def _have_read(self, events: asyncio.AbstractEventLoop, began: float) -> None:
        self._reading.discard(events)
        now = time.monotonic()
        took = now - began
        self._read_seconds, self._read_at = max(took, 0.9 * self._read_seconds), now
        self._confirm()

    def _confirm(self) -> None:
        """Ask other processes for more once all news are read."""
        if not self._reading and isinstance(self._loop, RankProcesses):
            self._loop.have_read()


def _joined(arrived: deque[Output]) -> list[Output]:
    """Take all outputs, and join those of each sample."""
    parts: dict[int, list[Output]] = {}
    while arrived:
        output = arrived.popleft()
        parts.setdefault(output.sample, []).append(output)
    return [Output.joined(outputs) for outputs in parts.values()]

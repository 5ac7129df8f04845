"""Concurrent requests to one engine, whose steps are run while there are any."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from rollout import Completion, SamplingParams
from trainer_bridge.adoption.verl.engine_rank import Arrival, Ended

STEPS = 4  # of the engine between two looks at new requests


class Ranks(Protocol):
    """The ranks of an engine; see `EngineRanks`."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all ranks, and return the results by rank."""

    def advance(
        self, arrivals: Sequence[Arrival], *, cancelled: Collection[str], steps: int
    ) -> Ended:
        """Submit and cancel requests, and run steps."""


class RequestLoop:
    """Answers requests of an event loop; a thread calls the engine.

    All methods are called in the event loop. Calls of the engine run one after the other, in their
    order, between two runs of steps.

    Args:
        ranks: The ranks of the engine.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # The only thread that calls the engine, which takes one call at a time. All attributes
        # below belong to the event loop, so they need no lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._arrivals: list[Arrival] = []
        self._cancelled: list[str] = []
        self._open: dict[str, asyncio.Future[Completion]] = {}
        # The engine has a request until it notices the cancellation; its client may ask again under
        # the same name before that. So the engine's keys are numbers.
        self._numbers = itertools.count()
        self._keys: dict[str, str] = {}  # by name, of requests that nobody has cancelled
        self._task: asyncio.Task[None] | None = None

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of the engine between two of its steps; return the results by rank."""
        return await self._in_thread(partial(self._ranks.call, method, *args, **kwargs))

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def answer(self, name: str, prompt: list[int], params: SamplingParams) -> Completion:
        """Return the first sample of a request, once it has ended.

        Args:
            name: Name of the request, unique among those that are unfinished and not cancelled.
            prompt: Token ids.
            params: Sampling parameters.

        Raises:
            ValueError: The name is taken, or the request can never be answered.
            StateError: Names why the engine is unavailable.
        """
        if name in self._keys:
            raise ValueError(f"request {name} is unfinished; give each request a name of its own")
        key = self._keys[name] = str(next(self._numbers))
        future = self._open[key] = asyncio.get_running_loop().create_future()
        self._arrivals.append(Arrival(key=key, prompt=prompt, params=params))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            return await future
        except asyncio.CancelledError:
            self._cancelled.append(key)
            raise
        finally:
            if self._keys.get(name) == key:
                del self._keys[name]

    def cancel(self, *names: str) -> list[str]:
        """End unfinished requests (none given: all) with their present answers; return the names.

        Their names are free from now on.
        """
        chosen = [name for name in names or [*self._keys] if name in self._keys]
        self._cancelled += [self._keys.pop(name) for name in chosen]
        return chosen

    async def drained(self) -> None:
        """Wait until no request is unfinished."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._open:
            arrivals, self._arrivals = self._arrivals, []
            cancelled, self._cancelled = self._cancelled, []
            try:
                burst = partial(self._ranks.advance, arrivals, cancelled=cancelled, steps=STEPS)
                ended = await self._in_thread(burst)
            except Exception as error:
                # Requests that arrived during the call are open, so they fail, too.
                self._arrivals.clear()
                ended = dict.fromkeys(self._open, error)
            for key, result in ended.items():
                self._settle(key, result)

    def _settle(self, key: str, result: Completion | Exception) -> None:
        future = self._open.pop(key)
        if future.done():  # its caller was cancelled
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

"""Concurrent requests of an event loop to one engine, by the names that verl gives them."""

import asyncio
from concurrent.futures import Future
from typing import Any

from rollout import Completion, SamplingParams
from rollout.loop import RankProcesses


class NamedRequests:
    """Requests to an engine. All methods are called in the event loop.

    Args:
        ranks: The ranks of the engine.
    """

    def __init__(self, ranks: RankProcesses) -> None:
        self._ranks = ranks
        self._named: dict[str, Future[list[Completion]]] = {}  # that nobody has cancelled
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of the engine between two of its steps; return the results by rank."""
        answers = map(asyncio.wrap_future, self._ranks.start(method, *args, **kwargs))
        return await asyncio.gather(*answers)

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
        if name in self._named:
            raise ValueError(f"request {name} is unfinished; give each request a name of its own")
        future = self._named[name] = self._ranks.submit(prompt, params)
        self._open += 1
        self._idle.clear()
        try:
            return (await asyncio.wrap_future(future))[0]
        finally:
            if self._named.get(name) is future:
                del self._named[name]
            self._open -= 1
            if not self._open:
                self._idle.set()

    def cancel(self, *names: str) -> list[str]:
        """End unfinished requests (none given: all) with their present answers; return the names.

        Their names are free from now on.
        """
        chosen = [name for name in names or [*self._named] if name in self._named]
        self._ranks.abort(*[self._named.pop(name) for name in chosen])
        return chosen

    async def drained(self) -> None:
        """Wait until no request is unfinished."""
        await self._idle.wait()

"""Several engines with the same model, each of which answers a part of the requests."""

import asyncio
from collections.abc import Hashable, Sequence
from typing import Any, Self

from memsaver import StateError
from rollout.loop.async_engine import AsyncEngine, TokenStream
from rollout.loop.engine_loop import PauseMode
from rollout.loop.router import Router, most_tokens
from rollout.requests import SamplingParams


class AsyncReplicas:
    """Engines with the same model, to which requests are sent as to one.

    A request goes to the engine with the fewest unfinished tokens, and later ones of its session go
    there, too: it has their keys and values. If an engine fails, its requests end with its error,
    and later ones go to the others.

    Args:
        replicas: The engines, each on a device of its own.
    """

    def __init__(self, replicas: Sequence[AsyncEngine]) -> None:
        self.replicas = [*replicas]
        self._router = Router()

    @property
    def ended(self) -> bool:
        """Return whether no engine answers requests."""
        return all(replica.ended for replica in self.replicas)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close(abort=error[0] is not None)

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        session: Hashable | None = None,
    ) -> TokenStream:
        """Begin to answer a request, as `AsyncEngine.submit` does.

        Args:
            token_ids: The prompt.
            params: Sampling parameters.
            session: What the request has in common with others, such as its conversation.

        Returns:
            The answer.

        Raises:
            QueueFull: So many requests wait that no engine takes another one.
            StateError: All engines have ended.
            ValueError: The prompt is no sequence.
        """
        present = [replica for replica in self.replicas if not replica.ended]
        if not present:
            raise StateError("all engines have ended; build new ones")
        ready = [replica for replica in present if not replica.full] or present
        tokens = most_tokens(token_ids, params)
        chosen = self._router.pick(ready, tokens, session)
        try:
            stream = chosen.submit(token_ids, params)
        except BaseException:
            self._router.done(chosen, tokens)
            raise
        stream.future.add_done_callback(lambda _: self._router.done(chosen, tokens))
        return stream

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        """Pause all engines, see `AsyncEngine.pause_generation`.

        Args:
            mode: What this means for unfinished requests.
        """
        await asyncio.gather(*(replica.pause_generation(mode) for replica in self.replicas))

    async def resume_generation(self) -> None:
        """Let all engines go on."""
        await asyncio.gather(*(replica.resume_generation() for replica in self.replicas))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every engine, see `AsyncEngine.call`.

        Args:
            method: Its name.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Returns:
            What they return, by engine.
        """
        calls = (replica.call(method, *args, **kwargs) for replica in self.replicas)
        return await asyncio.gather(*calls)

    async def close(self, *, abort: bool = False) -> None:
        """Close all engines, see `AsyncEngine.close`.

        Args:
            abort: End the open requests instead of answering them.
        """
        await asyncio.gather(*(replica.close(abort=abort) for replica in self.replicas))

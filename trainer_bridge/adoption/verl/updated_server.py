"""What verl's servers of an engine share: weight updates, and their failures."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import Thread

from memsaver import StateError
from rollout import channel
from rollout.actor_base import ActorBase
from trainer_bridge.adoption.verl.names import socket_name

Outcome = tuple[int | None, str | None]
"""The version that a process serves, or None and the reason."""


class UpdatedServer(ABC):
    """Server that refuses requests after a failed weight update."""

    _undefined: str | None = None

    @abstractmethod
    async def serve_update(self, secret: str) -> Sequence[Outcome]:
        """Let all processes that have weights serve one update, and return their outcomes.

        Afterwards, no request may use keys and values of earlier weights. `secret` is part of the
        names of the trainer's sockets.
        """

    @abstractmethod
    async def set_global_steps(self, global_steps: int) -> None:
        """Set the number of the weights, which answers report."""

    async def connect_trainer(self, pair: str, secret: str) -> None:
        """Begin to connect to a trainer rank's socket and to answer its calls of `update_in_place`.

        The rank accepts the connection after this call. A call over the socket takes less time than
        a call of a Ray actor.
        """
        side = _InLoop(self, asyncio.get_running_loop(), secret)
        name = socket_name(pair, secret)
        # The thread waits for the trainer's calls, and during an update for the event loop, which
        # therefore never waits for the thread. The trainer ends it by closing the socket.
        Thread(target=channel.serve, args=(name, side), daemon=True, name="weight-updates").start()

    async def update_in_place(self, version: int, secret: str) -> None:
        """Let the engine serve one update by a trainer with this secret.

        After any error, requests are refused until an update succeeds.

        Raises:
            StateError: A process of the engine serves another version than `version` afterwards.
        """
        try:
            outcomes = await self.serve_update(secret)
            if wrong := [outcome for outcome in outcomes if outcome[0] != version]:
                raise StateError(
                    f"the engine serves (version, reason) {wrong}, not version {version}"
                )
        except BaseException as error:
            self._undefined = f"the last weight update failed: {type(error).__name__}: {error}"
            raise
        self._undefined = None
        await self.set_global_steps(version)

    def require_defined(self) -> None:
        """Raise a StateError if the last weight update failed."""
        if self._undefined is not None:
            raise StateError(f"the engine cannot generate: {self._undefined}")


class _InLoop(ActorBase):
    """The calls of a trainer rank, which run in the server's event loop."""

    def __init__(self, server: UpdatedServer, loop: asyncio.AbstractEventLoop, secret: str) -> None:
        self._server, self._loop, self._secret = server, loop, secret

    def update_in_place(self, version: int) -> None:
        update = self._server.update_in_place(version, self._secret)
        asyncio.run_coroutine_threadsafe(update, self._loop).result()

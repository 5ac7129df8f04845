"""The process of one rank of an engine that a loop owns, called by method name."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from rollout.actor_base import ActorBase
from rollout.engine.stepping import SteppedEngine
from rollout.loop.engine_loop import EngineLoop, FollowingLoop, name_of_all
from rollout.loop.owner import settle
from rollout.requests import Completion

_WITHOUT_ENGINE = {"build", "follow", "generate", "meet", "pid"}


class LoopActor(ActorBase):
    """Process whose `held` engine answers several callers at once, from `own` on.

    Requests of all callers are computed together. Other calls run between two steps, in their
    order; the methods of `engine_loop.SHARED` must be called on every rank of the engine. An engine
    that is not stepped (SGLang) takes one call at a time.

    Attributes:
        loop: Owns the engine; None: no engine, or one that is not stepped.
        on_turn: As of `EngineLoop`.
        reading: As of `EngineLoop`.
    """

    loop: EngineLoop | FollowingLoop | None = None

    def __init__(self) -> None:
        self._turn = threading.Lock()  # of an engine without a loop
        self.on_turn: Callable[[], None] = lambda: None
        self.reading: Callable[[], bool] = lambda: False

    @property
    def first_loop(self) -> EngineLoop:
        """Return the loop of the first rank, which decides for all."""
        assert isinstance(self.loop, EngineLoop)
        return self.loop

    def own(self) -> None:
        """Let a loop own the held engine from now on."""
        if isinstance(self.held, SteppedEngine):
            if self.held.decisions.following:
                self.loop = FollowingLoop(self.held)
            else:
                self.loop = EngineLoop(self.held, self.on_turn, self.reading)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, or read a property, and wait for the answer; see `begin`."""
        return self.begin(method, *args, **kwargs).result()

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method, or read a property, of the actor or else of the engine.

        Return its answer or error. Without a loop, and in the loop's own thread, that is there on
        return.
        """
        call = partial(super().call, method, *args, **kwargs)
        future: Future[Any] = Future()
        if method in _WITHOUT_ENGINE or (self.loop is not None and self.loop.inside):
            settle(future, call)
        elif self.loop is None:
            with self._turn:
                settle(future, call)
        else:
            future = self.loop.call(call, shared=name_of_all(method))
        return future

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Completion]]:
        """Answer prompts, on the first rank; see `Engine.generate`. The other ranks `follow`."""
        if isinstance(self.loop, EngineLoop):
            try:
                return self.loop.generate(*args, **kwargs)
            finally:
                self.loop.call(lambda: None, "follow")
        with self._turn:
            answers: list[list[Completion]] = self.held.generate(*args, **kwargs)
        return answers

    def follow(self) -> None:
        """Wait until a call of `generate` of the first rank has ended."""
        assert isinstance(self.loop, FollowingLoop), "the first rank decides"
        self.loop.call(lambda: None, "follow").result()

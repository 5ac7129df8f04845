"""An engine that a loop owns, as other threads use it."""

from functools import partial
from typing import Any

from rollout.loop.engine_loop import EngineLoop
from rollout.requests import Completion


class OwnedEngine:
    """The engine of a loop: its methods run, and its properties are read, between two steps.

    Any thread may use it, and waits for the answer.

    Args:
        loop: The loop that owns the engine.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Completion]]:
        """Answer prompts together with all other requests; see `EngineLoop.generate`."""
        return self._loop.generate(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        engine = self._loop.engine
        if callable(getattr(type(engine), name, None)):
            return lambda *args, **kwargs: self._loop.begin_call(name, *args, **kwargs).result()
        return self._loop.call(partial(getattr, engine, name)).result()

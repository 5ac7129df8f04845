"""An engine that a loop owns, as other threads use it."""

from concurrent.futures import Future
from functools import partial
from typing import Any

from rollout.loop.engine_loop import EngineLoop
from rollout.requests import Completion

SHARED = {
    "abort_update", "alias_update", "begin_update", "commit_update", "forget_prefixes", "load",
    "load_adapter", "serve_update", "shrink", "sleep", "sync_weights", "unload_adapter", "wake_up",
}  # fmt: skip
"""Methods that change what a step computes: all ranks call them between the same two steps."""


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
        engine = self._loop.engine
        if callable(getattr(type(engine), name, None)):
            return lambda *args, **kwargs: self.begin_call(name, *args, **kwargs).result()
        return self._loop.call(partial(getattr, engine, name)).result()

    def begin_call(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method without waiting for it.

        Args:
            name: Name of the method.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Returns:
            What it returns, or its error.
        """
        call = partial(getattr(self._loop.engine, name), *args, **kwargs)
        return self._loop.call(call, shared=name if name in SHARED else "")

"""An engine in another process, driven over a pipe.

It starts quickly, because the process imports no trainer.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from tests.helpers.peers import Peer


def serve(pipe: Connection, path: str, device: str, engine: dict[str, Any]) -> None:
    """Build a sleeping engine without weights, and run calls (method, args, kwargs) of the pipe."""
    from rollout import Engine

    served = Engine.from_pretrained(path, device, load_weights=False, **engine)
    served.sleep(level=2)
    while True:
        method, args, kwargs = pipe.recv()
        try:
            pipe.send(getattr(served, method)(*args, **kwargs))
        except Exception as error:
            pipe.send(error)


class PipedEngine:
    """A handle with the methods of an `Engine` that runs in its own process."""

    def __init__(self, path: str, device: str, **engine: Any) -> None:
        self.peer = Peer(serve, path, device, engine)

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = self.peer.ask((method, args, kwargs))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

"""An engine in another process, driven over a pipe; it starts quickly, because no trainer is
imported there.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from tests.helpers.peers import Peer


def serve(pipe: Connection, path: str, device: str, engine: dict[str, Any]) -> None:
    """Make an engine without weights, asleep, and do what is asked: (method, arguments, named
    arguments).
    """
    from rollout import Engine

    made = Engine.from_pretrained(path, device, load_weights=False, **engine)
    made.sleep(level=2)
    while True:
        method, args, kwargs = pipe.recv()
        try:
            pipe.send(getattr(made, method)(*args, **kwargs))
        except Exception as error:
            pipe.send(error)


class PipedEngine:
    """Methods of `Engine`, which runs in a process that can be killed."""

    def __init__(self, path: str, device: str, **engine: Any) -> None:
        self.peer = Peer(serve, path, device, engine)

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = self.peer.ask((method, args, kwargs))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

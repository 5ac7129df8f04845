"""The base of both sides' Ray actors: a process around one object, which others call by name.

ray is imported when first needed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from rollout.rendezvous import Seat, join, open_store


class ActorBase:
    """Starts empty: the process starts while others work, then a subclass's `build` makes `held`.

    A method that a subclass has goes before the held object's of the same name.
    """

    held: Any
    _store: dist.TCPStore | None = None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call that method of the actor, or else of what it holds. The answer is its own.

        A property is read. ValueError for a private name.
        """
        if method.startswith("_"):
            raise ValueError(f"{method} is private; actors are called by public names")
        found = getattr(self if hasattr(type(self), method) else self.held, method)
        return found(*args, **kwargs) if callable(found) else found

    def meet(self) -> tuple[str, int]:
        """Host and port at which the other ranks join this one, which is rank 0."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = open_store(host)
        return host, self._store.port

    def pid(self) -> int:
        return os.getpid()

    def _join(self, seat: Seat | None, device: str) -> dist.ProcessGroup | None:
        """The process group of all ranks, which call this at the same time. None for one alone."""
        return None if seat is None else join(seat, torch.device(device), self._store)

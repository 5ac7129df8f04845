"""The base class of the Ray actors of rollout and trainer; Ray is imported on first use."""

import os
from typing import Any

import torch
import torch.distributed as dist

from rollout.process_group import Ports, RankAddress, join, open_store


class ActorBase:
    """Process around one object, `held`, whose methods other processes call by name.

    The actor starts empty, so that processes can start early; a subclass's `build` creates `held`.
    A method of the subclass takes precedence over a method of `held` with the same name.
    """

    held: Any
    _store: dist.TCPStore | None = None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, or read a property, of the actor or else of the held object.

        A private name raises a ValueError.
        """
        if method.startswith("_"):
            raise ValueError(f"{method} is private; actors are called by public names")
        member = getattr(self if hasattr(type(self), method) else self.held, method)
        return member(*args, **kwargs) if callable(member) else member

    def meet(self, ports: Ports | None = None, host: str | None = None) -> tuple[str, int]:
        """Open the group's store on rank 0; return the host and port where other ranks join.

        `host` is an address of this machine; None: the address of its Ray node.
        """
        if host is None:
            import ray

            host = ray.util.get_node_ip_address()
        self._store = open_store(host, ports)
        return host, self._store.port

    def pid(self) -> int:
        return os.getpid()

    def _join(self, address: RankAddress | None, device: str) -> dist.ProcessGroup | None:
        """Return the process group once all ranks have called this; None without an address."""
        return None if address is None else join(address, torch.device(device), self._store)

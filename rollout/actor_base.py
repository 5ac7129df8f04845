"""The base of both sides' Ray actors: a process around one object, which others call by name.
Brings a group's processes together: rank 0 keeps a store, the others are told where it is.

ray is imported when first needed.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


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

    def _join(self, address: RankAddress | None, device: str) -> dist.ProcessGroup | None:
        """The process group of all ranks, which call this at the same time. None for one alone."""
        return None if address is None else join(address, torch.device(device), self._store)


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """One rank's place in a process group.

    host, port: of the store that rank 0 keeps. seconds: the group's time-out, also for the ranks to
    come together.
    """

    host: str
    port: int
    rank: int
    size: int
    seconds: float


def open_store(host: str) -> dist.TCPStore:
    """The store of a group, on a free port of `host`, an address of this machine that the ranks
    reach, and of no other.

    Left to itself, torch's store listens at all addresses of the machine.
    """
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join(
    address: RankAddress, device: torch.device, store: dist.Store | None = None
) -> dist.ProcessGroup:
    """This process's default group, once all ranks have come: gloo for the CPU, NCCL for a GPU,
    which becomes the current one. store: what `open_store` returned to rank 0.
    """
    timeout = timedelta(seconds=address.seconds)
    if store is None:
        store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=address.rank,
        world_size=address.size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return group

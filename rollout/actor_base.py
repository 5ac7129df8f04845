"""The base class of the Ray actors of rollout and trainer, and the start of their process groups.

Ray is imported on first use.
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

    def meet(self) -> tuple[str, int]:
        """Open the group's store on rank 0; return the host and port where other ranks join."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = open_store(host)
        return host, self._store.port

    def pid(self) -> int:
        return os.getpid()

    def _join(self, address: RankAddress | None, device: str) -> dist.ProcessGroup | None:
        """Return the process group once all ranks have called this; None without an address."""
        return None if address is None else join(address, torch.device(device), self._store)


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """One rank's place in a process group, whose store rank 0 keeps at `host` and `port`."""

    host: str
    port: int
    rank: int
    size: int
    seconds: float  # the group's timeout, also for the wait until all ranks have joined


def open_store(host: str) -> dist.TCPStore:
    """Open a group's store on a free port of `host`, an address of this machine.

    All ranks must be able to reach the address. By default, torch's store would listen on all
    addresses of the machine.
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
    """Initialize this process's default group (gloo for the CPU, NCCL for a GPU) and return it.

    The call returns when all ranks have joined. A GPU becomes the current device. `store` is the
    result of `open_store` on rank 0, and None on the other ranks.
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

"""The peer's connections to owners of memory, and the backends that map their memory here.

Memory of any GPU is mapped by the backend of the current GPU. Mapping therefore creates no context
and no stream on the owner's GPU, which need not even be visible to this process.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch

from memsaver.errors import LeaseError, MemSaverError
from memsaver.memory import make_backend
from memsaver.memory.backend import Backend
from memsaver.memory.page_pool import imports
from memsaver.sharing import rpc
from memsaver.system.devices import device_key
from memsaver.system.sockets import credentials
from memsaver.system.threads import forkable

_CONNECT_SECONDS = 5.0


class Owner:
    """The only connection of this process to a saver in this or another process."""

    def __init__(self, socket_name: str) -> None:
        self._socket_name = socket_name
        # Held from the request for a lease until its extents are imported, because the next answer
        # assumes that they are.
        self.granting = forkable(threading.Lock())
        # CachedLease by number. The user's thread adds leases, and the endpoint's threads recall
        # them; the values are weak, so that a dropped lease can still be collected.
        self.recalls: WeakValueDictionary[int, Any] = WeakValueDictionary()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, rpc.send_timeout(_CONNECT_SECONDS)
        )
        try:
            # Waits while other users' connections fill the queue of a stopped owner.
            connection.connect("\0" + socket_name)
            _, uid = credentials(connection)
            # Another user's saver would not answer. Another user's process may also have taken a
            # dead saver's name to collect tokens.
            if uid != os.getuid():
                raise rpc.CallRefused(
                    f"its saver is user {uid}'s, this process is user {os.getuid()}'s"
                )
        except BaseException:
            connection.close()
            raise
        self.endpoint = rpc.Endpoint(
            connection, self._serve, self._gone, "memsaver-peer", self._late
        )
        self.endpoint.start()

    def _gone(self) -> None:
        imports.drop_owner(self)
        with _lock:
            if owners.get(self._socket_name) is self:
                del owners[self._socket_name]
        with contextlib.suppress(MemSaverError):  # the next use retries
            self._recall(list(self.recalls))

    def _late(self, answer: dict[str, Any]) -> None:
        """End a lease whose caller gave up; the next lease requests its extents again."""
        if "lease" in answer:
            self.endpoint.tell("unlease", lease=answer["lease"], forgotten=[])

    def _serve(self, op: str, arguments: dict[str, Any], fds: list[int]) -> rpc.Reply:
        assert op in ("recall", "revoke") and not fds
        if op == "recall":
            self._recall(arguments["leases"])
            return {}, []
        if mapped := imports.drop(arguments["ids"]):
            raise rpc.CallRefused(f"{len(mapped)} extents are mapped by a lease")
        return {}, []

    def _recall(self, numbers: Sequence[int]) -> None:
        """Recall leases by number; the owner repeats the call for leases still being set up."""
        # In the working thread: each lease that ends calls the owner, and the reading thread
        # delivers the answer. In the reading thread only after the connection has ended.
        for number in numbers:
            if (lease := self.recalls.get(number)) is not None:
                lease.recall_in_thread()


# `_lock` guards `owners`. It is held while a connection is made, so that two threads make one.
owners: dict[str, Owner] = {}
_lock = forkable(threading.Lock())


def owner_of(socket_name: str) -> Owner:
    """Return the connection to a saver, and reconnect if it was lost.

    Raises:
        OSError: No saver listens on the socket.
        CallRefused: Another user's process listens on the socket.
    """
    with _lock:
        owner = owners.get(socket_name)
        if owner is None or owner.endpoint.closed:
            owner = owners[socket_name] = Owner(socket_name)
        return owner


def peer_backend(key: str, device: torch.device | None = None) -> Backend:
    """Return the backend with which `device`, or the current GPU, maps memory of device `key`.

    Raises:
        LeaseError: The GPU cannot reach the memory.
    """
    if key == "cpu":
        return backend_of(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise LeaseError(
            f"{key} is a GPU, and this process sees none; "
            "set CUDA_VISIBLE_DEVICES to one that reaches it"
        )
    here = torch.cuda.current_device() if device is None or device.index is None else device.index
    check_reach(here, key)
    return backend_of(torch.device("cuda", here))


@cache
def backend_of(device: torch.device) -> Backend:
    return make_backend(device)


os.register_at_fork(after_in_child=backend_of.cache_clear)  # the backends are the parent's


@cache
def check_reach(here: int, key: str) -> None:
    """Raise ``LeaseError`` for a visible GPU out of reach; the driver reports hidden ones."""
    for index in range(torch.cuda.device_count()):
        there = device_key(torch.device("cuda", index)) == key
        if there and index != here and not torch.cuda.can_device_access_peer(here, index):
            raise LeaseError(
                f"cuda:{here} does not reach the memory of cuda:{index} ({key}); "
                "use GPUs that reach each other (nvidia-smi topo -p2p r)"
            )

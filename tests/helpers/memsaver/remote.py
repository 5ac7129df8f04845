"""A saver in another process that is controlled through a pipe."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

import memsaver
from memsaver import LeaseCache, MemorySaver, MemSaverError, PoolTicket, Ticket
from memsaver.memory.page_pool import imports
from memsaver.sharing import rpc
from tests.helpers.memory import open_fds
from tests.helpers.memsaver.savers import driver_calls, may_raise
from tests.helpers.peers import Peer


class Side:
    """The saver in the other process; a test calls its methods by name."""

    def __init__(
        self, pipe: Connection, device: str, nbytes: int, limit: int | None, elastic: bool
    ) -> None:
        self.pipe = pipe
        self.saver = MemorySaver(device, limit_bytes=limit)
        self.tensor = self.saver.empty(nbytes, torch.uint8, tag="t", elastic=elastic).fill_(1)
        self.leases: list[memsaver.Lease] = []
        self.kept = LeaseCache()

    def tickets(self) -> tuple[PoolTicket, Ticket]:
        return self.saver.pool_ticket(), self.saver.share("t", writable=True)

    def fill(self, value: int) -> None:
        self.tensor.fill_(value)
        self.saver.backend.synchronize()

    def look(self) -> tuple[int, int] | None:
        """Return the first and the last byte of the tensor, or None while it is paused."""
        return None if self.saver.is_paused("t") else (int(self.tensor[0]), int(self.tensor[-1]))

    def pause(self, **arguments: Any) -> None:
        self.saver.pause(**arguments)

    def resume(self) -> tuple[int, int] | None:
        self.saver.resume()
        return self.look()

    def give(self, to: PoolTicket) -> None:
        self.saver.pause(release="hand_over", to=to)

    def meet(self, to: PoolTicket) -> None:
        """Hand over, but wait for a message of the test just before the offer."""
        call = rpc.Endpoint.call

        def call_after_message(endpoint: rpc.Endpoint, name: str, **arguments: Any) -> Any:
            if name == "offer":
                self.pipe.send("ready")
                self.pipe.recv()
            return call(endpoint, name, **arguments)

        rpc.Endpoint.call = call_after_message  # type: ignore[method-assign]
        with may_raise(memsaver.LeaseError):
            self.give(to)
        rpc.Endpoint.call = call  # type: ignore[method-assign]

    def release(self) -> None:
        self.saver.pause()
        self.saver.trim()

    def attach(self, ticket: Ticket, offset: int = 0) -> int:
        """Attach until `detach`, and return the byte at the offset."""
        self.leases.append(memsaver.attach(ticket))
        return int(self.leases[-1].tensor((1,), torch.uint8, offset))

    def detach(self) -> None:
        self.leases.pop().close()

    def use(self, ticket: Ticket, value: int) -> None:
        """Fill the tag through a cached lease."""
        with self.kept.use(ticket) as lease:
            lease.tensor((lease.nbytes,), torch.uint8).fill_(value)

    def alias(self, ticket: Ticket) -> tuple[int, int] | None:
        self.saver.pause()
        self.saver.alias("t", ticket)
        return self.look()

    def pause_in_child(self) -> int:
        """Return the exit status of a forked child: 0 if its pause is refused and it exits well."""
        if child := os.fork():
            return os.waitpid(child, 0)[1]
        with contextlib.suppress(BaseException):
            try:
                self.saver.pause()
            except memsaver.StateError:
                del self.saver, self.tensor
                gc.collect()
                os._exit(0)
        os._exit(1)

    def report(self) -> memsaver.Report:
        return self.saver.report()

    def held(self) -> tuple[int, int]:
        """Return the numbers of imports and of descriptors."""
        return len(imports), open_fds()

    def exports(self) -> int:
        return driver_calls(self.saver)["export"].calls


def _serve(pipe: Connection, *arguments: Any) -> None:
    side = Side(pipe, *arguments)
    pipe.send(side.tickets())
    while True:
        name, positional, named = pipe.recv()
        try:
            answer = getattr(side, name)(*positional, **named)
            side.saver.check_integrity()
        except MemSaverError as error:
            answer = error
        pipe.send(answer)


class RemoteSaver:
    """Handle of a `Side` in another process, with the same methods; errors are raised here.

    Attributes:
        pool: Ticket to hand memory over to the saver.
        ticket: Ticket to map the saver's tag "t".
    """

    def __init__(
        self, device: str, nbytes: int = 4 << 20, limit: int | None = None, elastic: bool = False
    ) -> None:
        self.peer = Peer(_serve, device, nbytes, limit, elastic)
        self.pid = self.peer.pid
        self.pool, self.ticket = self.peer.hear()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            answer = self.peer.ask((name, arguments, named))
            if isinstance(answer, MemSaverError):
                raise answer
            return answer

        return call

    def kill(self) -> None:
        self.peer.kill()
        assert self.peer.dies_within(30)


@contextmanager
def remote_saver(device: str, **arguments: Any) -> Iterator[RemoteSaver]:
    remote = RemoteSaver(device, **arguments)
    try:
        yield remote
    finally:
        remote.peer.bury()

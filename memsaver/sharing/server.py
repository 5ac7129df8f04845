"""The owner's side of sharing: tickets, leases, and the peers' imports of extents.

The owner listens on an abstract Unix socket, which leaves nothing behind in the file system. A
connection must come from the same user, and a request must carry the token of a ticket. Leases end
with their connection, so a dead peer holds none.
"""

import contextlib
import errno
import itertools
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memsaver.errors import LeaseError
from memsaver.memory.backend import Backend
from memsaver.memory.page_pool import PagePool, imports
from memsaver.native import shim
from memsaver.sharing import rpc
from memsaver.sharing.hand_over import gives_for, hand_over
from memsaver.sharing.lease import TIMEOUT_SECONDS
from memsaver.system.interrupts import deliver
from memsaver.system.sockets import credentials
from memsaver.system.threads import forkable
from memsaver.tag.arena import Arena
from memsaver.tag.tickets import PoolTicket, Ticket

REVOKE_SECONDS = 5.0
_AGAIN_SECONDS = 0.05  # between recalls; one may overtake the answer that grants the lease
BUSY_SECONDS = TIMEOUT_SECONDS - 2  # a request is refused before its caller gives up
_CROSSING_SECONDS = 0.2  # a hand-over takes milliseconds
_SCARCE_SECONDS = 0.1
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False)
class Link:
    """One connection of a peer process."""

    endpoint: rpc.Endpoint = field(init=False)
    # Ids of extents. The working thread adds ids under the saver's lock, and an `unlease` removes
    # some in the reading thread without it. A peer never sends both together (`Owner.granting`).
    imported: set[int] = field(default_factory=set)
    leases: dict[int, str] = field(default_factory=dict)  # tag by number of the lease
    kept: set[int] = field(default_factory=set)  # leases that may stay mapped between uses


class ShareServer:
    """Server of one saver that grants leases and accepts extents.

    Its threads start with the first ticket. They hold the saver's `lock` while a request reads tags
    and extents. `find_arena`, a method of the saver, is held weakly, so that the threads do not
    keep an unused saver alive.
    """

    def __init__(
        self,
        backend: Backend,
        lock: threading.RLock,
        pool: PagePool,
        find_arena: Callable[[str], Arena],
    ) -> None:
        self._backend = backend
        self._lock = lock
        self._pool = pool
        self._find_arena = weakref.WeakMethod(find_arena)
        self._tickets: dict[str, Ticket] = {}
        self._links: list[Link] = []
        self._numbers = itertools.count(1)
        # `_changed` guards `_links` and the leases of each link. A pause waits here, under the
        # saver's `lock`, for leases to end. So a thread takes `lock` before `_changed`, never
        # after it, and `unlease` takes `_changed` alone.
        self._changed = forkable(threading.Condition())
        self._pid = os.getpid()
        self._socket_name = f"memsaver-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        self._pool_token = secrets.token_hex(16)
        self._listener: socket.socket | None = None

    def _listen(self) -> None:
        if self._listener is None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind("\0" + self._socket_name)
            listener.listen()
            threading.Thread(
                target=self._accept, args=[listener], name="memsaver-share", daemon=True
            ).start()
            self._listener = listener

    def ticket(self, arena: Arena, writable: bool) -> Ticket:
        """Return the ticket for a tag; the same one for equal arguments."""
        self._listen()
        for known in self._tickets.values():
            if (known.tag, known.writable) == (arena.tag, writable):
                return known
        ticket = Ticket(
            socket_name=self._socket_name,
            token=secrets.token_hex(16),
            tag=arena.tag,
            device_key=self._backend.device_key,
            writable=writable,
        )
        self._tickets[ticket.token] = ticket
        return ticket

    def made(self, ticket: Ticket) -> bool:
        """Return whether this server issued the ticket."""
        return ticket.socket_name == self._socket_name

    def pool_ticket(self) -> PoolTicket:
        self._listen()
        return PoolTicket(
            socket_name=self._socket_name,
            token=self._pool_token,
            device_key=self._backend.device_key,
            pid=os.getpid(),
        )

    def holders(self, tag: str) -> list[int]:
        """Return the process ids of the tag's leases, one per lease."""
        with self._changed:
            return [link.endpoint.peer_pid for leased, link in self._leased() if leased == tag]

    def _leased(self) -> Iterator[tuple[str, Link]]:
        for link in self._links:
            for tag in link.leases.values():
                yield tag, link

    def wait_free(self, tags: Sequence[str], timeout: float) -> None:
        """Recall the tags' cached leases; wait up to `timeout` seconds until no lease is left."""
        deadline = time.monotonic() + timeout
        while True:
            self.recall(tags)
            with self._changed:
                held = [(tag, link) for tag, link in self._leased() if tag in tags]
                if not held:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    names = ", ".join(
                        f"{tag!r} by process {link.endpoint.peer_pid}" for tag, link in held
                    )
                    raise LeaseError(
                        f"leased: {names}; close the Lease there, or pause the tag that "
                        "aliases the pages (nothing was changed)"
                    )
                self._changed.wait(min(left, _AGAIN_SECONDS))
            deliver()

    def recall(self, tags: Sequence[str]) -> None:
        """Ask peers to end cached leases of the tags, immediately or with the present use.

        The caller may hold the saver's lock, but not the device lock, which peers need to unmap.
        """
        for link in list(self._links):  # a copy, because other threads add and remove links
            with self._changed:
                wanted = [number for number in link.kept if link.leases[number] in tags]
            if wanted:
                # Not under `_changed`, which the thread of the peer's `unlease` needs.
                # A lease of a peer that does not answer stays.
                with contextlib.suppress(rpc.ConnectionClosed, rpc.CallRefused, TimeoutError):
                    link.endpoint.call("recall", timeout=REVOKE_SECONDS, leases=wanted)

    def revoke(self, ids: Sequence[int], except_pid: int | None) -> None:
        """Revoke the peers' imports of extents that no lease maps.

        Raises:
            LeaseError: A peer does not release its imports. Other peers may have released theirs.
        """
        for link in list(self._links):
            wanted = sorted(link.imported.intersection(ids))
            if not wanted or link.endpoint.peer_pid == except_pid:
                continue
            try:
                with contextlib.suppress(rpc.ConnectionClosed):  # imports end with their process
                    link.endpoint.call("revoke", timeout=REVOKE_SECONDS, ids=wanted)
            except (rpc.CallRefused, TimeoutError) as error:
                pid = link.endpoint.peer_pid
                raise LeaseError(
                    f"process {pid} does not release {len(wanted)} imported extents: {error}; "
                    "end it, or pause with release='retain' (nothing was changed)"
                ) from error
            link.imported.difference_update(wanted)
        if except_pid is None:
            self._pool.mark_shared(ids, False)

    def hand_over(self, extents: Sequence[shim.Extent], to: PoolTicket) -> LeaseError | None:
        """Hand unmapped extents over to the saver of `to`; see `hand_over`."""
        lost = hand_over(extents, to, self._backend)
        for link in list(self._links):  # imports are now the new owner's concern
            link.imported.difference_update(extent.id for extent in extents)
        return lost

    def close(self) -> None:
        if self._listener is None:
            return
        if os.getpid() == self._pid:  # a forked child closes its descriptor only
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in list(self._links):
            link.endpoint.close()

    # ---------------------------------------------------------------- connections

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno not in (*_SCARCE, errno.ECONNABORTED):
                    return  # closed
                time.sleep(_SCARCE_SECONDS)
                continue
            if credentials(connection)[1] != os.getuid():
                connection.close()  # another user's connection gets no thread
                continue
            link = Link()
            serve, gone = partial(self.serve, link), partial(self._gone, link)
            # The working thread of the endpoint may wait for the saver's lock with a request for
            # another lease, while a pause holds that lock and waits for this `unlease`. So the
            # reading thread serves it.
            link.endpoint = rpc.Endpoint(
                connection, serve, gone, "memsaver-owner", prompt=["unlease"]
            )
            # The list has the link before its threads start: they may end immediately, and `_gone`
            # then removes it.
            with self._changed:
                self._links.append(link)
            try:
                link.endpoint.start()
            except RuntimeError:
                # No thread can be started: this peer is refused, later ones may be accepted.
                self._gone(link)
                time.sleep(_SCARCE_SECONDS)

    def _gone(self, link: Link) -> None:
        with self._changed:
            if link in self._links:
                self._links.remove(link)
            self._changed.notify_all()

    # ---------------------------------------------------------------- requests

    def serve(self, link: Link, op: str, arguments: dict[str, Any], fds: list[int]) -> rpc.Reply:
        try:
            if op not in ("lease", "unlease", "offer", "give"):
                raise rpc.CallRefused(f"this saver knows no operation {op!r}")
            if op == "give":
                arguments["fds"] = fds  # `give` removes the descriptors that it uses
            return getattr(self, op)(link, **arguments)
        finally:
            rpc.close_all(fds)

    def lease(self, link: Link, token: str, kept: bool = False) -> rpc.Reply:
        ticket = self._tickets.get(token)
        if ticket is None:
            raise rpc.CallRefused("unknown ticket of this saver")
        with self._locked():  # no pause between the lookup and the answer
            find_arena = self._find_arena()
            if find_arena is None:
                raise rpc.CallRefused("the saver is gone")
            arena = find_arena(ticket.tag)
            if arena.paused:
                raise rpc.CallRefused(f"tag {ticket.tag!r} is paused; resume it first")
            if arena.aliased is not None:
                raise rpc.CallRefused(
                    f"tag {ticket.tag!r} aliases another saver's pages; share them at their owner"
                )
            arena.backend.bind_thread()
            extents = shim.extents(arena.slot)
            fresh = [extent for extent in extents if extent.id not in link.imported]
            fds: list[int] = []
            try:
                for extent in fresh:
                    fds.append(arena.backend.export_fd(extent.handle))
            except BaseException:
                rpc.close_all(fds)
                raise
            new = {extent.id for extent in fresh}
            self._pool.mark_shared(sorted(new), True)
            link.imported |= new
            number = next(self._numbers)
            with self._changed:
                link.leases[number] = ticket.tag
                if kept:
                    link.kept.add(number)
        listed = [[extent.id, extent.offset, extent.nbytes, extent.id in new] for extent in extents]
        return {"extents": listed, "lease": number}, fds

    def unlease(self, link: Link, lease: int, forgotten: list[int]) -> rpc.Reply:
        link.imported.difference_update(forgotten)
        with self._changed:
            link.leases.pop(lease, None)
            link.kept.discard(lease)
            self._changed.notify_all()
        return {}, []

    def offer(self, link: Link, token: str, extents: list[list[int]]) -> rpc.Reply:
        self._check_pool_token(token)
        with self._locked(link):
            self._pool.check_room(sum(nbytes for _, nbytes in extents))
        return {"need": imports.missing([extent_id for extent_id, _ in extents])}, []

    def give(
        self, link: Link, fds: list[int], token: str, extents: list[list[int]], need: list[int]
    ) -> rpc.Reply:
        """Take ownership of all extents or none; the giver keeps its handles as imports."""
        self._check_pool_token(token)
        # The kernel drops descriptors that would exceed the limit of open files.
        if len(fds) != len(need):
            raise rpc.CallRefused(
                f"{len(fds)} of {len(need)} descriptors arrived; "
                "raise the receiver's limit of open files"
            )
        pending = dict(zip(need, fds, strict=True))
        fds.clear()
        try:
            with self._locked(link), imports.unchanged():
                self._pool.take_over(
                    [(extent_id, nbytes) for extent_id, nbytes in extents], pending
                )
                link.imported.update(extent_id for extent_id, _ in extents)
        finally:
            rpc.close_all(list(pending.values()))
        return {}, []

    def _check_pool_token(self, token: str) -> None:
        if token != self._pool_token:
            raise rpc.CallRefused("unknown pool ticket of this saver")

    @contextlib.contextmanager
    def _locked(self, giver: Link | None = None) -> Iterator[None]:
        """Acquire the saver's lock, or refuse the request before its caller gives up.

        Savers that hand memory over to each other, or in a ring, would wait for each other, because
        each of them holds its own lock. While this process waits as a giver, it therefore refuses
        a `giver` with an equal or larger process id.
        """
        deadline = time.monotonic() + BUSY_SECONDS
        while not self._lock.acquire(timeout=0.05):
            if (
                giver is not None
                and giver.endpoint.peer_pid >= os.getpid()
                and gives_for(_CROSSING_SECONDS)
            ):
                raise rpc.CallRefused(
                    f"process {os.getpid()} is handing memory over itself; try again"
                )
            if time.monotonic() > deadline:
                raise rpc.CallRefused(
                    f"the saver of process {os.getpid()} was busy for {BUSY_SECONDS:g} s; try again"
                )
        try:
            yield
        finally:
            self._lock.release()

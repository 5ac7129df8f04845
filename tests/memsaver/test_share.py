"""Leases of a tag by another process, and protection from other users."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch

import memsaver
from memsaver.sharing import rpc
from memsaver.sharing.client import owners
from tests.helpers.memory import counted, open_fds, process_bytes, settled_fds
from tests.helpers.memsaver.remote import remote_saver
from tests.helpers.memsaver.savers import MIB, connections, own_threads, shared, until
from tests.helpers.peers import Peer

pytestmark = pytest.mark.alone


def test_peer_reads_and_writes_the_same_pages(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, tensor, _ = shared(device)
    with remote_saver(device) as peer:
        assert peer.attach(saver.share("t"), 8 * 77) == 77
        peer.detach()
        peer.use(saver.share("t", writable=True), 9)
        if device != "cpu":
            torch.cuda.synchronize()
        assert bool((tensor == 9).all())
        peer.attach(saver.share("t"))
        with (
            monkeypatch.context() as patch,
            pytest.raises(memsaver.LeaseError, match=f"'t' by process {peer.pid}"),
        ):
            patch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 0.05)
            saver.pause("t")
        assert not saver.is_paused("t") and saver.report().tags["t"].leases >= 1
        peer.detach()
        monkeypatch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 60.0)
        saver.pause("t")  # recalls the peer's cached lease


def test_lease_ends_when_peer_dies(device: str) -> None:
    saver, _, _ = shared(device)
    before, committed = process_bytes(device), saver.report().committed_bytes
    with remote_saver(device) as peer:
        peer.attach(saver.share("t", writable=True))
        peer.kill()
        until(lambda: not saver.report().tags["t"].leases)
        saver.pause("t")
        # The driver takes a while to clean up after the process.
        until(lambda: before - process_bytes(device) == counted(committed, device, 2))


def test_share_returns_same_ticket_and_bad_uses_are_refused(device: str) -> None:
    saver, _, _ = shared(device)
    ticket = saver.share("t")
    assert saver.share("t") is ticket is not saver.share("t", writable=True)
    with memsaver.attach(ticket) as lease:
        with pytest.raises(ValueError, match="outside"):
            lease.tensor((1 << 30,), torch.int64)
    with pytest.raises(memsaver.LeaseError, match="closed"):
        lease.tensor((1,), torch.int64)
    with pytest.raises(memsaver.TagError):
        memsaver.MemorySaver(device).share("nothing")


NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def _connected(socket_name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + socket_name)
    connection.settimeout(60)
    return connection


def _ask_for_lease(ticket: memsaver.Ticket, token: str) -> tuple[dict[str, object] | None, int]:
    """Return the answer to a well-formed request and its number of descriptors.

    The answer is None if the connection was closed.
    """
    request = json.dumps({"op": "lease", "token": token}).encode()
    with _connected(ticket.socket_name) as connection:
        with contextlib.suppress(BrokenPipeError):
            connection.send(rpc.HEADER.pack(False, 1, False) + request)
        try:
            data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 200)
        except ConnectionResetError:  # closed before the request was read
            data, fds = b"", []
        for fd in fds:
            os.close(fd)
        return (json.loads(data[rpc.HEADER.size :]) if data else None), len(fds)


def test_descriptors_are_sent_only_for_the_token(device: str) -> None:
    saver, tensor, _ = shared(device)
    ticket = saver.share("t")
    answer, fds = _ask_for_lease(ticket, ticket.token)
    assert answer is not None and fds == saver.report().tags["t"].extents >= 1
    for token in ("", "0" * 32, ticket.token[:-1], saver.pool_ticket().token):
        assert _ask_for_lease(ticket, token) == ({"refused": "unknown ticket of this saver"}, 0)
    tensor.numel()


def _other_user(pipe: Connection, device: str, ticket: memsaver.Ticket) -> None:
    """Attach as another user with a valid ticket, which is refused."""
    memsaver.MemorySaver(device).empty(10, tag="t")  # loads files that the user cannot read
    pipe.recv()
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with pytest.raises(memsaver.LeaseError) as refused:
        memsaver.attach(ticket)
    pipe.send(str(refused.value))
    pipe.send([_ask_for_lease(ticket, token) for token in (ticket.token, "")])
    many = [_connected(ticket.socket_name) for _ in range(100)]
    for connection in many:
        assert connection.recv(1) == b""
    pipe.send("all closed")
    pipe.recv()


@needs_root
def test_another_user_gets_no_lease_and_costs_no_resources(device: str) -> None:
    saver, tensor, ticket = shared(device)
    memsaver.attach(ticket).close()
    other_user = Peer(_other_user, device, ticket)
    try:
        before = settled_fds(), own_threads()
        other_user.tell("begin")
        assert other_user.hear() == (
            f"no lease of tag 't': its saver is user {os.getuid()}'s, "
            f"this process is user {NOBODY}'s"
        )
        assert other_user.hear() == [(None, 0), (None, 0)]
        assert other_user.hear() == "all closed"
        assert saver.report().tags["t"].leases == 0
        memsaver.attach(ticket).close()
        until(lambda: open_fds() <= before[0] and own_threads() <= before[1])
    finally:
        other_user.bury()
    saver.pause()
    tensor.numel()


def _squatter(pipe: Connection, socket_name: str) -> None:
    """Listen as another user on the socket name of a closed saver."""
    os.setuid(NOBODY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + socket_name)
    listener.listen()
    pipe.send("listening")
    connection, _ = listener.accept()
    pipe.send(connection.recv(1 << 16))


@needs_root
def test_no_token_is_sent_to_another_user(device: str) -> None:
    saver, _, _ = shared(device)
    ticket = saver.share("t")
    saver.close()
    squatter = Peer(_squatter, ticket.socket_name)
    try:
        assert squatter.hear() == "listening"
        with pytest.raises(memsaver.LeaseError, match=f"its saver is user {NOBODY}'s"):
            memsaver.attach(ticket)
        assert squatter.hear() == b""
    finally:
        squatter.bury()


def test_owner_accepts_connections_again_after_running_out_of_descriptors(device: str) -> None:
    saver, _, _ = shared(device)
    ticket = saver.share("t")
    connection, taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), []
    connection.settimeout(60)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (connection.fileno() + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        connection.connect("\0" + ticket.socket_name)
        time.sleep(0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        rpc.close_all(taken)
        connection.close()
    memsaver.attach(ticket).close()


def test_owner_serves_again_after_running_out_of_threads(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, _, ticket = shared(device)
    with memsaver.attach(ticket):
        pass
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("memsaver-owner"):
            raise RuntimeError("can't start new thread")
        start(thread)

    for owner in list(owners.values()):
        owner.endpoint.close()
    until(lambda: not connections())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(memsaver.LeaseError, match="does not answer"):
        memsaver.attach(ticket)
    monkeypatch.undo()
    until(lambda: not connections())  # the peer's end has noticed, too
    memsaver.attach(ticket).close()
    saver.pause()


def test_unclosed_lease_ends_with_its_last_tensor(device: str) -> None:
    saver, tensor, ticket = shared(device)
    tail = memsaver.attach(ticket).tensor((8 * MIB,), torch.uint8)[-100:]
    gc.collect()
    assert saver.leases("t") == 1 and torch.equal(tail, tensor[-100:])
    del tail
    gc.collect()
    until(lambda: not saver.leases("t"))
    saver.pause()

"""Leases: another process maps a tag's pages."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import socket
import threading
import time
import weakref
from multiprocessing.connection import Connection

import pytest
import torch

import memsaver
from memsaver import rpc
from tests.helpers.effort import rounds
from tests.helpers.memory import memory_maps, open_fds, process_bytes, settled_fds, status_bytes
from tests.helpers.memsaver.remote import remote_saver
from tests.helpers.memsaver.savers import until
from tests.helpers.peers import Peer

pytestmark = pytest.mark.alone


def _shared(device: str) -> tuple[memsaver.MemorySaver, torch.Tensor]:
    saver = memsaver.MemorySaver(device)
    tensor = saver.empty(1 << 20, torch.int64, tag="weights")
    tensor.copy_(torch.arange(1 << 20))
    return saver, tensor


def test_a_peer_reads_and_writes_the_same_pages(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, tensor = _shared(device)
    with remote_saver(device) as peer:
        assert peer.read_words(saver.share("weights"), 4096) == list(range(512, 520))
        peer.detach()
        peer.use(saver.share("weights", writable=True), 9)
        if device != "cpu":
            torch.cuda.synchronize()
        assert bool((tensor.view(torch.uint8) == 9).all())
        peer.attach(saver.share("weights"))
        with (
            monkeypatch.context() as patch,
            pytest.raises(memsaver.LeaseError, match=f"'weights' by process {peer.pid}"),
        ):
            patch.setattr("memsaver.switch.LEASE_GRACE_SECONDS", 0.05)
            saver.pause("weights")
        assert not saver.is_paused("weights") and saver.report().tags["weights"].leases >= 1
        peer.detach()
        monkeypatch.setattr("memsaver.switch.LEASE_GRACE_SECONDS", 60.0)
        saver.pause("weights")  # what it keeps without using it comes back


def _copy_from_another_gpu(pipe: Connection, ticket: memsaver.Ticket) -> None:
    torch.cuda.set_device(1)
    with memsaver.attach(ticket) as lease:
        lease.tensor((8,), torch.int64, byte_offset=4096).copy_(torch.full((8,), 9, device="cuda:1"))
        torch.cuda.synchronize("cuda:1")
    pipe.send("written")


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_a_peer_copies_from_another_gpu() -> None:
    saver, tensor = _shared("cuda:0")
    peer = Peer(_copy_from_another_gpu, saver.share("weights", writable=True))
    assert peer.hear() == "written"
    assert tensor[510:522].tolist() == [510, 511, *[9] * 8, 520, 521]
    peer.kill()


def test_a_dead_peer_ends_its_lease(device: str) -> None:
    saver, _ = _shared(device)
    before, committed = process_bytes(device), saver.report().committed_bytes
    with remote_saver(device) as peer:
        peer.attach(saver.share("weights", writable=True))
        peer.kill()
        until(lambda: not saver.report().tags["weights"].leases)
        saver.pause("weights")
        until(lambda: before - process_bytes(device) == committed)  # the driver clears up behind it, a while


@pytest.mark.soak
def test_attach_in_the_same_process_and_leave_nothing(device: str, fds: int) -> None:
    saver, tensor = _shared(device)
    ticket = saver.share("weights", writable=True)

    def sync(value: int) -> None:
        with memsaver.attach(ticket) as lease:
            assert lease.nbytes == saver.report().tags["weights"].committed_bytes
            lease.tensor((4,), torch.int64).fill_(value)
        if device != "cpu":
            torch.cuda.synchronize()
        assert tensor[:4].tolist() == [value] * 4
        saver.pause("weights", content="host")  # pins memory the first time, for every GPU
        saver.resume("weights")
        tensor.sum()

    sync(-1)
    gc.collect()
    before = process_bytes(device), open_fds(), memory_maps(), status_bytes("VmSize")
    for value in range(rounds(40, 5000)):
        sync(value % 127)
    assert process_bytes(device) == before[0] and open_fds() <= before[1]
    assert memory_maps() <= before[2] + 8
    assert status_bytes("VmSize") - before[3] < 20 * tensor.nbytes, "each lease takes addresses, and gives them back"


def test_a_tag_of_many_extents_arrives_whole(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    pieces = [saver.empty(3 << 20, torch.uint8, tag="t").fill_(value) for value in range(8)]
    with memsaver.attach(saver.share("t")) as lease:
        for value, piece in enumerate(pieces):
            seen = lease.tensor((3 << 20,), torch.uint8, saver.offset_of(piece))
            assert torch.equal(seen, piece) and int(seen[0]) == value


def test_refusals_name_the_reason(device: str) -> None:
    saver, _ = _shared(device)
    ticket = saver.share("weights")
    assert saver.share("weights") is ticket is not saver.share("weights", writable=True)
    with memsaver.attach(ticket) as lease:
        with pytest.raises(ValueError, match="outside"):
            lease.tensor((1 << 30,), torch.int64)
    with pytest.raises(memsaver.LeaseError, match="closed"):
        lease.tensor((1,), torch.int64)
    saver.pause("weights")
    with pytest.raises(memsaver.LeaseError, match="'weights' is paused"):
        memsaver.attach(ticket)
    saver.resume("weights")
    forged = memsaver.Ticket(**{**vars(ticket), "token": "0" * 32})
    with pytest.raises(memsaver.LeaseError, match="unknown ticket"):
        memsaver.attach(forged)
    saver.close()
    with pytest.raises(memsaver.LeaseError, match="does not answer"):
        memsaver.attach(ticket)
    with pytest.raises(memsaver.TagError):
        memsaver.MemorySaver(device).share("nothing")


def test_a_saver_that_is_dropped_ends_its_sharing(device: str) -> None:
    saver, tensor = _shared(device)
    ticket = saver.share("weights")
    with memsaver.attach(ticket):
        pass
    gone, threads = weakref.ref(saver), {thread.name for thread in threading.enumerate()}
    assert "memsaver-share" in threads
    del saver, tensor
    gc.collect()
    assert gone() is None
    with pytest.raises(memsaver.LeaseError, match="does not answer"):
        memsaver.attach(ticket)


def test_closed_savers_take_no_slots(device: str) -> None:
    """There are 256 in a process; one of a tag whose tensors outlive the saver is free when they die."""
    for _ in range(300):
        saver = memsaver.MemorySaver(device)
        tensor = saver.empty(10, tag="t")
        saver.close()
        del tensor


NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def _connected(socket_name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + socket_name)
    connection.settimeout(60)
    return connection


def _ask_for_lease(ticket: memsaver.Ticket, token: str) -> tuple[dict[str, object] | None, int]:
    """What comes back to a well-formed request (None: the connection is closed), and how many descriptors."""
    request = json.dumps({"op": "lease", "token": token}).encode()
    with _connected(ticket.socket_name) as connection:
        with contextlib.suppress(BrokenPipeError):
            connection.send(rpc.HEADER.pack(False, 1, False) + request)
        try:
            data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 200)
        except ConnectionResetError:  # closed with our request unread
            data, fds = b"", []
        for fd in fds:
            os.close(fd)
        return (json.loads(data[rpc.HEADER.size :]) if data else None), len(fds)


def test_a_descriptor_only_with_the_token(device: str) -> None:
    saver, tensor = _shared(device)
    ticket = saver.share("weights")
    answer, fds = _ask_for_lease(ticket, ticket.token)
    assert answer is not None and fds == saver.report().tags["weights"].extents >= 1
    for token in ("", "0" * 32, ticket.token[:-1], saver.pool_ticket().token):
        assert _ask_for_lease(ticket, token) == ({"refused": "unknown ticket"}, 0)
    tensor.numel()


def _stranger(pipe: Connection, device: str, ticket: memsaver.Ticket) -> None:
    """Another user, who has a valid ticket."""
    memsaver.MemorySaver(device).empty(10, tag="t")  # loads what another user may not read
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
def test_another_user_gets_nothing_and_costs_nothing(device: str) -> None:
    saver, tensor = _shared(device)
    ticket = saver.share("weights", writable=True)
    memsaver.attach(ticket).close()
    stranger = Peer(_stranger, device, ticket)
    try:
        before = settled_fds(), threading.active_count()
        stranger.tell("begin")
        assert stranger.hear() == (
            f"no lease of tag 'weights': its saver is user {os.getuid()}'s, this process is user {NOBODY}'s"
        )
        assert stranger.hear() == [(None, 0), (None, 0)]
        assert stranger.hear() == "all closed"
        assert saver.report().tags["weights"].leases == 0
        memsaver.attach(ticket).close()
        until(lambda: open_fds() <= before[0] and threading.active_count() <= before[1])
    finally:
        stranger.bury()
    saver.pause()
    tensor.numel()


def _squatter(pipe: Connection, socket_name: str) -> None:
    """Another user, who has taken the name of a saver that is gone."""
    os.setuid(NOBODY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + socket_name)
    listener.listen()
    pipe.send("listening")
    connection, _ = listener.accept()
    pipe.send(connection.recv(1 << 16))


@needs_root
def test_no_token_goes_to_another_user(device: str) -> None:
    saver, _ = _shared(device)
    ticket = saver.share("weights")
    saver.close()
    squatter = Peer(_squatter, ticket.socket_name)
    try:
        assert squatter.hear() == "listening"
        with pytest.raises(memsaver.LeaseError, match=f"its saver is user {NOBODY}'s"):
            memsaver.attach(ticket)
        assert squatter.hear() == b""
    finally:
        squatter.bury()


def test_no_more_descriptors_for_a_while(device: str) -> None:
    """Then nobody can connect; when there are some again, the owner goes on."""
    saver, _ = _shared(device)
    ticket = saver.share("weights")
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

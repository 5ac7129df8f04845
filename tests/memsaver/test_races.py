"""Rare interleavings: a peer dies, revokes or hands over between two steps of an operation."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.memory.page_pool import imports
from memsaver.sharing import lease, rpc
from memsaver.sharing.client import Owner, owners
from tests.helpers.memory import memfd_bytes
from tests.helpers.memsaver.remote import RemoteSaver, remote_saver
from tests.helpers.memsaver.savers import MIB, at_once, busy, may_raise, until

SIZE = 4 * MIB


def _around(
    op: str,
    patch: pytest.MonkeyPatch,
    before: Callable[[], Any] = bool,
    after: Callable[[], Any] = bool,
) -> None:
    """Run callbacks just before and just after this process's first request of a kind."""
    original, first = rpc.Endpoint.call, iter([True])

    def call(self: rpc.Endpoint, name: str, **arguments: Any) -> Any:
        chosen = name == op and next(first, False)
        if chosen:
            before()
        answer = original(self, name, **arguments)
        if chosen:
            after()
        return answer

    patch.setattr(rpc.Endpoint, "call", call)


@pytest.fixture
def peer(device: str) -> Iterator[RemoteSaver]:
    with remote_saver(device, nbytes=SIZE) as peer:
        yield peer


@pytest.fixture
def saver(device: str, fds: int) -> Iterator[MemorySaver]:
    before = _held()
    saver = MemorySaver(device)
    kv = saver.empty(SIZE, torch.uint8, tag="kv").fill_(2)
    yield saver
    saver.check_integrity()
    saver.close()
    del kv
    until(lambda: _held() == before)  # a thread ends the saver's connection to itself


def _held() -> tuple[int, int]:
    """Return the number of imports of this process, and its memfd bytes."""
    return len(imports), memfd_bytes([os.getpid()])


def _dies(peer: RemoteSaver) -> None:
    """Kill the peer, and wait until this process has noticed."""
    lease.owner_of(peer.pool.socket_name)
    peer.kill()
    until(lambda: peer.pool.socket_name not in owners)


def test_hand_over_leaves_no_import_when_receiver_dies_after_its_answer(
    saver: MemorySaver, peer: RemoteSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(imports)
    _around("give", monkeypatch, after=lambda: _dies(peer))
    saver.pause(release="hand_over", to=peer.pool)
    assert len(imports) == before
    saver.resume()


def test_hand_over_leaves_no_import_when_receiver_releases_immediately(
    saver: MemorySaver, peer: RemoteSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The receiver revokes imports that the giver has not even noted.
    before = len(imports)

    def release() -> None:
        peer.peer.tell(("release", (), {}))
        time.sleep(0.2)

    _around("give", monkeypatch, after=release)
    saver.pause(release="hand_over", to=peer.pool)
    assert peer.peer.hear() is None and peer.report().committed_bytes == 0
    assert len(imports) == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_attach_fails_when_owner_dies_during_import(
    saver: MemorySaver, peer: RemoteSaver, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "before":
        _around("lease", monkeypatch, after=lambda: _dies(peer))
    else:
        pin = imports.pin
        monkeypatch.setattr(imports, "pin", lambda ids: _dies(peer) or pin(ids))
    with pytest.raises(
        memsaver.LeaseError, match="does not answer" if when == "before" else "owner has gone"
    ):
        memsaver.attach(peer.ticket)


def test_hand_over_completes_when_giver_dies_during_transfer(
    saver: MemorySaver, peer: RemoteSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memsaver.attach(peer.ticket).close()
    owner = lease.owner_of(peer.pool.socket_name)
    missing = imports.missing
    calls = itertools.count(1)
    dropping = threading.Thread(target=imports.drop_owner, args=[owner])

    def then_drop(ids: list[int]) -> list[int]:
        lacking = missing(ids)
        if next(calls) == 2:  # the first call belongs to the offer
            dropping.start()
            time.sleep(0.1)
        return lacking

    monkeypatch.setattr(imports, "missing", then_drop)
    peer.give(saver.pool_ticket())
    dropping.join()
    assert saver.report().pool_bytes == SIZE


def test_concurrent_attaches_share_imports(
    saver: MemorySaver, peer: RemoteSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The owner lists no new extents for the second one, which must wait for the first.
    import_all = lease.import_all

    def slow(extents: list[Any], *arguments: Any) -> None:
        time.sleep(0.1 * bool(extents))
        import_all(extents, *arguments)

    monkeypatch.setattr(lease, "import_all", slow)
    leases = at_once(*[lambda: memsaver.attach(peer.ticket)] * 2)
    assert [int(lease.tensor((1,), torch.uint8)) for lease in leases] == [1, 1]
    for attached in leases:
        attached.close()
    peer.release()


def test_failed_attach_keeps_the_imports_of_a_concurrent_one(
    saver: MemorySaver, peer: RemoteSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The owner sends extents again that the failed one has not imported, and the other one has.
    import_all, attached = lease.import_all, list[memsaver.Lease]()
    other = threading.Thread(target=lambda: attached.append(memsaver.attach(peer.ticket)))

    def fail(extents: list[Any], fds: list[int], *_: Any) -> None:
        monkeypatch.setattr(lease, "import_all", import_all)
        rpc.close_all(fds)
        raise memsaver.LeaseError("not imported")

    monkeypatch.setattr(lease, "import_all", fail)
    _around("unlease", monkeypatch, before=lambda: (other.start(), other.join(0.2)))
    with pytest.raises(memsaver.LeaseError, match="not imported"):
        memsaver.attach(peer.ticket)
    other.join()
    with memsaver.attach(peer.ticket) as third, attached[0]:
        assert int(third.tensor((1,), torch.uint8)) == 1
    peer.release()


def test_crossing_hand_overs_of_processes_do_not_deadlock(
    saver: MemorySaver, peer: RemoteSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each process holds its lock and waits for the other's, so one of them gives way.
    _around("offer", monkeypatch, before=lambda: (peer.peer.hear(), peer.peer.tell("go")))
    peer.peer.tell(("meet", (saver.pool_ticket(),), {}))
    with may_raise(memsaver.LeaseError):
        saver.pause(release="hand_over", to=peer.pool)
    assert peer.peer.hear() is None
    assert saver.is_paused("kv") != (peer.look() is None) == (peer.pid < os.getpid())
    assert peer.report().committed_bytes + saver.report().committed_bytes == 2 * SIZE
    peer.release()


def test_crossing_hand_overs_of_savers_do_not_deadlock(
    device: str, saver: MemorySaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, ready = MemorySaver(device), threading.Barrier(2)
    kv = other.empty(SIZE, torch.uint8, tag="kv")
    original = lease.owner_of

    def owner_of(name: str) -> Owner:
        ready.wait(60)
        return original(name)

    monkeypatch.setattr(lease, "owner_of", owner_of)

    def give(giver: MemorySaver, to: memsaver.PoolTicket) -> None:
        with may_raise(memsaver.LeaseError):
            giver.pause(release="hand_over", to=to)

    at_once(partial(give, saver, other.pool_ticket()), partial(give, other, saver.pool_ticket()))
    assert saver.report().committed_bytes + other.report().committed_bytes == 2 * kv.nbytes
    other.check_integrity()
    other.close()


def test_lease_granted_after_its_timeout_is_returned(
    saver: MemorySaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = saver.share("kv")
    monkeypatch.setattr(lease, "TIMEOUT_SECONDS", 0.1)
    with busy(saver), pytest.raises(memsaver.LeaseError, match=r"gave no answer for 0.1 s"):
        memsaver.attach(ticket)
    monkeypatch.setattr(lease, "TIMEOUT_SECONDS", 10.0)
    # The owner refuses before the peer gives up.
    monkeypatch.setattr("memsaver.sharing.server.BUSY_SECONDS", 0.1)
    with (
        busy(saver),
        pytest.raises(memsaver.LeaseError, match=rf"process {os.getpid()} was busy for 0.1 s"),
    ):
        memsaver.attach(ticket)
    with memsaver.attach(ticket) as again:  # the answer arrives after the late one
        assert int(again.tensor((1,), torch.uint8)) == 2
    assert saver.report().tags["kv"].leases == 0
    saver.pause()

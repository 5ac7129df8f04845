"""Interleavings that random tests meet rarely: a peer dies, revokes or hands over itself between two steps of ours."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver, lease, rpc
from memsaver.imports import imports
from memsaver.owner import Owner
from tests.helpers.memory import memfd_bytes
from tests.helpers.peers import Peer

SIZE = 4 << 20
SOON = 5.0  # seconds; who waits for an answer that does not come gives up after 10

Patch = pytest.MonkeyPatch


def _around(op: str, patch: Patch, before: Callable[[], Any] = bool, after: Callable[[], Any] = bool) -> None:
    """Do something just before, or just after, this process's first request of a kind."""
    original, first = rpc.Endpoint.call, iter([True])

    def call(self: rpc.Endpoint, name: str, **arguments: Any) -> Any:
        mine = name == op and next(first, False)
        if mine:
            before()
        answer = original(self, name, **arguments)
        if mine:
            after()
        return answer

    patch.setattr(rpc.Endpoint, "call", call)


def _serve(pipe: Connection, device: str) -> None:
    saver = MemorySaver(device)
    kv = saver.empty(SIZE, torch.uint8, tag="kv").fill_(1)
    pipe.send((saver.pool_ticket(), saver.share("kv")))
    while True:
        request, *arguments = pipe.recv()
        if request == "meet":
            _around("offer", Patch(), before=lambda: (pipe.send("ready"), pipe.recv()))
        if request in ("give", "meet"):
            with contextlib.suppress(memsaver.LeaseError):
                saver.pause(release="hand_over", to=arguments[0])
        if request == "release":
            saver.pause()
            saver.trim()
        saver.check_integrity()
        pipe.send((saver.is_paused("kv"), saver.report().committed_bytes, kv.nbytes))


@pytest.fixture
def peer(device: str) -> Iterator[Peer]:
    peer = Peer(_serve, device)
    peer.pool, peer.kv = peer.hear()
    yield peer
    peer.bury()


@pytest.fixture
def saver(device: str) -> Iterator[MemorySaver]:
    gc.collect()  # of tests before
    before = _held()
    saver = MemorySaver(device)
    kv = saver.empty(SIZE, torch.uint8, tag="kv").fill_(2)
    yield saver
    saver.check_integrity()
    saver.close()
    del kv
    _until(lambda: _held() == before)  # its connection to itself ends in a thread


def _held() -> tuple[int, int]:
    """Imports of this process, and on the CPU their bytes and its own."""
    return len(imports), memfd_bytes([os.getpid()])


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _dies(peer: Any) -> None:
    """The peer is dead, and this process has noticed."""
    owner = lease.owner_of(peer.pool.socket_name)
    peer.kill()
    assert peer.dies_within(10)
    _until(lambda: owner in imports._gone)


def test_the_receiver_dies_when_it_has_answered(saver: MemorySaver, peer: Any, monkeypatch: Patch) -> None:
    """What was given is the dead's: it must not stay as an import of nobody."""
    before = len(imports)
    _around("give", monkeypatch, after=lambda: _dies(peer))
    saver.pause(release="hand_over", to=peer.pool)
    assert len(imports) == before
    saver.resume()


def test_the_receiver_releases_at_once(saver: MemorySaver, peer: Any, monkeypatch: Patch) -> None:
    """It revokes what the giver has not even noted as imported."""

    before = len(imports)

    def release() -> None:
        peer.tell(("release",))
        time.sleep(0.2)

    _around("give", monkeypatch, after=release)
    saver.pause(release="hand_over", to=peer.pool)
    assert peer.hear() == (True, 0, SIZE)
    assert len(imports) == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_owner_dies_when_its_tag_is_imported(saver: MemorySaver, peer: Any, monkeypatch: Patch, when: str) -> None:
    if when == "before":
        _around("lease", monkeypatch, after=lambda: _dies(peer))
    else:
        pin = imports.pin
        monkeypatch.setattr(imports, "pin", lambda ids: _dies(peer) or pin(ids))
    with pytest.raises(memsaver.LeaseError, match="does not answer" if when == "before" else "owner has gone"):
        memsaver.attach(peer.kv)


def test_a_giver_dies_while_its_imports_are_taken_over(saver: MemorySaver, peer: Any, monkeypatch: Patch) -> None:
    """Those of it that have been taken by then are not lost."""
    memsaver.attach(peer.kv).close()
    owner, missing, calls = lease.owner_of(peer.pool.socket_name), imports.missing, itertools.count(1)
    dropping = threading.Thread(target=imports.drop_owner, args=[owner])

    def then_drop(ids: list[int]) -> list[int]:
        lacking = missing(ids)
        if next(calls) == 2:  # the first was for the offer
            dropping.start()
            time.sleep(0.1)
        return lacking

    monkeypatch.setattr(imports, "missing", then_drop)
    peer.ask(("give", saver.pool_ticket()))
    dropping.join()
    assert saver.report().pool_bytes == SIZE


def test_two_threads_attach_at_once(saver: MemorySaver, peer: Any, monkeypatch: Patch) -> None:
    """The second is told nothing new, and so must wait until the first has imported what it was told."""
    import_all, leases = lease.import_all, []

    def slow(extents: list[Any], *arguments: Any) -> None:
        time.sleep(0.1 * bool(extents))
        import_all(extents, *arguments)

    monkeypatch.setattr(lease, "import_all", slow)
    threads = [threading.Thread(target=lambda: leases.append(memsaver.attach(peer.kv))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(lease.tensor((1,), torch.uint8)) for lease in leases] == [1, 1]
    for item in leases:
        item.close()
    peer.ask(("release",))


def test_processes_that_hand_over_to_each_other_at_once(saver: MemorySaver, peer: Any, monkeypatch: Patch) -> None:
    """Each has its saver locked and waits for the other's: one of them gives way, soon."""
    _around("offer", monkeypatch, before=lambda: (peer.hear(), peer.tell("go")))
    peer.tell(("meet", saver.pool_ticket()))
    started = time.monotonic()
    with contextlib.suppress(memsaver.LeaseError):
        saver.pause(release="hand_over", to=peer.pool)
    peer.hear()
    assert time.monotonic() - started < SOON
    paused, committed, _ = peer.ask(("report",))
    assert saver.is_paused("kv") != paused == (peer.pid < os.getpid())
    assert committed + saver.report().committed_bytes == 2 * SIZE
    peer.ask(("release",))


def test_two_savers_that_hand_over_to_each_other_at_once(device: str, saver: MemorySaver, monkeypatch: Patch) -> None:
    other, ready = MemorySaver(device), threading.Barrier(2)
    kv = other.empty(SIZE, torch.uint8, tag="kv")
    original = lease.owner_of

    def owner_of(name: str) -> Owner:
        ready.wait(5)
        return original(name)

    monkeypatch.setattr(lease, "owner_of", owner_of)

    def give(giver: MemorySaver, to: memsaver.PoolTicket) -> None:
        with contextlib.suppress(memsaver.LeaseError):
            giver.pause(release="hand_over", to=to)

    started = time.monotonic()
    pairs = (saver, other.pool_ticket()), (other, saver.pool_ticket())
    threads = [threading.Thread(target=give, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < SOON
    assert saver.report().committed_bytes + other.report().committed_bytes == 2 * kv.nbytes
    other.check_integrity()
    other.close()


@contextlib.contextmanager
def _busy(saver: MemorySaver) -> Iterator[None]:
    """Another thread is in an operation of the saver, and stays there."""
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with saver._lock:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    yield
    leave.set()
    thread.join()


def test_a_lease_that_comes_too_late_is_given_back(saver: MemorySaver, monkeypatch: Patch) -> None:
    ticket = saver.share("kv")
    monkeypatch.setattr(lease, "TIMEOUT_SECONDS", 0.1)
    with _busy(saver), pytest.raises(memsaver.LeaseError, match=r"gave no answer for 0.1 s"):
        memsaver.attach(ticket)
    monkeypatch.setattr(lease, "TIMEOUT_SECONDS", 10.0)
    with memsaver.attach(ticket) as again:  # its answer comes after the late one
        assert int(again.tensor((1,), torch.uint8)) == 2
    assert saver.report().tags["kv"].leases == 0
    saver.pause()


def test_a_busy_owner_refuses_before_its_peer_gives_up(saver: MemorySaver, monkeypatch: Patch) -> None:
    monkeypatch.setattr("memsaver.share.BUSY_SECONDS", 0.1)
    ticket = saver.share("kv")
    with _busy(saver), pytest.raises(memsaver.LeaseError, match=rf"process {os.getpid()} is busy for 0.1 s"):
        memsaver.attach(ticket)
    memsaver.attach(ticket).close()

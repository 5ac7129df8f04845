"""Borrowed pages go back, and stay while they are used, however borrower, owner or driver ends: counted exactly."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.backends.peer import peer_backend
from memsaver.imports import imports
from tests.helpers.memory import family_bytes, open_fds, settled_fds
from tests.helpers.peers import Peer
from tests.memsaver.lending import MIB, SIZE, THEIRS, World

ERROR = {"cpu": errno.ENOMEM, "cuda:0": 2}  # CUDA_ERROR_OUT_OF_MEMORY


def _bytes(device: str) -> int:
    """That are held, where they can be counted exactly whatever torch and other processes do."""
    return family_bytes(device) if device == "cpu" else 0


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause under a lease gives up at once."""
    monkeypatch.setattr("memsaver.switch._LEASE_GRACE_SECONDS", 0.05)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_saver_that_ends_gives_it_back(device: str, how: str) -> None:
    World(device).close()  # loads what the first use loads
    gc.collect()
    floor = len(imports), _bytes(device)
    world = World(device)
    world.borrow()
    if how == "close":
        world.saver.close()
    cycle: list[Any] = [world.first, world.rest, world.saver]
    cycle.append(cycle)
    del cycle, world.saver, world.first, world.rest
    assert how == "close" or world.owner.report().tags["params"].leases == 1
    gc.collect()
    _until(lambda: not world.owner.report().tags["params"].leases)  # a thread tells the owner
    world.owner.pause()
    world.owner.check_integrity()
    assert (len(imports), _bytes(device)) == floor
    world.owner.close()


SIDES: dict[str, Callable[[World], Any]] = {
    "borrower": lambda world: world.saver._backend,
    "owner": lambda world: world.owner._backend,
    "importer": lambda world: peer_backend(world.saver._backend.device_key),
}


@pytest.mark.parametrize("side", SIDES)
def test_every_driver_call_fails_once(side: str, device: str) -> None:
    World(device).close()  # loads what the first use loads
    fds = settled_fds()
    floor = len(imports), _bytes(device)
    raised = 0
    for call in itertools.count(1):
        world = World(device)
        backend = SIDES[side](world)
        backend.inject_fault(call, ERROR[device])
        try:
            world.borrow()
            assert world.seen() == THEIRS
            world.saver.pause("weights")
        except memsaver.MemSaverError:
            raised += 1
            world.check()
            assert world.saver.is_paused("weights") or world.seen() == THEIRS
        fired = backend.inject_fault(0, 0) >= call
        if world.saver.is_paused("weights"):
            assert world.owner.report().tags["params"].leases == 0
            world.borrow()
        assert world.seen() == THEIRS
        world.saver.pause()
        world.owner.pause()
        world.owner.resume()
        world.saver.resume()
        world.rest.fill_(1)
        world.close()
        del world
        if not fired:
            break
    assert raised >= 1 + (side == "borrower")
    gc.collect()
    # Connections are closed by threads; a round that left one would leave as many as there were rounds.
    _until(lambda: (len(imports), _bytes(device)) == floor and open_fds() <= fds)


def test_a_pause_that_fails_at_another_tag_leaves_it_borrowed(device: str) -> None:
    world = World(device)
    other = world.saver.empty(MIB, torch.uint8, tag="other").fill_(5)
    world.borrow()
    for call in itertools.count(1):
        world.saver._backend.inject_fault(call, ERROR[device])
        with contextlib.suppress(memsaver.BackendError):
            world.saver.pause()
        world.saver._backend.inject_fault(0, 0)
        world.check()
        if world.saver.is_paused("weights"):
            break
        assert world.seen() == THEIRS and int(other[-1]) == 5
    assert call == 4, "it waits and unmaps both; what fails after that leaves it paused"
    assert world.saver.is_paused("other") and world.owner.report().tags["params"].leases == 0
    world.close()


def _own(pipe: Connection, device: str) -> None:
    """The owner, in another process: does what it is asked."""
    saver = MemorySaver(device)
    params = saver.empty(SIZE, torch.uint8, tag="params", elastic=True).fill_(1)
    pipe.send(saver.share("params", writable=True))
    while True:
        op, *arguments = pipe.recv()
        try:
            if op == "fill":
                params.fill_(arguments[0])
                saver._backend.synchronize()
            if op in ("pause", "resume"):
                getattr(saver, op)()
            saver.check_integrity()
            value = None if saver.is_paused("params") else int(params[0])
            exports = saver.statistics()["export"].calls if "export" in saver.statistics() else 0
            pipe.send((value, saver.report().tags["params"].leases, exports, open_fds()))
        except memsaver.LeaseError as error:
            pipe.send(str(error))


@contextlib.contextmanager
def _owner(device: str) -> Iterator[tuple[Peer, memsaver.Ticket]]:
    peer = Peer(_own, device)
    try:
        yield peer, peer.hear()
    finally:
        peer.bury()


def _borrower(device: str) -> tuple[MemorySaver, torch.Tensor]:
    saver = MemorySaver(device)
    weights = saver.empty(4 * MIB, torch.uint8, tag="weights").fill_(77)
    saver.pause()
    return saver, weights


def test_another_process_lends(device: str) -> None:
    gc.collect()
    floor = len(imports)
    with _owner(device) as (peer, ticket):
        saver, weights = _borrower(device)
        resting = []
        for value in range(10, 15):
            assert peer.ask(("fill", value))[0] == value
            saver.borrow("weights", ticket)
            saver.check_integrity()
            assert int(weights[-1]) == value
            weights.fill_(value + 100)
            saver._backend.synchronize()
            assert peer.ask(("look",))[:2] == (value + 100, 1)
            saver.pause("weights")
            resting.append((*peer.ask(("look",))[1:], open_fds(), len(imports)))
        assert len(set(resting)) == 1 and resting[0][:2] == (0, 2), "exported or imported more than once"
        saver.borrow("weights", ticket)
        message = peer.ask(("pause",))
        assert f"leased: 'params' by process {os.getpid()}" in message
        saver.pause("weights")
        assert peer.ask(("pause",))[0] is None
        assert len(imports) == floor, "revoked when the memory left"
        with pytest.raises(memsaver.LeaseError, match="'params' is paused"):
            saver.borrow("weights", ticket)
        peer.ask(("resume",))
        assert peer.ask(("fill", 3))[0] == 3
        saver.borrow("weights", ticket)
        assert int(weights[-1]) == 3
        saver.close()


def test_the_pages_outlive_their_owner(device: str) -> None:
    gc.collect()
    floor, fds, held = len(imports), open_fds(), _bytes(device)
    with _owner(device) as (peer, ticket):
        saver, weights = _borrower(device)
        peer.ask(("fill", 21))
        saver.borrow("weights", ticket)
        peer.kill()
        assert peer.dies_within(10)
        assert bool((weights == 21).all())
        weights.fill_(22)
        saver.check_integrity()
        assert bool((weights == 22).all())
        if device == "cpu":
            assert _bytes(device) - held == SIZE, "the kernel keeps them for the borrower"
        saver.pause("weights")
        saver.check_integrity()
        _until(lambda: len(imports) == floor)
        assert _bytes(device) == held
        with pytest.raises(memsaver.LeaseError, match="does not answer"):
            saver.borrow("weights", ticket)
        saver.resume()
        weights.fill_(5)
        saver.close()
    _until(lambda: open_fds() <= fds)


def _borrow_and_wait(pipe: Connection, device: str, ticket: memsaver.Ticket) -> None:
    saver, weights = _borrower(device)
    saver.borrow("weights", ticket)
    pipe.send(int(weights[-1]))
    if device == "cpu":
        pipe.send(_forked(saver, weights))
    pipe.recv()


def _forked(saver: MemorySaver, weights: torch.Tensor) -> int:
    """The exit status of a child that lets go of a borrowed tag."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    with contextlib.suppress(BaseException):
        try:
            saver.pause()
        except memsaver.StateError:
            del saver, weights
            gc.collect()
            os._exit(0)
    os._exit(1)


def test_a_borrower_that_is_killed_has_given_it_back(device: str) -> None:
    """And its forked child has nothing to give back."""
    world = World(device)
    peer = Peer(_borrow_and_wait, device, world.owner.share("params"))
    assert peer.hear() == 3
    if device == "cpu":
        assert peer.hear() == 0
    assert world.owner.report().tags["params"].leases == 1
    with pytest.raises(memsaver.LeaseError, match=f"'params' by process {peer.pid}"):
        world.owner.pause()
    peer.bury()
    _until(lambda: not world.owner.report().tags["params"].leases)
    world.owner.pause()
    world.close()

"""Borrowed pages go back, and stay while they are used, however borrower, owner or driver ends: counted exactly."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.backends.peer import peer_backend
from memsaver.imports import imports
from tests.helpers.memory import family_bytes, open_fds
from tests.helpers.memsaver.lending import SIZE, THEIRS, World
from tests.helpers.memsaver.remote import RemoteSaver, remote_saver
from tests.helpers.memsaver.savers import MIB, every_call, until

pytestmark = pytest.mark.alone


def _bytes(device: str) -> int:
    """That are held, where they can be counted exactly whatever torch and other processes do."""
    return family_bytes(device) if device == "cpu" else 0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause under a lease gives up at once."""
    monkeypatch.setattr("memsaver.switch.LEASE_GRACE_SECONDS", 0.05)


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
    until(lambda: not world.owner.report().tags["params"].leases)  # a thread tells the owner
    world.owner.pause()
    world.owner.check_integrity()
    assert (len(imports), _bytes(device)) == floor
    world.owner.close()


SIDES: dict[str, Callable[[World], Any]] = {
    "borrower": lambda world: world.saver.backend,
    "owner": lambda world: world.owner.backend,
    "importer": lambda world: peer_backend(world.saver.backend.device_key),
}


@pytest.mark.parametrize("side", SIDES)
def test_every_driver_call_fails_once(side: str, device: str, fds: int) -> None:
    World(device).close()  # loads what the first use loads
    floor = len(imports), _bytes(device)
    raised = 0
    for fault in every_call(device):
        world = World(device)
        try:
            with fault.at(SIDES[side](world)):
                world.borrow()
                assert world.seen() == THEIRS
                world.saver.pause("weights")
        except memsaver.MemSaverError:
            raised += 1
            world.check()
            assert world.saver.is_paused("weights") or world.seen() == THEIRS
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
    assert raised >= 1 + (side == "borrower")
    gc.collect()
    # Connections are closed by threads; a round that left one would leave as many as there were rounds.
    until(lambda: (len(imports), _bytes(device)) == floor and open_fds() <= fds)


def test_a_pause_that_fails_at_another_tag_leaves_it_borrowed(device: str) -> None:
    world = World(device)
    other = world.saver.empty(MIB, torch.uint8, tag="other").fill_(5)
    world.borrow()
    for fault in every_call(device):
        with fault.at(world.saver.backend), contextlib.suppress(memsaver.BackendError):
            world.saver.pause()
        world.check()
        if world.saver.is_paused("weights"):
            break
        assert world.seen() == THEIRS and int(other[-1]) == 5
    assert fault.call == 4, "it waits and unmaps both; what fails after that leaves it paused"
    assert world.saver.is_paused("other") and world.owner.report().tags["params"].leases == 0
    world.close()


@pytest.fixture
def lender(device: str) -> Iterator[RemoteSaver]:
    """The owner, in another process."""
    with remote_saver(device, nbytes=SIZE, elastic=True) as lender:
        yield lender


def _borrower(device: str) -> tuple[MemorySaver, torch.Tensor]:
    saver = MemorySaver(device)
    weights = saver.empty(4 * MIB, torch.uint8, tag="weights").fill_(77)
    saver.pause()
    return saver, weights


def test_another_process_lends(device: str, fds: int, lender: RemoteSaver) -> None:
    floor = len(imports)
    saver, weights = _borrower(device)
    resting = []
    for value in range(10, 15):
        lender.fill(value)
        saver.borrow("weights", lender.ticket)
        saver.check_integrity()
        assert int(weights[-1]) == value
        weights.fill_(value + 100)
        saver.backend.synchronize()
        assert lender.look()[0] == value + 100 and lender.report().tags["t"].leases == 1
        saver.pause("weights")
        resting.append((lender.report().tags["t"].leases, lender.exports(), lender.held(), open_fds(), len(imports)))
    assert len(set(resting)) == 1 and resting[0][:2] == (0, 2), "exported or imported more than once"
    saver.borrow("weights", lender.ticket)
    with pytest.raises(memsaver.LeaseError, match=f"leased: 't' by process {os.getpid()}"):
        lender.pause()
    saver.pause("weights")
    lender.pause()
    assert len(imports) == floor, "revoked when the memory left"
    with pytest.raises(memsaver.LeaseError, match="'t' is paused"):
        saver.borrow("weights", lender.ticket)
    lender.resume()
    lender.fill(3)
    saver.borrow("weights", lender.ticket)
    assert int(weights[-1]) == 3
    saver.close()


def test_the_pages_outlive_their_owner(device: str, fds: int) -> None:
    floor, held = len(imports), _bytes(device)
    with remote_saver(device, nbytes=SIZE, elastic=True) as lender:
        saver, weights = _borrower(device)
        lender.fill(21)
        saver.borrow("weights", lender.ticket)
        lender.kill()
        assert bool((weights == 21).all())
        weights.fill_(22)
        saver.check_integrity()
        assert bool((weights == 22).all())
        if device == "cpu":
            assert _bytes(device) - held == SIZE, "the kernel keeps them for the borrower"
        saver.pause("weights")
        saver.check_integrity()
        until(lambda: len(imports) == floor)
        assert _bytes(device) == held
        with pytest.raises(memsaver.LeaseError, match="does not answer"):
            saver.borrow("weights", lender.ticket)
        saver.resume()
        weights.fill_(5)
        saver.close()
    until(lambda: open_fds() <= fds)


def test_a_borrower_that_is_killed_has_given_it_back(device: str) -> None:
    """And its forked child has nothing to give back."""
    world = World(device)
    with remote_saver(device, nbytes=4 * MIB) as borrower:
        assert borrower.borrow(world.owner.share("params")) == (0, 3)
        if device == "cpu":
            assert borrower.pause_in_child() == 0
        assert world.owner.report().tags["params"].leases == 1
        with pytest.raises(memsaver.LeaseError, match=f"'params' by process {borrower.pid}"):
            world.owner.pause()
        borrower.kill()
    until(lambda: not world.owner.report().tags["params"].leases)
    world.owner.pause()
    world.close()

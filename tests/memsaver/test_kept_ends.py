"""Kept leases end with their process, their owner, their keeper, and under threads. (Any order: test_stateful.)"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from memsaver import KeptLeases, LeaseError, StateError, Ticket
from memsaver.imports import imports
from tests.helpers.memory import family_bytes
from tests.helpers.memsaver.remote import remote_saver
from tests.helpers.memsaver.savers import MIB, at_once, busy, shared, until
from tests.helpers.peers import Peer

pytestmark = pytest.mark.alone
SIZE = 4 * MIB


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses wait for uses that end, on any machine."""
    monkeypatch.setattr("memsaver.switch.LEASE_GRACE_SECONDS", 60.0)


def _first(kept: KeptLeases, ticket: Ticket) -> int:
    with kept.use(ticket) as lease:
        return int(lease.tensor((1,), torch.uint8))


def _keep(pipe: Connection, ticket: Ticket) -> None:
    kept = KeptLeases()
    pipe.send(_first(kept, ticket))
    pipe.recv()


def test_a_process_that_dies_keeps_nothing(device: str) -> None:
    saver, tensor, ticket = shared(device)
    peer = Peer(_keep, ticket)
    assert peer.hear() == 1 and saver.report().tags["t"].leases == 1
    peer.bury()
    saver.pause()  # notices while it waits
    assert saver.report().tags["t"].leases == 0
    saver.close()
    del tensor


def test_the_pages_of_an_owner_that_died_are_let_go(device: str) -> None:
    """Idle ones at once, so that its memory is free; used ones with the use."""
    before, here = family_bytes(device), len(imports)
    for used in (False, True):
        with remote_saver(device, nbytes=SIZE) as owner, contextlib.ExitStack() as uses:
            kept = KeptLeases()
            lease = uses.enter_context(kept.use(owner.ticket))
            if not used:
                uses.close()
            owner.kill()
            if used:
                until(lambda lease=lease: lease.owner.endpoint.closed)
                assert int(lease.tensor((1,), torch.uint8)) == 1
        until(lambda lease=lease: lease.closed)
        if device == "cpu":
            until(lambda: (family_bytes(device), len(imports)) == (before, here))
        with pytest.raises(LeaseError, match="does not answer"), kept.use(owner.ticket):
            pass
        kept.close()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_an_owner_that_closes_or_is_dropped(how: str, device: str) -> None:
    kept = KeptLeases()
    saver, tensor, ticket = shared(device)
    with kept.use(ticket) as lease:
        pass
    if how == "close":
        saver.close()
    del saver, tensor
    gc.collect()
    until(lambda: lease.closed)
    with pytest.raises(LeaseError, match="does not answer"), kept.use(ticket):
        pass
    kept.close()


def test_a_keeper_that_is_dropped_ends_its_leases(device: str) -> None:
    saver, tensor, ticket = shared(device)
    kept: Any = KeptLeases()
    with kept.use(ticket) as lease:
        pass
    kept.cycle = kept
    with busy(saver):  # the finalizer must not want what such a thread holds
        threads = threading.active_count()
        del kept
        gc.collect()
        until(lambda: lease.closed)
        assert threading.active_count() == threads
    assert not saver.report().tags["t"].leases
    saver.close()
    del tensor


@pytest.mark.parametrize("device", ["cpu"])  # CUDA does not survive a fork
def test_a_forked_child_is_inert(device: str) -> None:
    saver, tensor, ticket = shared(device)
    kept = KeptLeases()
    assert _first(kept, ticket) == 1
    if not (child := os.fork()):
        code = 1
        with contextlib.suppress(BaseException):
            with pytest.raises(StateError, match="forked child"), kept.use(ticket):
                pass
            kept.close()
            del kept
            gc.collect()
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert saver.report().tags["t"].leases == 1 and _first(kept, ticket) == 1
    saver.pause()
    kept.close()
    saver.close()
    del tensor


def test_threads_use_while_the_owner_pauses_and_resumes(device: str) -> None:
    """Each use sees what the owner wrote after its last resume; nobody waits for long."""
    saver, tensor, ticket = shared(device)
    kept, stop, seen = KeptLeases(), threading.Event(), set()

    def use() -> None:
        while not stop.is_set():
            with contextlib.suppress(LeaseError), kept.use(ticket) as lease:  # paused now
                ends = lease.tensor((SIZE,), torch.uint8)[:: SIZE - 1].tolist()
                assert ends[0] == ends[1] or 0 in ends, ends
                seen.add(ends[0])

    def own() -> None:
        try:
            for value in range(1, 80):
                saver.pause()
                saver.resume()
                tensor[-1] = 0
                tensor[0] = value
                tensor[-1] = value
                time.sleep(0.002)
        finally:
            stop.set()

    at_once(own, use, use, use)
    assert len(seen) > 1
    kept.close()
    assert saver.report().tags["t"].leases == 0
    saver.check_integrity()
    saver.close()


def test_owners_that_keep_each_others_pages_pause_at_once(device: str) -> None:
    """Each holds its lock and asks the other's thread, which needs none; a lease that is not given back is an error."""
    sides = [shared(device) for _ in range(2)]
    kept = KeptLeases()
    for _ in range(5):
        for _, _, ticket in sides:
            _first(kept, ticket)
        at_once(*(saver.pause for saver, _, _ in sides))
        for saver, _, _ in sides:
            assert saver.is_paused("t")
            saver.resume()
    kept.close()
    for saver, _, _ in sides:
        saver.close()

"""Leases that stay mapped between uses: never in their owner's way, and never of pages that the tag
has left; they end with their process, their owner, their keeper, and under threads. (Any order:
test_stateful, test_processes.)
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memsaver
from memsaver import Lease, LeaseCache, LeaseError, MemorySaver, StateError, Ticket
from memsaver.memory.page_pool import imports
from memsaver.sharing.client import peer_backend
from tests.helpers.memory import counted, family_bytes
from tests.helpers.memsaver.remote import remote_saver
from tests.helpers.memsaver.savers import MIB, at_once, busy, until

pytestmark = pytest.mark.alone
SIZE = 4 * MIB


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a lease without need, or does not give an idle one back, is found out on any
    machine.
    """
    monkeypatch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 60.0)


class World:
    """A saver whose tag "weights" has one tensor, and leases of it that are kept in the same
    process.
    """

    def __init__(self, device: str) -> None:
        self.saver, self.kept = MemorySaver(device), LeaseCache()
        self.tensor = self.saver.empty(SIZE, torch.uint8, tag="weights").fill_(1)
        self.ticket = self.saver.share("weights", writable=True)

    @property
    def leases(self) -> int:
        return self.saver.report().tags["weights"].leases

    def write(self, value: int) -> Lease:
        """Through the kept lease, and seen by the owner."""
        with self.kept.use(self.ticket) as lease:
            lease.tensor((SIZE,), torch.uint8).fill_(value)
        assert int(self.tensor[0]) == int(self.tensor[-1]) == value
        return lease


@pytest.fixture
def world(device: str) -> Iterator[World]:
    made = World(device)
    yield made
    made.kept.close()
    made.saver.check_integrity()
    made.saver.close()


def _first(kept: LeaseCache, ticket: Ticket) -> int:
    with kept.use(ticket) as lease:
        return int(lease.tensor((1,), torch.uint8))


def test_a_lease_is_mapped_once_until_a_pause_moves_the_pages(world: World, device: str) -> None:
    before = world.write(2)
    assert world.leases == 1 and world.write(2) is before
    world.saver.pause(release="retain")
    world.saver.resume()
    assert before.closed and world.leases == 0
    again = world.write(3)
    assert again is not before and world.write(5) is again
    assert len(again.owner.recalls) == 1, "the connection forgets those that have ended"
    held, committed = family_bytes(device), world.saver.report().committed_bytes
    world.saver.pause()
    world.saver.trim()
    assert held - family_bytes(device) == counted(committed, device, 2), (
        "no page stays with a lease"
    )
    with pytest.raises(LeaseError, match="'weights' is paused"), world.kept.use(world.ticket):
        pass
    world.saver.resume()


def test_one_in_use_is_waited_for_and_then_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.kept.use(world.ticket):
        pausing = threading.Thread(target=world.saver.pause)
        pausing.start()
        time.sleep(0.1)
        assert not world.saver.is_paused("weights")
    pausing.join()
    assert world.saver.is_paused("weights")
    world.saver.resume()
    world.tensor.fill_(1)
    monkeypatch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 0.05)
    with world.kept.use(world.ticket) as lease:
        with pytest.raises(LeaseError, match="leased: 'weights' by process"):
            world.saver.pause("weights")
        assert not world.saver.is_paused("weights")
        lease.tensor((SIZE,), torch.uint8).fill_(7)
        # the owner has given up, and may be asked for another
        with world.kept.use(world.ticket) as again:
            assert again is not lease and int(again.tensor((1,), torch.uint8)) == 7
    assert lease.closed and not again.closed and world.leases == 1


def test_uses_of_threads_share_it(world: World) -> None:
    with world.kept.use(world.ticket) as one, world.kept.use(world.ticket) as other:
        assert one is other and world.leases == 1
    assert not one.closed
    meet = threading.Barrier(4)

    def work() -> int:
        with fresh.use(world.ticket) as lease:
            meet.wait(60)  # each has its own, or another's
            return int(lease.tensor((1,), torch.uint8))

    with LeaseCache() as fresh:
        assert at_once(*[work] * 4) == [1] * 4 and world.leases == 2  # one of them stays
    assert world.leases == 1


def test_a_tag_that_has_grown_is_mapped_anew_where_that_is_needed(world: World) -> None:
    first = world.write(2)
    more = world.saver.empty(SIZE, torch.uint8, tag="weights").fill_(8)
    assert world.write(3) is first
    with world.kept.use(world.ticket, at_least=2 * SIZE) as lease:
        seen = lease.tensor((SIZE,), torch.uint8, world.saver.offset_of(more))
        assert int(seen[-1]) == 8
    assert first.closed and world.leases == 1 and world.write(4) is lease


def test_rights_and_tags_are_kept_apart_until_close(world: World) -> None:
    world.saver.empty(10, tag="other")
    tickets = [world.saver.share("weights"), world.ticket, world.saver.share("other")]
    for _ in range(2):
        for ticket in tickets:
            with world.kept.use(ticket):
                pass
    assert world.leases == 2
    world.saver.pause("other")
    assert world.leases == 2
    with world.kept.use(world.ticket) as lease:
        world.kept.close()
        assert int(lease.tensor((1,), torch.uint8)) == 1, "a use keeps its pages"
    assert lease.closed and world.leases == 0
    with pytest.raises(StateError, match="closed; make new ones"), world.kept.use(world.ticket):
        pass


def test_a_driver_that_refuses_is_asked_again(world: World) -> None:
    lease = world.write(2)
    backend: Any = peer_backend(world.ticket.device_key)
    backend.inject_fault(1, 2)
    world.saver.pause("weights")  # the recall is repeated
    assert lease.closed
    world.saver.resume("weights")
    again = world.write(3)
    backend.inject_fault(1, 2)
    with pytest.raises(memsaver.BackendError):
        world.kept.close()
    world.kept.close()
    assert again.closed and world.leases == 0


def test_a_recall_that_overtakes_the_lease_is_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner grants a lease, and pauses before it is mapped."""
    original = memsaver.sharing.lease.import_all
    pausing = threading.Thread(target=world.saver.pause)

    def import_all(*arguments: Any) -> None:
        pausing.start()
        time.sleep(0.1)
        original(*arguments)

    monkeypatch.setattr(memsaver.sharing.lease, "import_all", import_all)
    with world.kept.use(world.ticket):
        pass
    pausing.join()
    assert world.saver.is_paused("weights") and world.leases == 0
    world.saver.resume()


def test_the_pages_of_an_owner_that_died_are_let_go(device: str) -> None:
    """Idle ones at once, so that its memory is free; used ones with the use."""
    before, here = family_bytes(device), len(imports)
    for used in (False, True):
        with remote_saver(device, nbytes=SIZE) as owner, contextlib.ExitStack() as uses:
            kept = LeaseCache()
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
    world = World(device)
    lease, kept, ticket = world.write(1), world.kept, world.ticket
    if how == "close":
        world.saver.close()
    del world
    gc.collect()
    until(lambda: lease.closed)
    with pytest.raises(LeaseError, match="does not answer"), kept.use(ticket):
        pass
    kept.close()


def test_a_keeper_that_is_dropped_ends_its_leases(world: World) -> None:
    kept: Any = LeaseCache()
    assert _first(kept, world.ticket) == world.leases == 1
    kept.cycle = kept
    with busy(world.saver):  # the finalizer must not want what such a thread holds
        threads = threading.active_count()
        del kept
        gc.collect()
        assert threading.active_count() == threads
    until(lambda: not world.leases)


@pytest.mark.parametrize("device", ["cpu"])  # CUDA does not survive a fork
def test_a_forked_child_begins_with_leases_of_its_own(world: World, device: str) -> None:
    kept, ticket = world.kept, world.ticket
    assert _first(kept, ticket) == 1
    if not (child := os.fork()):
        code = 1
        with contextlib.suppress(BaseException):
            assert _first(kept, ticket) == 1 and world.saver.backend.forked
            kept.close()
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    until(lambda: world.leases == 1)
    assert _first(kept, ticket) == 1
    world.saver.pause()


def test_threads_use_while_the_owner_pauses_and_resumes(world: World) -> None:
    """Each use sees what the owner wrote after its last resume; nobody waits for long."""
    stop, seen = threading.Event(), set()

    def use() -> None:
        while not stop.is_set():
            # paused now
            with contextlib.suppress(LeaseError), world.kept.use(world.ticket) as lease:
                ends = lease.tensor((SIZE,), torch.uint8)[:: SIZE - 1].tolist()
                assert ends[0] == ends[1] or 0 in ends, ends
                seen.add(ends[0])

    def own() -> None:
        try:
            for value in range(1, 80):
                world.saver.pause()
                world.saver.resume()
                for at, number in ((-1, 0), (0, value), (-1, value)):
                    world.tensor[at] = number
                time.sleep(0.002)
        finally:
            stop.set()

    at_once(own, use, use, use)
    assert len(seen) > 1
    world.kept.close()
    assert world.leases == 0


def test_owners_that_keep_each_others_pages_pause_at_once(device: str) -> None:
    """Each holds its lock and asks the other's thread, which needs none; a lease that is not given
    back is an error.
    """
    sides, kept = [World(device) for _ in range(2)], LeaseCache()
    for _ in range(5):
        for side in sides:
            _first(kept, side.ticket)
        at_once(*(side.saver.pause for side in sides))
        for side in sides:
            assert side.saver.is_paused("weights")
            side.saver.resume()
    kept.close()
    for side in sides:
        side.saver.close()
